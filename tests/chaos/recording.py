"""meshtrain that records the batches of each step: `torchrun recording.py train run.toml`.

Every process writes into the directory RECORD. With PAUSE every step takes so many seconds longer,
so that there is time to disturb it. `read_samples` joins the files.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from meshtrain import cli
from meshtrain.runtime.environment import rank_from_environment, world_size_from_environment
from meshtrain.training import loop

Samples = dict[int, tuple[list[int], list[list[int]]]]
"""step, from 0 -> sample ids and token rows of the full global batch, as `samples_seen` returns"""


def recording_step(context: Any, step: int, batch: dict[str, Tensor], sample_ids: np.ndarray) -> Any:
    """Run the step, and record its batch when it has ended."""
    time.sleep(float(os.environ.get("PAUSE", "0")))
    result = true_step(context, step, batch, sample_ids)
    mesh = context.pipeline.mesh
    place = mesh.get_local_rank("dp_replicate") * mesh["dp_shard"].size() + mesh.get_local_rank("dp_shard")
    seen = {"step": step, "ids": sample_ids.tolist(), "place": place, "tokens": batch["input_ids"].tolist()}
    process = {"time": time.time(), "rank": rank_from_environment(), "processes": world_size_from_environment()}
    with (Path(os.environ["RECORD"]) / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(seen | process) + "\n")
    return result


def read_samples(directory: Path) -> tuple[Samples, int]:
    """Return the samples of every step's last run, and how many steps ran more than once."""
    lines = [line for path in directory.glob("*.jsonl") for line in path.read_text().splitlines()]
    by_step: dict[int, list[dict[str, Any]]] = {}
    for entry in sorted(map(json.loads, lines), key=lambda entry: entry["time"]):
        by_step.setdefault(entry["step"], []).append(entry)
    samples, repeated = {}, 0
    for step, entries in sorted(by_step.items()):
        # Processes that stopped at once may belong to a mesh that did not finish this step.
        rows = {entry["place"]: entry for entry in entries if entry["processes"] == entries[-1]["processes"]}
        assert all(entry["ids"] == entries[-1]["ids"] for entry in rows.values())
        samples[step] = (entries[-1]["ids"], [row for place in sorted(rows) for row in rows[place]["tokens"]])
        repeated += len({(entry["processes"], entry["rank"]) for entry in entries}) < len(entries)
    return samples, repeated


if __name__ == "__main__":
    true_step, loop.train_step = loop.train_step, recording_step
    cli.main()
