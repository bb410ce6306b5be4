"""Damage the files of checkpoints at random, and count how many damages are found.

python -m tests.chaos.damage [--times 200] [--seed 0]

Two ranks save two checkpoints of a small run. Then, repeatedly, one file of the newer one is
damaged: a flipped bit, a truncation, a deletion, or the same file of the other step. Each damage
must be named, and the older checkpoint loaded. Plain DCP loads the same damage for comparison.
"""

import argparse
import logging
import random
import shutil
import tempfile
from collections import Counter
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from meshtrain.checkpoint.dcp.reading import read_metadata, tensor_entries
from meshtrain.checkpoint.dcp.store import write_checkpoint
from meshtrain.checkpoint.manifest import Manifest
from meshtrain.checkpoint.storage.integrity import find_damage, newest_intact_checkpoint
from meshtrain.checkpoint.storage.publishing import Retention
from tests.ranks import run_on_ranks

DAMAGES = ("flipped bit", "truncation", "deletion", "file of another step")


def damage_at_random(checkpoint: Path, kind: str, stream: random.Random, *, other: Path) -> str:
    """Damage one file in one way, and return its name.

    Args:
        checkpoint: the directory.
        kind: one of DAMAGES.
        stream: of the choices.
        other: a checkpoint of another step.
    """
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    file = stream.choice(files)
    name = file.relative_to(checkpoint).as_posix()
    if kind == "deletion":
        file.unlink()
    elif kind == "truncation":
        with file.open("r+b") as opened:
            opened.truncate(stream.randrange(file.stat().st_size))
    elif kind == "file of another step":
        if file.read_bytes() == (other / name).read_bytes():
            return damage_at_random(checkpoint, kind, stream, other=other)
        shutil.copy(other / name, file)
    else:
        content = bytearray(file.read_bytes())
        content[stream.randrange(len(content))] ^= 1 << stream.randrange(8)
        file.write_bytes(content)
    return name


def save_two(root: Path) -> None:
    """Save steps 10 and 20 with different values."""
    for step in (10, 20):
        values = {f"model.{index}": torch.full((40, 50), float(step + index)) for index in range(4)}
        names = ("plan_hash", "model_type", "architecture", "data_identity")
        manifest = Manifest(step=step, seed=0, global_batch_size=8, mesh={}, **dict.fromkeys(names, ""))
        write_checkpoint(root, values, manifest=manifest, huggingface=_configure, retention=Retention(newest=2))


def dcp_notices(checkpoint: Path, expected: Path) -> bool:
    """Return whether DCP raises, or loads the saved values in spite of the damage."""
    tensors, wanted = {}, {}
    for directory, into in ((checkpoint, tensors), (expected, wanted)):
        entries = tensor_entries(read_metadata(expected))
        into.update({key: torch.zeros(entry.size, dtype=entry.properties.dtype) for key, entry in entries.items()})
        try:
            dcp.load(into, checkpoint_id=directory, no_dist=True)
        except BaseException:  # noqa: BLE001 - any exception of DCP counts, also a BaseException
            return True
    return all(torch.equal(tensors[key], wanted[key]) for key in wanted)


def _configure(directory: Path) -> None:
    (directory / "config.json").write_text('{"model_type": "gpt2"}\n')


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    stream = random.Random(options.seed)
    found, fallen_back, by_dcp, tried = Counter(), Counter(), Counter(), Counter()
    # DCP prints a traceback for each damage that it detects.
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as temporary:
        whole = Path(temporary) / "whole"
        run_on_ranks(2, save_two, whole)
        for number in range(options.times):
            kind = DAMAGES[number % len(DAMAGES)]
            root = Path(shutil.copytree(whole, Path(temporary) / "damaged"))
            name = damage_at_random(root / "step-20", kind, stream, other=root / "step-10")
            tried[kind] += 1
            found[kind] += any(f"step-20/{name}" in str(problem) for problem in find_damage(root / "step-20"))
            with redirect_stdout(StringIO()):  # every damage is shown
                fallen_back[kind] += newest_intact_checkpoint(root) == root / "step-10"
            by_dcp[kind] += dcp_notices(root / "step-20", whole / "step-20")
            shutil.rmtree(root)
    print(f"{'damage':24}{'done':>6}{'named':>8}{'fallback':>10}{'DCP alone':>12}")
    for kind in DAMAGES:
        print(f"{kind:24}{tried[kind]:6}{found[kind]:8}{fallen_back[kind]:10}{by_dcp[kind]:12}")
    totals = [sum(counts.values()) for counts in (tried, found, fallen_back, by_dcp)]
    print("{:24}{:6}{:8}{:10}{:12}".format("all", *totals))


if __name__ == "__main__":
    main()
