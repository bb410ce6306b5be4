"""Measure the cost of finding and reading samples, and how long training waits for batches.

`python -m tests.benchmarks.loading` measures random access in a mixture of 10^12 samples and in a
token file of 10^12 tokens (sparse: it takes no disk space), and the waits of short runs of every
kind of data. `--small` makes it quick.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np

from meshtrain.config.run import EvaluationConfig
from meshtrain.config.toml import dump_toml
from meshtrain.data.samples.mixture import MixedSource, MixtureOrder
from meshtrain.data.samples.order import SampleOrder
from meshtrain.data.samples.rows import PackedSamples
from meshtrain.data.tokens.token_file import ArrayFile, TokenCounts, TokenFile
from tests.training.runs import steps_of
from tests.training.test_data import run_of

BATCH, SEQUENCE, TIMES, STEPS, STEPS_WHEN_SMALL = 512, 2048, 50, 40, 4
WEIGHTS = (0.45, 0.3, 0.15, 0.07, 0.03)
KINDS = ("mixture", "uneven", "chat", "stream", "streams")


def microseconds(work: Callable[[int], object], steps: np.ndarray) -> float:
    """Return the median time of `work` for a step, in microseconds per sample."""
    times = []
    for step in steps.tolist():
        begin = time.perf_counter()
        work(step)
        times.append(time.perf_counter() - begin)
    return median(times) / BATCH * 1e6


def show_access(num_samples: int) -> None:
    """Time how samples of random steps are found, and read."""
    steps = np.random.default_rng(0).integers(0, num_samples // BATCH, TIMES)
    plain = SampleOrder(num_samples, global_batch_size=BATCH)
    sources = [MixedSource(str(number), num_samples, weight) for number, weight in enumerate(WEIGHTS)]
    mixture = MixtureOrder(sources, global_batch_size=BATCH)
    print(f"{num_samples:.0e} samples, batches of {BATCH} at random steps, per sample:")
    print(f"  found in one source                   {microseconds(plain.sample_ids, steps):8.2f} us")
    print(f"  found in a mixture of {len(WEIGHTS)}               {microseconds(mixture.sample_ids, steps):8.2f} us")
    with tempfile.TemporaryDirectory() as directory:
        samples = PackedSamples(_sparse(Path(directory), num_samples), SEQUENCE, pad_id=0)
        order = SampleOrder(len(samples), global_batch_size=BATCH)
        steps %= order.steps_per_epoch
        read = microseconds(lambda step: samples.read(order.sample_ids(step)), steps)
        print(f"  found and read, {SEQUENCE} tokens each     {read:8.2f} us, of a file of {num_samples:.0e} tokens")


def _sparse(directory: Path, num_tokens: int) -> TokenFile:
    path = directory / "tokens.bin"
    with path.open("wb") as stream:
        stream.truncate(2 * num_tokens)
    counts = TokenCounts(1, num_tokens, 1, 0, 0, 0, 0.0, 300, "", "", "", "")
    tokens, offsets = ArrayFile(path, np.dtype(np.uint16), num_tokens), ArrayFile(path, np.dtype(np.int64), 2)
    return TokenFile(directory, counts, tokens, offsets)


def show_waits(steps: int, kinds: Sequence[str]) -> None:
    """Train a tiny model on every kind of data, and print how long its steps waited for batches."""
    print(f"waits for data in runs of {steps} steps, after the first:")
    for kind in kinds:
        with tempfile.TemporaryDirectory() as directory:
            folder = Path(directory)
            run = run_of(folder, kind, "out", (1, 1, 1, 1), steps=steps, evaluation=EvaluationConfig())
            (folder / "run.toml").write_text(dump_toml(run.model_copy(update={"self_checks": False})))
            command = [sys.executable, "-m", "meshtrain", "train", str(folder / "run.toml")]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            later = steps_of(folder / "out")[1:]
        waits = [step["data_seconds"] for step in later]
        share = sum(waits) / sum(step["seconds"] for step in later)
        print(
            f"  {kind:8} median {median(waits) * 1e6:6.0f} us, longest {max(waits) * 1e3:6.2f} ms, "
            f"{100 * share:.2f}% of the time of steps of {median(step['seconds'] for step in later) * 1e3:.0f} ms"
        )


def main(*, small: bool) -> None:
    """Print all measurements."""
    show_access(10**9 if small else 10**12)
    show_waits(STEPS_WHEN_SMALL if small else STEPS, KINDS[-1:] if small else KINDS)


if __name__ == "__main__":
    main(small="--small" in sys.argv)
