"""Measure seconds and memory until 2 ranks hold a pretrained model in shards, beside other loaders.

python -m tests.benchmarks.loading_weights [--repeat 4] [--directory /tmp]

A Llama of 1.345 billion float32 parameters (5.4 GB in 6 files) is written first and removed at the
end. All contenders are started by torchrun and take turns, with the files in the page cache. A
contender is done when every parameter of the rank has been multiplied in place, like in a first
step of training, because memory-mapped files are read only then. The slower rank counts. CPU
seconds are more reliable where others use the machine. Memory is resident (VmHWM), and the part of
it that belongs to the process alone (RssAnon).
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SHAPE: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 5504,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "tie_word_embeddings": False,
}
SMALL = {**SHAPE, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
FILE_BYTES = 10**9
GIB = 2**30
RANKS = 2


class AnonymousPeak(threading.Thread):
    """Samples repeatedly how much memory belongs to this process alone."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0

    def run(self) -> None:
        """Sample until the process ends."""
        while True:
            self.peak = max(self.peak, status_bytes("RssAnon"))
            time.sleep(0.01)


def status_bytes(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def load_with_meshtrain(folder: Path, **degrees: int) -> Iterable[Any]:
    """Load like a user's program."""
    import meshtrain

    model = meshtrain.parallelize(meshtrain.build_model(folder), {"mesh": degrees})
    meshtrain.load_weights(model, folder)
    return model.parameters()


def load_with_transformers(folder: Path, **sizes: int) -> Iterable[Any]:
    """Load with transformers' own parallelism."""
    import torch
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(**sizes)
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=config).parameters()


def load_full_and_shard(folder: Path) -> Iterable[Any]:
    """Load the full model on every rank, then shard it."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in (*model.model.layers, model):
        fully_shard(layer, mesh=mesh)
    return model.parameters()


def load_with_accelerate(folder: Path) -> Iterable[Any]:
    """Load full copies: without an accelerator, its FSDP plugin makes replicas (facts of 1.15)."""
    import torch
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch
    from transformers import AutoConfig, LlamaForCausalLM

    with init_empty_weights():
        model = LlamaForCausalLM(AutoConfig.from_pretrained(folder))
    return load_checkpoint_and_dispatch(model, folder, device_map={"": "cpu"}, dtype=torch.float32).parameters()


CONTENDERS = {
    "meshtrain tp=2": lambda folder: load_with_meshtrain(folder, tp=2),
    "meshtrain dp_shard=2": lambda folder: load_with_meshtrain(folder, dp_shard=2),
    "transformers tp_size=2": lambda folder: load_with_transformers(folder, tp_size=2),
    "transformers fsdp_size=2": lambda folder: load_with_transformers(folder, fsdp_size=2),
    "whole, then fully_shard": load_full_and_shard,
    "accelerate (whole copies)": load_with_accelerate,
}


def load_on_this_rank(name: str, folder: Path, started: float, answers: Path) -> None:
    """Load the weights, use them once, and write down seconds and memory."""
    anonymous = AnonymousPeak()
    anonymous.start()
    import torch.distributed as dist

    dist.init_process_group("gloo")
    parameters = list(CONTENDERS[name](folder))
    held = 0
    for parameter in parameters:
        local = parameter.detach()
        local = local.to_local() if hasattr(local, "to_local") else local
        local.mul_(1.5)
        held += local.nbytes
    answer = {
        "seconds": time.time() - started,
        "processor": sum(os.times()[:2]),
        "held": held,
        "resident": status_bytes("VmHWM"),
        "anonymous": max(anonymous.peak, status_bytes("RssAnon")),
    }
    (answers / f"{dist.get_rank()}.json").write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


def start(name: str, folder: Path) -> dict[str, float]:
    """Start the ranks, and return the maximum of each measurement."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), "-m"]
    with tempfile.TemporaryDirectory() as answers:
        rank = ["tests.benchmarks.loading_weights", "--rank", name, str(folder), str(time.time()), answers]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        # All modules as pip installs them: a checkout that may not keep bytecode compiles it at
        # every start.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        done = subprocess.run([*torchrun, *rank], env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
        found = [json.loads(file.read_text()) for file in Path(answers).iterdir()]
    return {key: max(answer[key] for answer in found) for key in found[0]}


def write_model(folder: Path, shape: dict[str, Any]) -> int:
    """Write a Llama of this shape, and return the bytes of its largest tensor."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**shape)
    with torch.device("meta"):
        parameters = dict(LlamaForCausalLM(config).named_parameters())
    config.architectures, config.dtype = ["LlamaForCausalLM"], "float32"
    config.save_pretrained(folder)
    files: list[list[str]] = [[]]
    for name, parameter in parameters.items():
        if sum(parameters[other].nbytes for other in files[-1]) + parameter.nbytes > FILE_BYTES:
            files.append([])
        files[-1].append(name)
    file_of_name = {}
    for number, names in enumerate(files, start=1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        values = {name: torch.full(parameters[name].shape, 0.01, dtype=torch.float32) for name in names}
        save_file(values, folder / file, metadata={"format": "pt"})
        file_of_name.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": sum(p.nbytes for p in parameters.values())}, "weight_map": file_of_name}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return max(parameter.nbytes for parameter in parameters.values())


def compare(names: list[str], folder: Path, largest: int, repeat: int) -> None:
    """Run the contenders in turn, and print the best of each."""
    answers: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(repeat):
        for name in names:
            answers[name].append(start(name, folder))
    best = {name: {key: min(answer[key] for answer in found) for key in found[0]} for name, found in answers.items()}
    ours = best[names[0]]
    print(f"{'':26}{'touched s':>10}{'ratio':>7}{'CPU s':>10}{'resident':>10}{'ratio':>7}{'anonymous':>10}   (MiB)")
    for name, answer in best.items():
        resident, anonymous = answer["resident"] / 2**20, answer["anonymous"] / 2**20
        print(
            f"{name:26}{answer['seconds']:10.2f}{answer['seconds'] / ours['seconds']:7.2f}{answer['processor']:10.2f}"
            f"{resident:10.0f}{answer['resident'] / ours['resident']:7.2f}{anonymous:10.0f}"
        )
    for name in (name for name in names if name.startswith("meshtrain")):
        bound = best[name]["held"] + largest + GIB
        peak = max(answer["resident"] for answer in answers[name])
        print(
            f"{name}: {peak / 2**20:.0f} MiB at most; {bound / 2**20:.0f} MiB are its shards + the largest tensor + "
            f"1 GiB: {'within' if peak <= bound else 'ABOVE'}"
        )


def main() -> None:
    """Print a line per contender: the best of the repetitions."""
    if len(sys.argv) == 6 and sys.argv[1] == "--rank":
        load_on_this_rank(sys.argv[2], Path(sys.argv[3]), float(sys.argv[4]), Path(sys.argv[5]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=4)
    parser.add_argument("--directory", type=Path, help="where the model is written for the time being")
    parser.add_argument("--small", action="store_true", help="a tiny model, and meshtrain alone")
    arguments = parser.parse_args()
    names = list(CONTENDERS)
    if arguments.small:
        names = [name for name in names if name.startswith("meshtrain")]
    elif importlib.util.find_spec("accelerate") is None:
        names.remove("accelerate (whole copies)")
        print("accelerate is not installed, and is left out: pip install accelerate")
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        largest = write_model(Path(folder), SMALL if arguments.small else SHAPE)
        compare(names, Path(folder), largest, 1 if arguments.small else arguments.repeat)


if __name__ == "__main__":
    main()
