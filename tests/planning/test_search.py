"""`meshtrain search` finds plans that fit, refuses contradictions, and writes a plan."""

import math
import re
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshtrain import cli
from meshtrain.config.run import RunConfig
from meshtrain.config.toml import load_run
from meshtrain.data.tokens.workers import num_cores
from meshtrain.errors import UserError
from meshtrain.planning.machine import Machine, find_machine
from meshtrain.planning.needs import find_needs
from meshtrain.planning.search.alternatives import variants
from meshtrain.planning.search.candidates import Candidate, candidates
from meshtrain.planning.search.estimate import Estimate, Estimator
from meshtrain.planning.search.kinds import build_estimator
from meshtrain.planning.search.ranking import promising, quickest_first, simulate_all
from meshtrain.planning.search.reasons import estimated_reason
from meshtrain.planning.search.update import _shares
from meshtrain.planning.search.wanted import Wanted, wanted_run
from meshtrain.training.matrix_exchange import Matrix, _with_owners, cost_of
from tests.planning.files import RUN as PIPELINE_RUN
from tests.planning.files import write_machine, write_run

ROOT = Path(__file__).parents[2]

RUN = (
    PIPELINE_RUN.replace("num_hidden_layers = 4", "num_hidden_layers = 8")
    .replace("global_batch_size = 16", "global_batch_size = 32")
    .replace("[plan.mesh]\npp = 2", '[plan.precision]\ncompute = "bfloat16"')
)
LAYERS, PROCESSES = 8, 4


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return write_run(Path(), RUN)


def machine_file(memory_gib: float) -> str:
    """Write the description of an H100 with another memory, and hosts of 4 processes."""
    shipped = (Path(__file__).parents[2] / "meshtrain/planning/machines/h100-80gb.toml").read_text()
    text = shipped.replace("memory_gib = 79.1", f"memory_gib = {memory_gib}").replace("= 2.0", "= 0.0")
    Path("machine.toml").write_text(text.replace("processes_per_host = 8", "processes_per_host = 4"))
    return "machine.toml"


def search(run_file: str, *options: str, memory_gib: float = 79.1, gpus: int = PROCESSES) -> int:
    machine = machine_file(memory_gib)
    return cli._exit_code(["search", run_file, *options, "--gpus", str(gpus), "--gpu", machine])


def config_of(run_file: str, *overrides: str) -> RunConfig:
    return load_run(run_file, overrides)


def test_fastest_plans_are_shown_and_the_first_is_written(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert search(run_file, "plan.mesh.pp=2", "plan.mesh.tp=1", "plan.shard.offload='none'", "--top", "3") == 0
    shown = capsys.readouterr().out
    assert "The fastest plans that fit machine.toml" in shown
    assert "Why the others lose" in shown
    written = tomllib.loads(Path("found-plan.toml").read_text())
    assert written["mesh"]["pp"] == 2
    assert written["mesh"]["tp"] == 1
    assert written["shard"]["offload"] == "none"
    command = " ".join(shown.split()).split("Train with it: ")[1]
    assert command.startswith("meshtrain train RUN plan=found-plan.toml micro_batch_size=")
    # `train` and `check` read runs alike.
    overrides = command.split(" RUN ")[1].split()
    assert cli._exit_code(["check", run_file, *overrides, "--world-size", str(PROCESSES)]) == 0


def test_more_time_simulates_more_plans(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for seconds in ("1", "60"):
        assert search(run_file, "plan.mesh.tp=1", "plan.shard.offload='none'", "--seconds", seconds) == 0
        shown = " ".join(capsys.readouterr().out.split())
        found.append(int(shown.partition(" promising or usual ones were simulated")[0].rpartition(" ")[2]))
    assert 1 <= found[0] < found[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["plan.mesh.tp=3"], "4 is not a multiple of 3"),
        (["plan.mesh.pp=16"], "16"),
        (["micro_batch_size=64"], "global_batch_size = 32 is not a multiple of"),
        (["plan.mesh.ttp=2"], "did you mean 'tp'?"),
        (
            ["plan.mesh.pp=4", "plan.pipeline.schedule='GPipe'", "micro_batch_size=32"],
            "no plan for 4 processes has the settings micro_batch_size, plan.mesh.pp, plan.pipeline.schedule",
        ),
        (["plan.mesh.ep=2"], "mesh.ep = 2: LlamaForCausalLM has no stacked experts; use ep = 1"),
        (["--out", "nowhere/plan.toml"], "--out: nowhere is not a directory"),
    ],
)
def test_contradictions_are_one_line(
    options: list[str], message: str, run_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert search(run_file, *options) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "Traceback" not in error


def test_as_many_plans_are_shown_as_asked_for(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    pinned = ["plan.mesh.pp=1", "plan.mesh.tp=1", "micro_batch_size=1"]
    assert search(run_file, *pinned, "--top", "2") == 0
    shown = capsys.readouterr().out
    table = shown.split("Why the others lose")[0].splitlines()
    assert [line.split()[0] for line in table if line[:1].isdigit()] == ["1", "2"]


def test_what_fixed_copies_leave_is_sharded(run_file: str) -> None:
    config = config_of(run_file, "plan.mesh.dp_replicate=4", "global_batch_size=64")
    pinned = ["plan.mesh.dp_replicate"]
    found = {it.dp_shard for it in candidates(config, pinned, 64, 4, 8) if it.pp == it.tp == 1}
    assert found == {16}


def test_no_plan_is_simulated_after_the_deadline_but_one_on_each_core(run_file: str) -> None:
    config = config_of(run_file)
    wanted = wanted_run(config, find_machine("h100-80gb", PROCESSES), PROCESSES)
    simulated, _ = simulate_all(wanted, CASES, deadline=0.0)
    assert len(simulated) == min(num_cores(), len(CASES))


def test_machine_without_speed_is_refused(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._exit_code(["search", run_file, "--gpus", "4", "--gpu", write_machine(Path(), 1.0)]) == 2
    assert "the description has no table [speed]" in capsys.readouterr().err


@pytest.mark.parametrize(
    "pinned",
    [["plan.mesh.pp=1", "plan.mesh.tp=1", "micro_batch_size=1"], ["plan.mesh.tp=2", "plan.recompute.mode='none'"]],
)
def test_that_nothing_fits_is_said_with_what_lacks(
    pinned: list[str], run_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert search(run_file, *pinned, memory_gib=0.01) == 2
    error = capsys.readouterr().err
    assert re.search(r"none of the \d+ plans that were simulated fits 4 machine.toml", error)
    assert "GiB too much" in error


def test_what_the_model_refuses_is_said(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    # Compiled layers cannot be computed under this schedule.
    pinned = ["plan.mesh.pp=2", "plan.pipeline.schedule='ZBVZeroBubble'", "plan.compile.enabled=true"]
    assert search(run_file, *pinned) == 2
    error = capsys.readouterr().err.strip()
    assert "ZBVZeroBubble" in error
    assert "Traceback" not in error


def test_layers_of_stages_stay_as_the_run_has_them(run_file: str) -> None:
    config = config_of(run_file, "plan.mesh.pp=2", "plan.pipeline.layers_per_stage=[3, 5]")
    wanted = wanted_run(config, find_machine("h100-80gb", PROCESSES), PROCESSES)
    case = candidate(2, 1, 2, 1, 4)
    assert wanted.resolved(case).plan.pipeline.layers_per_stage == [3, 5]
    assert case.plan(config.plan).pipeline.layers_per_stage == [3, 5]
    assert sum(wanted.resolved(replace(case, pp=4, dp_shard=1)).plan.pipeline.layers_per_stage) == LAYERS


def test_plans_that_cut_blocks_of_moments_are_contradictions(run_file: str) -> None:
    config = config_of(run_file, "optimizer.name='adamw-8bit'", "model.config.hidden_size=64")
    wanted = wanted_run(config, find_machine("h100-80gb", PROCESSES), PROCESSES)
    assert wanted.contradiction(candidate(1, 1, 4, 1, 4)) is None
    assert "o_proj.weight has rows of 64 numbers, of which a process would hold 32" in str(
        wanted.contradiction(candidate(1, 1, 2, 2, 4))
    )


def test_wrong_rule_is_told_as_check_does(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = Path(run_file).read_text()
    Path(run_file).write_text(text + '[plan.tensor.styles]\n"model.layers.*.mlp.down_proj" = "colwise"\n')
    assert search(run_file, "plan.mesh.tp=2", "plan.mesh.pp=1") == 2
    told = capsys.readouterr().err.strip()
    overrides = ["plan.mesh.tp=2", "plan.mesh.dp_shard=2", "plan.tensor.sequence_parallel=true"]
    assert cli._exit_code(["check", run_file, *overrides, "--world-size", "4"]) == 2
    assert told == capsys.readouterr().err.strip()


def estimates_of(seconds: dict[Candidate, float], peak_bytes: float = 1.0) -> dict[Candidate, Estimate]:
    return {it: Estimate(value, lambda: peak_bytes) for it, value in seconds.items()}


def test_plans_that_are_about_as_fast_are_ordered_by_the_time_of_a_simulation() -> None:
    slow, quick, late = CASES[5], CASES[4], CASES[0]
    estimates = estimates_of({slow: 1.0, quick: 1.02, late: 1.5})
    assert quickest_first([slow, quick, late], estimates, 3.0) == [quick, slow, late]
    assert quickest_first([], {}, 1.0) == []
    # What may not fit comes behind the others.
    assert quickest_first([slow, quick, late], {**estimates, quick: Estimate(0.5, lambda: 3.1)}, 3.0)[-1] == quick


def test_offloading_is_tried_only_where_a_plan_does_not_fit_without() -> None:
    here = CASES[4]
    away = replace(here, offload="cpu")
    estimates = estimates_of({here: 1.0, away: 2.0})
    assert promising(estimates, limit_bytes=2.0) == [here]
    too_large = {**estimates, here: Estimate(1.0, lambda: 3.0)}
    assert promising(too_large, limit_bytes=2.0) == [away]
    # What is a little too large in closed form may fit.
    assert promising({here: Estimate(1.0, lambda: 2.1)}, limit_bytes=2.0) == [here]


def test_loss_parallelism_is_chosen_by_seconds_among_plans_that_fit() -> None:
    parts = CASES[3]
    whole = replace(parts, loss_parallel=False)
    assert promising(estimates_of({parts: 1.0, whole: 1.1}), limit_bytes=2.0) == [parts]
    assert promising(estimates_of({parts: 1.1, whole: 1.0}), limit_bytes=2.0) == [whole]
    assert promising(estimates_of({parts: 1.0, whole: 1.0}), limit_bytes=2.0) == [parts]
    too_large = {parts: Estimate(1.1, lambda: 1.0), whole: Estimate(1.0, lambda: 3.0)}
    assert promising(too_large, limit_bytes=2.0) == [parts]


def test_winner_is_compared_with_the_other_form_of_the_loss() -> None:
    parts = CASES[3]
    whole = replace(parts, loss_parallel=False)
    assert variants(parts)["with whole logits"] == whole
    assert variants(whole)["with loss parallelism"] == parts
    assert not {"with whole logits", "with loss parallelism"} & {*variants(CASES[0])}


def test_few_plans_of_one_mesh_are_promising() -> None:
    same = [replace(CASES[0], micro_batch_size=2**power) for power in range(6)]
    estimates = estimates_of({it: float(number) for number, it in enumerate([*same, CASES[3]], start=1)})
    assert promising(estimates, limit_bytes=2.0) == [*same[:4], CASES[3]]


def test_reason_of_a_plan_that_was_not_simulated() -> None:
    machine = find_machine("h100-80gb", PROCESSES)
    fast, slow, large = (Estimate(seconds, lambda size=size: size) for seconds, size in ((1, 2), (1.5, 2), (1, 2**40)))
    assert estimated_reason(slow, fast, machine) == "estimated: about +50% seconds"
    assert estimated_reason(fast, slow, machine) == "estimated about as fast, not simulated"
    assert "GiB too much" in estimated_reason(large, fast, machine)


def test_every_setting_is_varied_unless_it_is_pinned(run_file: str) -> None:
    found = list(candidates(config_of(run_file), [], 8, LAYERS, 4))
    assert len(set(found)) == len(found)
    for it in found:
        assert it.pp * it.dp_replicate * it.dp_shard * it.tp == 8
        assert it.tp <= 4, "tp stays inside a host"
        assert 32 % (it.data_degree * it.micro_batch_size) == 0
    assert {it.offload for it in candidates(config_of(run_file), [], 8, LAYERS, 4, may_offload=False)} == {"none"}
    options: dict[str, set[Any]] = {
        "pp": {1, 2, 4, 8},
        "tp": {1, 2, 4},
        "recompute": {"none", "selective", "full"},
        "sequence_parallel": {True, False},
        "loss_parallel": {True, False},
        "reshard": {"always", "never"},
        "offload": {"none", "cpu"},
    }
    for name, values in options.items():
        assert {getattr(it, name) for it in found} == values, name
    assert {it.schedule for it in found if it.pp > 1} >= {"1F1B", "Interleaved1F1B", "ZBVZeroBubble"}
    assert {it.loss_parallel for it in found if it.tp == 1} == {True}
    pinned = ["plan.mesh.tp", "plan.recompute.mode", "micro_batch_size"]
    config = config_of(run_file, "plan.mesh.tp=2", "plan.recompute.mode='full'", "micro_batch_size=2")
    few = list(candidates(config, pinned, 8, LAYERS, 4))
    assert {(it.tp, it.recompute, it.micro_batch_size) for it in few} == {(2, "full", 2)}
    assert len({it.pp for it in few}) > 1


def test_candidates_keep_the_level_of_sharding(run_file: str) -> None:
    found = list(candidates(config_of(run_file, "plan.shard.level=2"), [], 8, LAYERS, 4))
    assert {it.reshard for it in found} == {"never"}
    assert {it.schedule for it in found} == {"1F1B", "Interleaved1F1B"}
    assert not [it for it in found if it.dp_replicate > 1 and it.dp_shard == 1]


def candidate(pp: int, replicate: int, shard: int, tp: int, rows: int, **changed: Any) -> Candidate:
    usual = Candidate(
        pp=pp,
        dp_replicate=replicate,
        dp_shard=shard,
        tp=tp,
        schedule="1F1B",
        stages_per_rank=1,
        micro_batch_size=rows,
        recompute="none",
        sequence_parallel=tp > 1,
        reshard="never",
        offload="none",
    )
    return replace(usual, **changed)


CASES = [
    candidate(1, 1, 4, 1, 4, reshard="always"),
    candidate(1, 1, 4, 1, 2, recompute="full"),
    candidate(1, 4, 1, 1, 4),
    candidate(1, 1, 1, 4, 8),
    candidate(1, 1, 1, 4, 8, loss_parallel=False),
    candidate(2, 1, 2, 1, 4),
    candidate(2, 1, 1, 2, 4, schedule="Interleaved1F1B", stages_per_rank=2),
    candidate(4, 1, 1, 1, 2, schedule="ZBVZeroBubble", stages_per_rank=2),
]


ALL_AT_ONCE = candidate(2, 1, 2, 1, 1, schedule="GPipe")


def deviations(estimator: Estimator, wanted: Wanted, case: Candidate) -> tuple[float, float]:
    """Return how far memory and seconds in closed form are from those of the simulation."""
    estimate, needs = estimator.estimate(case), find_needs(wanted.resolved(case), wanted.machine)
    assert needs.time is not None
    found = estimate.peak_bytes / needs.peak_bytes - 1, estimate.seconds / needs.time.seconds - 1
    print(f"{case.described():60} memory {found[0]:+.1%} seconds {found[1]:+.1%}")
    return found


def assert_near(
    estimator: Estimator, wanted: Wanted, cases: Sequence[Candidate], *, seconds: float, memory: float = math.inf
) -> None:
    """Compare candidates in closed form with their simulations."""
    for case in cases:
        off = deviations(estimator, wanted, case)
        assert abs(off[0]) <= memory, case.described()
        assert abs(off[1]) <= seconds, case.described()


def test_closed_form_agrees_with_the_simulation(run_file: str) -> None:
    shipped: Machine = find_machine("h100-80gb", PROCESSES)
    config = config_of(run_file)
    wanted = wanted_run(config, shipped, PROCESSES)
    estimator = build_estimator(wanted, [*CASES, ALL_AT_ONCE])
    assert_near(estimator, wanted, CASES, memory=0.15, seconds=0.25)
    # Its logits wait for the backward passes, too.
    at_once = find_needs(wanted.resolved(ALL_AT_ONCE), shipped).peak_bytes
    assert estimator.estimate(ALL_AT_ONCE).peak_bytes == pytest.approx(at_once, rel=0.25)


def with_messages(wanted: Wanted, **messages: float) -> Wanted:
    """Return a run on a CPU on which each kind of messages takes some seconds for a byte."""
    config = wanted.machine.config
    assert config.speed is not None
    curves = {name: {str(PROCESSES): [(1.0, seconds)]} for name, seconds in messages.items()}
    speed = config.speed.model_copy(update={"messages": curves, "is_asynchronous": False})
    machine = replace(wanted.machine, config=config.model_copy(update={"speed": speed}))
    return replace(wanted, machine=machine)


@pytest.mark.parametrize(
    "case",
    [candidate(2, 1, 2, 1, 4), candidate(2, 1, 2, 1, 4, recompute="full"), candidate(2, 1, 1, 2, 4)],
    ids=Candidate.described,
)
def test_closed_form_knows_the_size_of_messages_between_stages(case: Candidate, run_file: str) -> None:
    wanted = wanted_run(config_of(run_file), find_machine("h100-80gb", PROCESSES), PROCESSES)
    wanted = with_messages(wanted, send=1.0)
    needs = find_needs(wanted.resolved(case), wanted.machine)
    number, size = needs.totals[0].messages["pp", "send"]
    # A hidden state goes there, and its gradient comes back.
    assert build_estimator(wanted, [case])._border_seconds(case) == pytest.approx(2 * size / number)


def test_closed_form_knows_which_sums_travel_beside_a_backward_pass(run_file: str) -> None:
    config = config_of(run_file, "plan.precision.compute='float32'")
    wanted = wanted_run(config, find_machine("h100-80gb", PROCESSES), PROCESSES)
    wanted = with_messages(wanted, all_reduce=2.0, posted_all_reduce=1.0)
    posted, split = (
        candidate(2, 2, 1, 1, 4, schedule=schedule, stages_per_rank=2)
        for schedule in ("Interleaved1F1B", "ZBVZeroBubble")
    )
    sharded = candidate(1, 2, 2, 1, 4)
    estimator = build_estimator(wanted, [posted, split, sharded])
    seconds = {it: estimator._replica_seconds(it, 0.0) for it in (posted, split, sharded)}
    # FSDP2 sums halves of all layers.
    assert seconds[posted] == pytest.approx(seconds[split] / 2) == pytest.approx(seconds[sharded] / 2)


def test_closed_form_knows_which_schedules_await_sums_over_tp_at_once(run_file: str) -> None:
    wanted = wanted_run(config_of(run_file), find_machine("h100-80gb", PROCESSES), PROCESSES)
    wanted = with_messages(wanted, all_reduce=2.0, posted_all_reduce=1.0)
    posted, split = (
        candidate(2, 1, 1, 2, 4, schedule=schedule, stages_per_rank=2, sequence_parallel=False)
        for schedule in ("Interleaved1F1B", "ZBVZeroBubble")
    )
    estimator = build_estimator(wanted, [posted, split])
    one, other = (estimator._parts_of(it) for it in (posted, split))
    assert one.backward_seconds == pytest.approx(other.backward_seconds / 2)
    assert one.forward_seconds == pytest.approx(other.forward_seconds)


def test_closed_form_knows_whole_logits(run_file: str) -> None:
    # With so many words they need most of the memory.
    wanted = wanted_run(config_of(run_file, "model.config.vocab_size=64_000"), find_machine("h100-80gb", 4), 4)
    parts = candidate(1, 1, 1, 4, 8)
    whole = replace(parts, loss_parallel=False)
    estimator = build_estimator(wanted, [parts, whole])
    assert estimator.estimate(whole).peak_bytes > 1.5 * estimator.estimate(parts).peak_bytes
    assert_near(estimator, wanted, (parts, whole), memory=0.15, seconds=0.15)


def test_only_whole_logits_are_known_where_they_are_pinned(run_file: str) -> None:
    pinned = ["plan.mesh.tp=2", "plan.tensor.loss_parallel=false", "plan.mesh.pp=1"]
    config = config_of(run_file, *pinned)
    found = [*candidates(config, ["plan.mesh.tp", "plan.tensor.loss_parallel"], PROCESSES, LAYERS, 4)]
    assert {it.loss_parallel for it in found} == {False}
    wanted = wanted_run(config, find_machine("h100-80gb", PROCESSES), PROCESSES)
    estimator = build_estimator(wanted, found)
    assert estimator.knows(next(it for it in found if it.sequence_parallel))
    assert not wanted.resolved(found[0]).plan.tensor.loss_parallel


def test_closed_form_knows_logits_in_chunks(run_file: str) -> None:
    # The logits of a sequence are few enough to exist at once, those of eight are not.
    overrides = ["model.config.vocab_size=256_000", "plan.precision.compute='float32'"]
    wanted = wanted_run(config_of(run_file, *overrides), find_machine("h100-80gb", 4), 4)
    cases = [candidate(1, 1, 1, 4, rows, loss_parallel=it) for rows in (1, 8, 32) for it in (True, False)]
    chunks = {wanted.resolved(case).plan.loss.size for case in cases}
    assert 0 in chunks
    assert len(chunks) > 1
    estimator = build_estimator(wanted, cases)
    assert_near(estimator, wanted, cases, memory=0.25, seconds=0.15)


HOOKS = [
    candidate(1, 1, 4, 1, 2, reshard="always"),
    candidate(1, 1, 4, 1, 2),
    candidate(1, 4, 1, 1, 2, offload="cpu"),
    candidate(2, 1, 2, 1, 2),
    candidate(2, 1, 2, 1, 2, schedule="Interleaved1F1B", stages_per_rank=2),
]


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_closed_form_knows_the_hooks_of_fsdp2(compute: str, run_file: str) -> None:
    # They take most of the time here. With one number format, layers are simulated without FSDP2.
    text = machine_file(79.1)
    Path(text).write_text(Path(text).read_text().replace("hook_seconds = 0.0", "hook_seconds = 1e-3"))
    config = config_of(run_file, f"plan.precision.compute='{compute}'")
    wanted = wanted_run(config, find_machine(text, PROCESSES), PROCESSES)
    estimator = build_estimator(wanted, HOOKS)
    assert_near(estimator, wanted, HOOKS, seconds=0.2)


def test_closed_form_knows_the_recomputation_of_small_operators() -> None:
    # Of experts there are many, which take as long for few sequences as for many.
    wanted = wanted_model(MIXTRAL, length=128, rows=32)
    cases = [candidate(1, 4, 1, 2, 8, recompute=it) for it in ("none", "selective", "full")]
    estimator = build_estimator(wanted, cases)
    assert_near(estimator, wanted, cases, seconds=0.2)


def test_refusal_of_all_plans_is_told(run_file: str) -> None:
    wanted = wanted_run(config_of(run_file), find_machine("h100-80gb", 3), 3)
    with pytest.raises(UserError, match="tp = 3"):
        build_estimator(wanted, [candidate(1, 1, 1, 3, 8), candidate(1, 1, 1, 3, 8, loss_parallel=False)])


MIXTRAL = {
    "type": "mixtral",
    "config": {
        "hidden_size": 1024,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_local_experts": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": 32_000,
    },
}
DENSE = {
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 6,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32_000,
}
EXPERTS = [
    candidate(1, 1, 8, 1, 2, reshard="always"),
    candidate(1, 1, 1, 1, 2, ep=8, reshard="always"),
    candidate(1, 1, 2, 1, 2, ep=4, recompute="full"),
    candidate(2, 1, 1, 1, 1, ep=4),
]
PARTS = [
    candidate(1, 1, 4, 1, 1, cp=2, reshard="always"),
    candidate(1, 1, 2, 1, 1, cp=4, recompute="full"),
    candidate(1, 1, 2, 2, 1, cp=2),
]


def wanted_model(model: dict[str, Any], *, length: int, rows: int, optimizer: str = "adamw") -> Wanted:
    """Return a run of a model on 8 processes, whose plan is searched."""
    table = {
        "run_directory": "search",
        "steps": 1,
        "global_batch_size": rows,
        "model": model,
        "data": {"sequence_length": length, "tokenizer": {"vocab_size": 32_000}},
        "optimizer": {"name": optimizer, "learning_rate": 1e-3},
        "plan": {"precision": {"compute": "bfloat16"}},
    }
    return wanted_run(RunConfig.model_validate(table), find_machine("h100-80gb", 8), 8)


@pytest.mark.parametrize(
    ("cases", "length", "rows"), [(EXPERTS, 1024, 64), (PARTS, 16_384, 8)], ids=["experts", "parts of sequences"]
)
def test_closed_form_knows_experts_and_parts_of_sequences(cases: list[Candidate], length: int, rows: int) -> None:
    wanted = wanted_model(MIXTRAL, length=length, rows=rows)
    estimator = build_estimator(wanted, cases)
    assert_near(estimator, wanted, cases, memory=0.35, seconds=0.35)


WHOLE = [
    candidate(1, 1, 8, 1, 1, reshard="always"),
    candidate(1, 8, 1, 1, 1),
    candidate(1, 2, 2, 2, 1),
    candidate(4, 1, 2, 1, 1),
    candidate(1, 1, 8, 1, 1, offload="cpu"),
]
WHOLE_EXPERTS = [candidate(1, 1, 8, 1, 1, reshard="always"), candidate(1, 2, 1, 1, 1, ep=4)]


@pytest.mark.parametrize(
    ("optimizer", "cases", "model"),
    [
        ("muon", WHOLE, {"type": "llama", "config": DENSE}),
        ("muon", WHOLE_EXPERTS, MIXTRAL),
        ("adafactor", WHOLE[:1], {"type": "llama", "config": DENSE}),
    ],
    ids=["matrices as a whole", "matrices of experts", "many operators"],
)
def test_closed_form_knows_the_update(optimizer: str, cases: list[Candidate], model: dict[str, Any]) -> None:
    # Without it, the seconds would be a quarter too few, or more.
    wanted = wanted_model(model, length=512, rows=16, optimizer=optimizer)
    estimator = build_estimator(wanted, cases)
    assert_near(estimator, wanted, cases, memory=0.35, seconds=0.18)


@pytest.mark.parametrize("processes", [1, 3, 8, 50])
def test_matrices_are_divided_as_their_owners_divide_them(processes: int) -> None:
    shapes = {(64, 64): 9, (16, 64): 20, (64, 176): 27, (176, 64): 9}
    matrices = [Matrix(torch.empty(0), (), shape, {}) for shape, number in shapes.items() for _ in range(number)]
    loads = dict.fromkeys(range(processes), 0)
    for it in _with_owners(matrices, processes):
        loads[it.owner] += cost_of(it.matrix.shape)
    found = [sum(cost_of(shape) * number for shape, number in owned.items()) for owned in _shares(shapes, processes)]
    assert {*found} == {*loads.values()}


def test_candidates_divide_experts_and_long_sequences() -> None:
    config = load_run(ROOT / "launch/runs/llama-65b.toml")
    dense, moe = (set(candidates(config, (), 64, 80, 8, num_experts=number)) for number in (0, 16))
    assert {it.ep for it in dense} == {1}
    assert {it.ep for it in moe} == {1, 2, 4, 8, 16}
    assert {it.ep for it in moe if it.tp == 4} == {1, 2, 16}
    assert all(it.data_degree * it.pp * it.tp == 64 for it in moe)
    assert {it.cp for it in candidates(config, (), 64, 80, 8, takes_cp=True)} == {1, 2, 4, 8}
    assert {it.cp for it in candidates(config, (), 64, 80, 8)} == {1}


@pytest.mark.parametrize(
    ("kind", "length", "takes"), [("llama", 8_192, False), ("llama", 16_384, True), ("mamba", 16_384, False)]
)
def test_sequences_are_divided_if_they_are_long_and_the_class_allows_it(kind: str, length: int, takes: bool) -> None:
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 300}
    positions = {"max_position_embeddings": length} if kind == "llama" else {}
    table = {
        "run_directory": "search",
        "steps": 1,
        "global_batch_size": 8,
        "model": {"type": kind, "attention": "eager", "config": {**shape, **positions}},
        "data": {"sequence_length": length, "tokenizer": {"vocab_size": 300}},
    }
    assert wanted_run(RunConfig.model_validate(table), find_machine("h100-80gb", 8), 8).takes_cp() == takes


def test_closed_form_agrees_with_the_simulation_of_large_microbatches() -> None:
    # What a layer holds for its parameters does not grow with the sequences.
    processes = 64
    machine = find_machine("h100-80gb", processes)
    wanted = wanted_run(load_run(ROOT / "launch/runs/llama-65b.toml"), machine, processes)
    case = candidate(1, 1, processes, 1, 64, recompute="full", reshard="always")
    estimate = build_estimator(wanted, [case]).estimate(case)
    assert estimate.peak_bytes == pytest.approx(find_needs(wanted.resolved(case), machine).peak_bytes, rel=0.15)
