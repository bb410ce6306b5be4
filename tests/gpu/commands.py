"""The cases that run meshtrain's commands."""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.gpu.outcome import Failed, Numbers, Setting, Skipped, check_close

ROOT = Path(__file__).parents[2]
SECONDS = 420
_SMALL_124M = (
    "plan.compile.enabled=false",
    "model.config.n_layer=2",
    "model.config.n_embd=64",
    "model.config.n_head=4",
    "model.config.vocab_size=512",
    "data.sequence_length=64",
    "global_batch_size=4",
    "micro_batch_size=2",
    "steps=3",
)
_RUN = """
run_directory = "out"
steps = 6
global_batch_size = 8
micro_batch_size = 2
evaluation = { every = 3, max_batches = 2 }
logging.every = 1

[model]
type = "llama"

[model.config]
vocab_size = 512
hidden_size = 64
intermediate_size = 128
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 2
max_position_embeddings = 64

[data]
train = ["text.jsonl"]
validation = 0.1
sequence_length = 64
tokenizer.vocab_size = 512
cache_directory = "cache"
"""


def run_command(setting: Setting, *arguments: str) -> str:
    """Run a command of meshtrain, and return what it has written.

    Raises:
        Failed: if it fails, with its last line.
    """
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "meshtrain", *arguments]
    done = subprocess.run(
        command,
        cwd=setting.folder,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    sys.stderr.write(f"$ meshtrain {' '.join(arguments)}\n{done.stdout}\n")
    if done.returncode:
        last = next((line for line in reversed(done.stdout.splitlines()) if line.strip()), "no output")
        raise Failed(f"meshtrain {arguments[0]} ended with {done.returncode}: {last}")
    return done.stdout


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run."""
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def losses_of(directory: Path) -> list[float]:
    """Return the losses of the steps of a run."""
    return [row["loss"] for row in read_metrics(directory) if "loss" in row]


def write_text(folder: Path) -> None:
    """Write a small corpus."""
    texts = [f"the quick brown fox {number} jumps over {number * 7} lazy dogs and sleeps" for number in range(400)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def quickstart(setting: Setting) -> Numbers:
    """Train the quickstart on one device, export it and write text with it."""
    out = setting.folder / "quickstart"
    overrides = [f"run_directory={out}", "plan.mesh.pp=1", "plan.mesh.tp=1"]
    overrides += ["plan.precision.compute=bfloat16"] if setting.device == "cuda" else []
    if setting.small:
        write_text(setting.folder)
        overrides += [f'data.train=["{setting.folder / "text.jsonl"}"]', "data.tokenizer.vocab_size=300", "steps=3"]
        overrides += ["model.config.n_embd=32"]
    output = run_command(setting, "train", str(ROOT / "launch/runs/quickstart.toml"), *overrides, "--processes", "1")
    run_command(setting, "export", str(out), str(out / "exported"))
    text = run_command(setting, "generate", str(out / "exported"), "--prompt", "def f(", "--max-new-tokens", "8")
    if "def f(" not in text:
        raise Failed("generate does not show the prompt")
    found = re.search(r"Validation loss ([\d.]+) .* text is ([\d.]+)", output.replace("\n", " "))
    if found is None:
        raise Failed("the run has not said its validation loss")
    numbers = {"validation_loss": float(found[1]), "unigram_entropy": float(found[2])}
    if not setting.small and numbers["validation_loss"] > numbers["unigram_entropy"] - 0.5:
        raise Failed("the model has not learned more than the frequencies of tokens", numbers)
    return numbers


def trained_124m(setting: Setting) -> Numbers:
    """Train the shipped run of GPT-2 124M for some steps."""
    out = setting.folder / "gpt2-124m"
    overrides = [f"run_directory={out}", "data.tokenizer.vocab_size=300", "logging.every=1"]
    if setting.small:
        write_text(setting.folder)
        overrides += [f'data.train=["{setting.folder / "text.jsonl"}"]', *_SMALL_124M]
    else:
        overrides += ["steps=40", "learning_rate.warmup_steps=10"]
    run_command(setting, "train", str(ROOT / "launch/runs/gpt2-124m.toml"), *overrides, "--processes", "1")
    rows = [row for row in read_metrics(out) if "loss" in row]
    first, last = rows[0], rows[-1]
    numbers = {name: last[name] for name in ("loss", "tokens_per_second", "memory_bytes")}
    if not last["loss"] < first["loss"]:
        raise Failed(f"the loss went from {first['loss']:.3f} to {last['loss']:.3f}", numbers)
    return {"first_loss": first["loss"], **numbers}


def _write_run(folder: Path) -> None:
    write_text(folder)
    (folder / "run.toml").write_text(_RUN)


def profiled(setting: Setting) -> Numbers:
    """Profile a few steps: a trace with kernels, and on a GPU a record of its memory."""
    _write_run(setting.folder)
    out = setting.folder / "profiled"
    run_command(setting, "train", "run.toml", f"run_directory={out}", "profile.steps=[3, 5]", "--processes", "1")
    events = json.loads(gzip.decompress((out / "profile/trace-rank-0.json.gz").read_bytes()))["traceEvents"]
    kernels = sum(event.get("cat") == "kernel" for event in events)
    numbers = {"events": float(len(events)), "kernels": float(kernels)}
    if setting.device == "cuda":
        if not (out / "profile/memory-rank-0.pickle").stat().st_size:
            raise Failed("the record of the memory is empty", numbers)
        if kernels == 0 and not setting.on_host:
            raise Failed("the trace has no kernels of the GPU", numbers)
    (summary,) = json.loads((out / "profile/summary.json").read_text())["ranks"]
    return {**numbers, "peak_gib": summary["peak_bytes"] / 2**30}


_EXPERTS = ("model.type=mixtral", "model.config.num_local_experts=4", "model.config.num_experts_per_tok=2")
_ASYNC_TP = ("plan.tensor.sequence_parallel=true", "plan.tensor.async_tp=true", "plan.compile.enabled=true")
MESHES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    # name: the axis of two processes, options of both runs, options of the run on two
    **{axis: (axis, (), ()) for axis in ("dp_shard", "tp", "pp", "cp")},
    "ep": ("ep", _EXPERTS, ()),
    "async_tp": ("tp", (), _ASYNC_TP),
}


def two_processes(setting: Setting, *, name: str) -> Numbers:
    """Train with two processes, and compare with one."""
    axis, of_both, of_two = MESHES[name]
    on_cuda = setting.device == "cuda"
    if on_cuda and torch.cuda.device_count() < 2:
        raise Skipped(f"needs 2 GPUs, found {torch.cuda.device_count()}")
    if name == "ep" and setting.on_host:
        raise Skipped("the device in host memory does not count integers, as grouped experts do")
    if name == "async_tp" and not (on_cuda and torch.cuda.can_device_access_peer(0, 1)):
        raise Skipped("needs 2 GPUs that reach each other's memory")
    _write_run(setting.folder)
    one, two = setting.folder / "-".join(["one", *of_both[:1]]), setting.folder / f"two-{name}"
    if not one.exists():
        run_command(setting, "train", "run.toml", f"run_directory={one}", *of_both, "--processes", "1")
    mesh = f"plan.mesh.{axis}=2"
    run_command(setting, "train", "run.toml", f"run_directory={two}", mesh, *of_both, *of_two, "--processes", "2")
    return {"loss_difference": check_close("loss", losses_of(two), losses_of(one), 1e-4)}
