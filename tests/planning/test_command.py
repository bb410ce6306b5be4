"""`meshtrain plan --gpu` says what a run needs, and whether it fits."""

from pathlib import Path
from typing import Any

import pytest

from meshtrain import cli
from meshtrain.planning import machine
from meshtrain.planning.changes import smaller
from meshtrain.planning.machine import GIB, find_machine, shipped_machines
from meshtrain.planning.simulation.rank import simulate_rank
from meshtrain.planning.simulation.run import SimulatedRun
from meshtrain.training.resolve import resolve_run
from tests.benchmarks.prediction import LLAMA
from tests.benchmarks.prediction import make_run as make_prediction
from tests.planning.cases import PLANS, make_run
from tests.planning.files import MACHINE, RUN, write_machine, write_run
from tests.ranks import run_on_ranks


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    return write_run(tmp_path)


def test_needs_are_shown_without_data_and_weights(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._exit_code(["plan", run_file, "--gpu", "h100-80gb", "--world-size", "2"]) == 0
    shown = capsys.readouterr().out
    assert "Memory of a process at its peak, in GiB" in shown
    assert "backward of microbatch" in shown
    assert "It fits h100-80gb: rank 0 needs the most" in shown
    assert "Assumed, not measured: 2 GiB for CUDA and NCCL" in shown


def test_processes_that_hold_less_are_shown_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uneven = RUN.replace("pp = 2", "dp_shard = 4").replace("vocab_size = 8000", "vocab_size = 8001")
    file = write_run(tmp_path, uneven)
    assert cli._exit_code(["plan", file, "--gpu", "h100-80gb", "--world-size", "4"]) == 0
    shown = capsys.readouterr().out
    rows = [line.split()[0] for line in shown.split("at its peak")[1].splitlines() if "backward of microbatch" in line]
    assert rows == ["0-2", "3"]
    assert "It fits h100-80gb: ranks 0-2 need the most" in shown


def test_change_that_makes_a_run_fit_is_named(
    run_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_machine(tmp_path, 0.16)
    assert cli._exit_code(["plan", run_file, "--gpu", file, "--world-size", "2"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "It does not fit" in shown
    assert "The largest part is activations" in shown
    change = shown.split("With ")[1].split(":")[0]
    assert cli._exit_code(["plan", run_file, "--gpu", file, "--world-size", "2", change]) == 0


def test_run_that_never_fits_is_told_so(run_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._exit_code(["plan", run_file, "--gpu", write_machine(tmp_path, 0.001), "--world-size", "2"]) == 1
    assert "shard over more processes" in " ".join(capsys.readouterr().out.split())


def speed_with(table: str) -> str:
    """Return the description of an H100 with another table, or one more."""
    text = (Path(machine.__file__).parent / "machines" / "h100-80gb.toml").read_text()
    name = table.splitlines()[0]
    before, _, rest = text.partition(name)
    return before + table + rest[rest.index("\n[") :] if rest else text + table


@pytest.mark.parametrize(
    ("gpu", "text", "message"),
    [
        ("h100-80g", None, "--gpu h100-80g: there is no such description; did you mean 'h100-80gb'?"),
        ("m.toml", 'reserved_gib = 1.0\nfragmentation = 0.0\nsource = "x"\n', "memory_gib: missing"),
        ("m.toml", MACHINE.format(memory=-1), "memory_gib: expected"),
        ("m.toml", MACHINE.format(memory=1) + "speed = 3\n", "speed: expected a table, found 3"),
        (
            "m.toml",
            MACHINE.format(memory=1).replace("reserved_gib = 0.0", "reserved_gib = 1.5"),
            "reserved_gib is 1.5, but the machine has 1 GiB",
        ),
        ("m.toml", speed_with("[speed.peak_tflops]\n"), "speed.peak_tflops: there is no rate"),
        ("m.toml", speed_with("[speed.peak_tflops]\nbf16 = 989\n"), "bf16"),
        ("m.toml", speed_with("[speed.messages.all_reduce]\ntwo = [[1e3, 1e-5]]\n"), "two"),
        ("m.toml", speed_with("[speed.messages.all_reduce]\n0 = [[1e3, 1e-5]]\n"), "speed.messages.all_reduce.0"),
        ("m.toml", speed_with("[speed.messages.allreduce]\n2 = [[1e3, 1e-5]]\n"), "allreduce"),
        ("m.toml", None, "no file 'm.toml'"),
    ],
)
def test_wrong_machine_is_one_line(
    gpu: str,
    text: str | None,
    message: str,
    run_file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path(gpu).write_text(text)
    assert cli._exit_code(["plan", run_file, "--gpu", gpu]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line


def test_world_size_that_does_not_fit_is_one_line(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._exit_code(["plan", run_file, "--gpu", "cpu", "--world-size", "3"]) == 2
    assert "3 is not a multiple of 2" in capsys.readouterr().err


def test_two_kinds_of_output_are_refused(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._exit_code(["plan", run_file, "--gpu", "cpu", "--toml"]) == 2
    assert "--toml shows the plan as a file" in capsys.readouterr().err


def test_processes_share_the_memory_of_a_cpu() -> None:
    one, four = find_machine("cpu", 1), find_machine("cpu", 4)
    assert one.memory_bytes == pytest.approx(4 * four.memory_bytes, rel=1e-6)


def test_shipped_machines_name_their_source() -> None:
    assert len(shipped_machines()) == 7
    for name in shipped_machines():
        found = find_machine(name, 1)
        assert found.config.source
        assert 30 * GIB < found.memory_bytes < 200 * GIB


def loop_over_experts(run: SimulatedRun) -> str:
    run.hf_config._experts_implementation = "eager"
    try:
        simulate_rank(run, 0)
    except Exception as error:  # noqa: BLE001 - the test compares it
        return f"{type(error).__name__}: {error}"
    return "simulated"


def test_operator_that_needs_values_is_named() -> None:
    (answer,) = run_on_ranks(1, loop_over_experts, make_run("mixtral", PLANS["one process"]), joins=False)
    assert answer == (
        "NotSimulated: the step of a mixtral cannot be simulated: aten.nonzero.default needs values, which are not "
        "known before a run; leave out --gpu; `meshtrain check` still shows the bytes of parameters, gradients and "
        "optimizer state"
    )


EACH, FREED = "reduce_gradients=each_microbatch", "reshard_after_forward=always"


@pytest.mark.parametrize(
    ("shard", "changes"),
    [
        ({"level": 1}, ["level=2", f"level=3 {FREED}", f"level=3 {FREED} {EACH}"]),
        ({"level": 2}, [f"level=3 {FREED} {EACH}"]),
        ({}, [EACH]),
        ({"reshard_after_forward": "never"}, [EACH, FREED, f"{FREED} {EACH}"]),
        ({"reduce_gradients": "each_microbatch"}, []),
    ],
)
def test_advice_shards_more(shard: dict[str, Any], changes: list[str]) -> None:
    config = make_prediction(LLAMA, 1, {"mesh": {"dp_shard": 2}, "shard": shard})
    plan = resolve_run(config, 2).plan
    found = [words for words, _ in smaller(config, plan, may_offload=False)]
    assert [words.replace("plan.shard.", "") for words in found if "plan.shard." in words] == changes
