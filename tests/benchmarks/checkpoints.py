"""Measure seconds and bytes to save and load a checkpoint, beside plain DCP and the disk itself.

python -m tests.benchmarks.checkpoints [--repeat 3] [--directory DIR]

Two ranks hold a sharded Llama of the throughput benchmark with AdamW's moments. The contenders take
turns and the best run of each counts, because the speed of a shared disk varies by a factor.
`stall` is how long a save in the background interrupts training. `verify` reads and hashes all
files before they are loaded.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from meshtrain.checkpoint.dcp.store import restore_checkpoint
from meshtrain.checkpoint.manifest import Manifest
from meshtrain.checkpoint.saver import Saver
from meshtrain.checkpoint.storage.integrity import find_damage
from meshtrain.checkpoint.storage.publishing import Retention
from meshtrain.models.layout import local_tensor
from meshtrain.training.state import saved_tensors
from tests.benchmarks.bare import CONFIG, SMALL
from tests.benchmarks.throughput import build_step_context
from tests.ranks import run_on_ranks


def timed(work: Callable[[], object]) -> float:
    """Return the seconds until all ranks have finished."""
    dist.barrier()
    begin = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - begin


def seconds_of_slowest(work: Callable[[], object]) -> float:
    """Return the seconds until the slowest rank continues, without a barrier."""
    dist.barrier()
    begin = time.perf_counter()
    work()
    seconds = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def raw_write(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write this rank's bytes and sync them to the disk."""
    with path.open("wb") as file:
        for tensor in tensors.values():
            file.write(memoryview(local_tensor(tensor).detach().contiguous().view(torch.uint8).numpy()).cast("B"))
        os.fsync(file.fileno())


def manifest(step: int) -> Manifest:
    """Return the manifest of a checkpoint that is never resumed."""
    names = ("plan_hash", "model_type", "architecture", "data_identity")
    return Manifest(step=step, seed=0, global_batch_size=8, mesh={}, **dict.fromkeys(names, ""))


def measure(directory: str, repeat: int, small: bool) -> dict[str, float]:
    """Return seconds by name, and the bytes."""
    CONFIG.update(SMALL if small else {})
    context = build_step_context({"dp_shard": 2})
    tensors = saved_tensors(context.pipeline, context.optimizer)
    root, rank = Path(directory), dist.get_rank()
    best: dict[str, float] = {}
    # Plain DCP removes nothing either.
    saver = Saver(root / "ours", Retention(newest=1000), in_background=False)
    background = Saver(root / "background", Retention(newest=1000), in_background=True)
    # The saver keeps its host memory from here on.
    background.save(tensors, manifest(0), None)

    def count(name: str, work: Callable[[], object]) -> None:
        best[name] = min(best.get(name, float("inf")), timed(work))

    for number in range(1, repeat + 1):
        plain, raw = root / f"dcp-{number}", root / f"raw-{rank}"
        background.finish()
        count("disk write", partial(raw_write, raw, tensors))
        count("dcp save", partial(dcp.save, tensors, checkpoint_id=plain))
        count("save", partial(saver.save, tensors, manifest(number), None))
        stood_still = seconds_of_slowest(partial(background.save, tensors, manifest(number), None))
        best["stall"] = min(best.get("stall", float("inf")), stood_still)
        background.finish()
        count("disk read", raw.read_bytes)
        count("dcp load", partial(dcp.load, tensors, checkpoint_id=plain))
        saved = root / "ours" / f"step-{number}"
        count("verify", partial(find_damage, saved))
        count("load", partial(restore_checkpoint, saved, tensors, is_verified=True))
        dist.barrier()
        if rank == 0:
            for done in (plain, saved, root / "background" / f"step-{number}"):
                shutil.rmtree(done)
    sizes = torch.tensor(sum(local_tensor(tensor).nbytes for tensor in tensors.values()))
    dist.all_reduce(sizes)
    return {**best, "bytes": float(sizes)}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--directory", default=None, help="on the disk to measure; a temporary one by default")
    parser.add_argument("--small", action="store_true", help="a tiny model, to see that the benchmark works")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        best = run_on_ranks(2, measure, directory, options.repeat, options.small, timeout=1200.0)[0]
    megabytes = best.pop("bytes") / 1e6
    print(f"{megabytes:,.0f} MB of parameters and moments on 2 ranks, best of {options.repeat}")
    for name, seconds in best.items():
        print(f"{name:12}{seconds:8.3f} s{megabytes / seconds:10,.0f} MB/s")
    print(f"hashing and manifest: {best['save'] / best['dcp save'] - 1:+.1%} of DCP's own save")
    print(f"training stands still for {best['stall'] / best['save']:.1%} of a save, if it goes on in the background")


if __name__ == "__main__":
    main()
