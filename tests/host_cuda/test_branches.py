"""Every place of meshtrain that names CUDA runs, with real values, on a machine without a GPU.

The processes of these tests have a CUDA device on the host, see `device.cpp`. It cannot be loaded
into this process, which has imported torch.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.host_cuda.build import CAPABILITY, environment, why_not
from tests.host_cuda.reached import REACHED, find_places

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no CUDA device on the host: {REASON}")
Folder = Callable[[str], Path]

RUN = """
run_directory = "out"
steps = 4
global_batch_size = 8
micro_batch_size = 2
checkpoint = { every = 2, in_background = true }
evaluation = { every = 2, max_batches = 2 }
profile.steps = [2, 3]
logging.every = 1
optimizer.learning_rate = 1e-2

[model]
type = "llama"

[model.config]
vocab_size = 300
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 2
max_position_embeddings = 64

[data]
train = ["text.jsonl"]
validation = 0.1
sequence_length = 32
tokenizer.vocab_size = 300
cache_directory = "cache"
"""


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folder]:
    """Return a folder for each name, and one file for all executed places."""
    root = tmp_path_factory.mktemp("host_cuda")

    @cache
    def folder(name: str) -> Path:
        path = root / name
        path.mkdir()
        return path

    os.environ[REACHED] = str(root / "reached.txt")
    yield folder
    del os.environ[REACHED]


def start(folder: Path, *arguments: str, devices: int = 1, capability: str = "9.0") -> subprocess.CompletedProcess[str]:
    """Run a module in a process that has CUDA devices; none: in one that has only the CPU."""
    command = [sys.executable, "-m", *arguments]
    variables = {**environment(devices), CAPABILITY: capability} if devices else dict(os.environ)
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=200)
    finally:
        # Its ranks must not outlive a test that has failed.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@cache
def program(name: str, folder: Path, devices: int = 1) -> dict[str, Any]:
    """Run a program of `tests.host_cuda.programs` once, and return what it has found."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(devices), "-m"]
    arguments = ["tests.host_cuda.programs", name, str(folder)]
    done = start(folder, *(torchrun if devices > 1 else []), *arguments, devices=devices)
    assert done.returncode == 0, done.stderr[-5000:]
    # Other ranks may write after the first one.
    return json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{")))


@cache
def trained(folder: Path, devices: int, *overrides: str, on_cuda: bool = True) -> list[dict[str, Any]]:
    """Train with one process for each device, and return the metrics of the run."""
    (folder / "run.toml").write_text(RUN)
    texts = [f"the quick brown fox {number} jumps over {number * 7} lazy dogs and sleeps" for number in range(300)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    if on_cuda:
        done = start(folder, "meshtrain", "train", "run.toml", *overrides, "--processes", "gpus", devices=devices)
    else:
        done = start(folder, "meshtrain", "train", "run.toml", *overrides, "--processes", str(devices), devices=0)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]


def losses(metrics: list[dict[str, Any]]) -> list[float]:
    return [row[name] for row in metrics for name in ("loss", "eval_loss") if name in row]


def test_run_on_cuda_devices_learns_as_on_the_cpu(folders: Folder) -> None:
    on_cuda = trained(folders("pp"), 2, "plan.mesh.pp=2")
    plain = losses(trained(folders("cpu"), 2, "plan.mesh.pp=2", on_cuda=False))
    assert losses(on_cuda) == pytest.approx(plain, rel=1e-5)
    # The host's memory of a process would be hundreds of megabytes.
    assert all(0 < row["memory_bytes"] < 20e6 for row in on_cuda if "memory_bytes" in row)
    profile = folders("pp") / "out" / "profile"
    assert {path.name for path in profile.glob("memory-rank-*.pickle")} == {
        "memory-rank-0.pickle",
        "memory-rank-1.pickle",
    }


def test_parts_of_sequences_on_devices_learn_as_full_ones(folders: Folder) -> None:
    plain = losses(trained(folders("cpu"), 2, "plan.mesh.pp=2", on_cuda=False))
    assert losses(trained(folders("cp"), 2, "plan.mesh.cp=2")) == pytest.approx(plain, rel=1e-5)


def test_run_with_offloading_learns_as_without(folders: Folder) -> None:
    plain = losses(trained(folders("cpu"), 2, "plan.mesh.pp=2", on_cuda=False))
    offloaded = trained(folders("offload"), 2, "plan.mesh.dp_shard=2", "plan.shard.offload=cpu")
    assert losses(offloaded) == pytest.approx(plain, rel=1e-5)


def test_muon_with_offloading_learns_as_without(folders: Folder) -> None:
    """Matrices are computed on the devices, and their momentum is in host memory."""
    options = "plan.mesh.dp_shard=2", "optimizer.name=muon"
    plain = losses(trained(folders("muon"), 2, *options))
    offloaded = losses(trained(folders("muon-offload"), 2, *options, "plan.shard.offload=cpu"))
    assert offloaded == pytest.approx(plain, rel=1e-5)


def test_moments_in_8_bits_on_devices_learn_as_in_host_memory(folders: Folder) -> None:
    options = "plan.mesh.dp_shard=2", "optimizer.name=adamw-8bit", "model.config.hidden_size=64"
    on_cuda = losses(trained(folders("8-bit"), 2, *options))
    offloaded = losses(trained(folders("8-bit-offload"), 2, *options, "plan.shard.offload=cpu"))
    assert offloaded == pytest.approx(on_cuda, rel=1e-5)


def test_run_at_another_level_of_sharding_learns_as_without(folders: Folder) -> None:
    plain = losses(trained(folders("cpu"), 2, "plan.mesh.pp=2", on_cuda=False))
    level = ("plan.mesh.dp_shard=2", "plan.shard.level=2", "plan.shard.prefetch=2", "plan.shard.offload=cpu")
    assert losses(trained(folders("level"), 2, *level)) == pytest.approx(plain, rel=1e-5)


def test_run_in_float16_scales_its_loss(folders: Folder) -> None:
    metrics = trained(folders("float16"), 1, "plan.precision.compute=float16")
    plain = losses(trained(folders("cpu"), 2, "plan.mesh.pp=2", on_cuda=False))
    assert losses(metrics) == pytest.approx(plain, rel=1e-2)
    assert all(row["loss_scale"] > 1 for row in metrics if "loss_scale" in row)


def test_run_in_float8_learns_as_in_bfloat16(folders: Folder) -> None:
    metrics = trained(folders("float8"), 1, "plan.precision.compute=float8")
    plain = losses(trained(folders("cpu"), 2, "plan.mesh.pp=2", on_cuda=False))
    assert losses(metrics) == pytest.approx(plain, rel=1e-2)


TENSORWISE = ("plan.precision.compute=float8", "plan.precision.float8.recipe=tensorwise")


def test_weights_gathered_in_float8_learn_as_those_of_one_process(folders: Folder) -> None:
    one = losses(trained(folders("float8, tensorwise"), 1, *TENSORWISE))
    found = losses(trained(folders("float8, sharded"), 2, "plan.mesh.dp_shard=2", *TENSORWISE))
    assert found == pytest.approx(one, rel=1e-2)


@cache
def refused_float8(folder: Path, *more: str, capability: str = "8.6") -> subprocess.CompletedProcess[str]:
    float8 = ("plan.precision.compute=float8", *more)
    return start(folder, "meshtrain", "train", "run.toml", "run_directory=more", *float8, capability=capability)


def test_device_without_float8_is_refused(folders: Folder) -> None:
    trained(folders("pp"), 2, "plan.mesh.pp=2")
    done = refused_float8(folders("pp"))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "error: plan.precision.compute = 'float8' needs a GPU of NVIDIA with compute capability 8.9 or higher; NVIDIA "
        "H100 80GB HBM3 has 8.6; compute in bfloat16"
    )
    done = refused_float8(folders("pp"), "plan.precision.float8.recipe=mxfp8", capability="9.0")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "error: plan.precision.float8.recipe = 'mxfp8' needs a GPU of NVIDIA with compute capability 10.0 or higher; "
        "NVIDIA H100 80GB HBM3 has 9.0; take the recipe 'rowwise'"
    )


@cache
def refused_async_tp(folder: Path) -> subprocess.CompletedProcess[str]:
    async_tp = ("plan.tensor.async_tp=true", "plan.tensor.sequence_parallel=true", "plan.compile.enabled=true")
    overrides = ("run_directory=more", "plan.mesh.tp=2", *async_tp)
    return start(folder, "meshtrain", "train", "run.toml", *overrides, "--processes", "2", devices=2)


def test_devices_that_do_not_reach_each_other_are_refused(folders: Folder) -> None:
    trained(folders("pp"), 2, "plan.mesh.pp=2")
    done = refused_async_tp(folders("pp"))
    assert done.returncode == 2
    message = "error: tensor.async_tp: GPU 0 does not reach the memory of GPU 1; leave tensor.async_tp out"
    assert message in done.stderr.splitlines()


def test_eight_devices_learn_as_one_process(folders: Folder) -> None:
    overrides = ("plan.mesh.pp=2", "plan.mesh.dp_shard=2", "plan.mesh.tp=2", "plan.tensor.sequence_parallel=true")
    plain = losses(trained(folders("cpu"), 2, "plan.mesh.pp=2", on_cuda=False))
    assert losses(trained(folders("eight"), 8, *overrides)) == pytest.approx(plain, rel=1e-5)


@cache
def refused(folder: Path) -> subprocess.CompletedProcess[str]:
    return start(folder, "meshtrain", "train", "run.toml", "run_directory=more", "--processes", "2")


def test_more_processes_than_devices_are_refused(folders: Folder) -> None:
    trained(folders("pp"), 2, "plan.mesh.pp=2")
    done = refused(folders("pp"))
    assert done.returncode == 2
    assert "2 processes are started on this machine, which has 1 GPUs; start at most as many" in done.stderr


@cache
def generated(folder: Path) -> str:
    exported = start(folder, "meshtrain", "export", "out", "exported")
    assert exported.returncode == 0, exported.stderr
    done = start(folder, "meshtrain", "generate", "exported", "--prompt", "the quick", "--max-new-tokens", "4")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_export_generates_text_on_the_device(folders: Folder) -> None:
    trained(folders("pp"), 2, "plan.mesh.pp=2")
    assert "the quick" in generated(folders("pp"))


def test_own_loop_trains_loads_and_generates_on_the_device(folders: Folder) -> None:
    found = program("own_loop", folders("own_loop"))
    assert found["losses"] == sorted(found["losses"], reverse=True)
    assert {found["device"], found["device_of_pipeline"], found["written"]} == {"cuda:0"}
    assert found["foreach"] == [True]
    assert found["difference"] == 0
    assert found["draws_again"]
    assert found["records"]


def test_weights_are_loaded_through_pinned_memory(folders: Folder) -> None:
    assert program("loaded_by_blocks", folders("blocks")) == {"pinned": True, "same": True}


def test_own_process_group_needs_a_backend_for_both_devices(folders: Folder) -> None:
    found = program("own_group", folders("own_group"))
    assert found["nccl"].startswith("the process group has no backend for cpu; join with torch.distributed.init")
    assert found["cpu:gloo,cuda:nccl"] == "cuda:0"


def test_marks_take_their_time_from_events(folders: Folder) -> None:
    found = program("marks", folders("marks"))
    assert found["seconds"] == pytest.approx(found["host"], abs=5e-3)
    assert found["seconds"] != found["host"]


def test_calibration_measures_the_device(folders: Folder) -> None:
    text = program("calibrated", folders("calibrated"), 2)["text"]
    assert "is_asynchronous = true" in text
    assert "memory_gib = 80.0" in text
    assert "on NVIDIA H100 80GB HBM3" in text


def test_device_refuses_what_a_gpu_refuses(folders: Folder) -> None:
    found = program("mixed", folders("mixed"))
    for name in ("sum", "in place", "embedding", "list", "foreach"):
        assert found[name].startswith("RuntimeError: Expected all tensors to be on the same device"), name
    assert "generator" in found["generator"]
    assert "numpy" in found["numpy"]
    assert "invalid device ordinal" in found["device"]
    assert "enable_timing" in found["event"]
    assert found["argument"].startswith("TypeError")


def test_documents_on_the_device_compute_what_they_do_on_the_cpu(folders: Folder) -> None:
    found = program("documents", folders("documents"))
    assert {name: it["one kernel"] for name, it in found.items()} == {name: "bfloat16" in name for name in found}
    assert all(it["error"] < (1e-2 if it["one kernel"] else 1e-5) for it in found.values())
    separate = ("data.documents=separate", "model.prove_unknown_class=false")
    plain = losses(trained(folders("documents on the cpu"), 1, *separate, on_cuda=False))
    assert losses(trained(folders("documents on cuda"), 1, *separate)) == pytest.approx(plain, rel=1e-5)


def test_device_counts_memory(folders: Folder) -> None:
    found = program("memory", folders("memory"))
    assert found == {"now": 4000, "peak": 16000, "after": 0, "pinned": [True, False]}


def test_every_place_that_names_cuda_was_executed(folders: Folder) -> None:
    trained(folders("pp"), 2, "plan.mesh.pp=2")
    trained(folders("offload"), 2, "plan.mesh.dp_shard=2", "plan.shard.offload=cpu")
    trained(folders("float8, sharded"), 2, "plan.mesh.dp_shard=2", *TENSORWISE)
    refused(folders("pp"))
    refused_float8(folders("pp"))
    refused_async_tp(folders("pp"))
    generated(folders("pp"))
    folder_of = {
        "own_loop": "own_loop",
        "loaded_by_blocks": "blocks",
        "own_group": "own_group",
        "documents": "documents",
    }
    for name, folder in folder_of.items():
        program(name, folders(folder))
    program("calibrated", folders("calibrated"), 2)
    reached = set(Path(os.environ[REACHED]).read_text().split())
    places = find_places()
    assert len(places) > 60
    assert {place: line for place, line in places.items() if place not in reached} == {}
