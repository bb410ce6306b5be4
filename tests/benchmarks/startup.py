"""Measure seconds from the command to the end of the first step on 2 ranks, beside bare loops.

python -m tests.benchmarks.startup [--repeat 3]

Both are started by torchrun and take turns. The tokens are prepared before, which a run does once;
the hand-written loops need none. The model is that of the throughput benchmark.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.benchmarks.bare import CONFIG, LAYOUTS, SMALL

RUN = """
run_directory = "run"
steps = 1
global_batch_size = 8
micro_batch_size = 2
[model]
type = "llama"
config = {config}
[data]
train = ["python-stdlib"]
sequence_length = 512
tokenizer = {{ vocab_size = 8192 }}
"""
TWO_RANKS = [layout for layout in LAYOUTS if layout != "1 rank"]


def bare_first_step(layout: str, done: Path) -> None:
    """Do one step of a hand-written loop under torchrun, and write its seconds to a file."""
    dist.init_process_group("gloo")
    step = LAYOUTS[layout][0]()
    tokens = torch.randint(0, CONFIG["vocab_size"], (8, 513))
    begin = time.perf_counter()
    step(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    if dist.get_rank() == 0:
        done.write_text(json.dumps({"seconds": time.perf_counter() - begin}) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def make_small(*, small: bool) -> None:
    """Shrink the model, but not its vocabulary: the tokenizer stays."""
    CONFIG.update({**SMALL, "vocab_size": CONFIG["vocab_size"]} if small else {})


def start(arguments: list[str], done: Path) -> tuple[float, float]:
    """Start 2 ranks; return the seconds until `done` has a step, and those of the step itself."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    begin = time.perf_counter()
    process = subprocess.Popen(
        [*torchrun, *arguments], stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    while (step := first_step(done)) is None:
        if process.poll() not in (None, 0):
            raise SystemExit(f"failed: {' '.join(arguments)}")
        time.sleep(0.01)
    seconds = time.perf_counter() - begin
    process.wait()
    return seconds, step


def first_step(done: Path) -> float | None:
    """Return the seconds of the first step in a file; None if it has none yet."""
    complete, _, _ = done.read_text().rpartition("\n") if done.exists() else ("", "", "")
    # Notes, such as that of the self check, have lines of their own.
    lines = [json.loads(line) for line in complete.splitlines()]
    return next((line["seconds"] for line in lines if "seconds" in line), None)


def main() -> None:
    """Print two lines per layout: the best of the repetitions."""
    if len(sys.argv) >= 4 and sys.argv[1] == "--bare":
        make_small(small=sys.argv[4:] == ["--small"])
        bare_first_step(sys.argv[2], Path(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="a tiny model, to see that the benchmark works")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        compare(Path(temporary), options.repeat, small=options.small)


def compare(directory: Path, repeat: int, *, small: bool) -> None:
    """Run both sides in turn."""
    make_small(small=small)
    config = "{ " + ", ".join(f"{name} = {json.dumps(value)}" for name, value in CONFIG.items()) + " }"
    run = directory / "run.toml"
    run.write_text(RUN.format(config=config))
    train = ["meshtrain", "train", str(run)]
    start([*train, f"run_directory={directory / 'warm'}"], directory / "warm/metrics.jsonl")
    print(f"{'layout':16}{'':12}{'to first step':>16}{'end of step 1':>16}   (seconds, best of {repeat})")
    for layout in TWO_RANKS:
        answers: dict[str, list[tuple[float, float]]] = {"bare": [], "meshtrain": []}
        degrees = [f"plan.mesh.{axis}={degree}" for axis, degree in LAYOUTS[layout][1].items()]
        for number in range(repeat):
            place = directory / f"{layout.replace(' ', '-')}-{number}"
            bare = ["tests.benchmarks.startup", "--bare", layout, str(place.with_suffix(".json"))]
            bare += ["--small"] if small else []
            answers["bare"].append(start(bare, place.with_suffix(".json")))
            answers["meshtrain"].append(start([*train, f"run_directory={place}", *degrees], place / "metrics.jsonl"))
        for side, seconds in answers.items():
            total, step = min(seconds)
            print(f"{layout:16}{side:12}{total - step:16.1f}{total:16.1f}", flush=True)


if __name__ == "__main__":
    main()
