"""How long training stands still for a checkpoint, and what hashing and the manifest cost.

    python -m tests.benchmarks.saving [--repeat 5] [--directory DIR]

Two ranks hold the sharded Llama of the throughput benchmark with AdamW's moments. In turns: plain DCP; our writer; our
writer in the background, of which only the time until `save` returns counts. Best of each, as ratios.
"""

import argparse
import shutil
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from meshtrain.checkpoint.directory import Retention
from meshtrain.checkpoint.saver import Saver
from meshtrain.models.layout import local_tensor
from meshtrain.training.state import saved_tensors
from tests.benchmarks.bare import CONFIG, SMALL
from tests.benchmarks.checkpoints import manifest, timed
from tests.benchmarks.throughput import build_trainer
from tests.ranks import run_on_ranks

# Plain DCP removes nothing either.
KEEP_ALL = Retention(newest=1000)


def measure(directory: str, repeat: int, small: bool) -> dict[str, float]:
    """Return the best seconds by name, and the bytes."""
    CONFIG.update(SMALL if small else {})
    trainer = build_trainer({"dp_shard": 2})
    tensors = saved_tensors(trainer.pipeline, trainer.optimizer)
    root = Path(directory)
    waiting = Saver(root / "waiting", KEEP_ALL, in_background=False)
    background = Saver(root / "background", KEEP_ALL, in_background=True)
    background.save(tensors, manifest(0), None)  # its host memory is kept from here on
    best: dict[str, float] = {}
    for number in range(1, repeat + 1):
        plain = root / f"dcp-{number}"
        background.finish()
        for name, work in (
            ("plain DCP", partial(dcp.save, tensors, checkpoint_id=plain)),
            ("meshtrain", partial(waiting.save, tensors, manifest(number), None)),
            ("meshtrain in the background", partial(background.save, tensors, manifest(number), None)),
        ):
            best[name] = min(best.get(name, float("inf")), timed(work))
        background.finish()
        dist.barrier()
        if dist.get_rank() == 0:
            for done in (plain, root / "waiting" / f"step-{number}", root / "background" / f"step-{number}"):
                shutil.rmtree(done)
    sizes = torch.tensor(sum(local_tensor(tensor).nbytes for tensor in tensors.values()))
    dist.all_reduce(sizes)
    return {**best, "bytes": float(sizes)}


def main() -> None:
    """Print the seconds, and the ratios that matter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--directory", default=None, help="on the disk to measure; a temporary one by default")
    parser.add_argument("--small", action="store_true", help="a tiny model, to see that the benchmark works")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        best = run_on_ranks(2, measure, directory, options.repeat, options.small, timeout=1200.0)[0]
    megabytes = best.pop("bytes") / 1e6
    print(f"{megabytes:,.0f} MB of parameters and moments on 2 ranks, best of {options.repeat}")
    for name, seconds in best.items():
        print(f"{name:30}{seconds:8.3f} s")
    plain, ours, stall = best.values()
    print(f"hashing, manifest, flushing directories: {ours / plain - 1:+.1%} of plain DCP's save")
    print(f"stall of a save in the background: {stall / ours:.1%} of a save that is waited for")


if __name__ == "__main__":
    main()
