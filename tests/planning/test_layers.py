"""A step that is put together from one with a few layers is that of all layers."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from meshtrain.compat.schedules import FORWARD, Border, Instruction
from meshtrain.config.lora import LoraConfig
from meshtrain.config.optimizer import OptimizerConfig, OptimizerName
from meshtrain.models.build import build_meta_model
from meshtrain.models.tiny import default_config, shrink
from meshtrain.parallel.check.batch import num_microbatches
from meshtrain.parallel.cut.probe import probe_structure
from meshtrain.planning.assembly.effects import Gathering, gathering_of
from meshtrain.planning.assembly.expansion import with_all_layers
from meshtrain.planning.assembly.growth import Outside, UnevenGrowthError, outside_of
from meshtrain.planning.assembly.layers import fewest_layers, likes
from meshtrain.planning.assembly.microbatches import _between_stages
from meshtrain.planning.assembly.outline import outline_of
from meshtrain.planning.assembly.pipeline import _shortest, simulate
from meshtrain.planning.assembly.shorter import programs_of, short_pipelines
from meshtrain.planning.memory import memory_use
from meshtrain.planning.simulation.fewer_layers import LayersNeededError, keep_layers, stream_problem
from meshtrain.planning.simulation.profile import ActionProfile, RankProfile
from meshtrain.planning.simulation.rank import simulate_rank, simulate_with_one_less, simulate_without_passes
from meshtrain.planning.simulation.recorder import Work
from meshtrain.planning.simulation.run import SimulatedRun
from meshtrain.planning.totals import totals_of
from tests.planning.cases import DEEP_MODELS, make_run, run_of
from tests.ranks import run_on_ranks

FULL = {"mode": "full"}
PLANS: dict[str, dict[str, Any]] = {
    "one process": {"mesh": {"dp_shard": 1}},
    "ddp": {"mesh": {"dp_replicate": 2, "dp_shard": 1}},
    "fsdp, bfloat16": {"mesh": {"dp_shard": 2}, "precision": {"compute": "bfloat16"}},
    "fsdp, recomputed": {"mesh": {"dp_shard": 2}, "recompute": FULL},
    "fsdp, kept, every second": {
        "mesh": {"dp_shard": 2},
        "shard": {"reshard_after_forward": "never"},
        "recompute": {"mode": "selective", "every": 2},
    },
    "fsdp, two layers ahead, reduced each microbatch": {
        "mesh": {"dp_shard": 2},
        "shard": {"prefetch": 2, "reduce_gradients": "each_microbatch"},
    },
    "tp": {"mesh": {"tp": 2, "dp_shard": 1}},
    "fsdp x tp, parts of the sequence": {
        "mesh": {"tp": 2, "dp_shard": 2},
        "tensor": {"sequence_parallel": True},
        "recompute": {"mode": "selective"},
    },
    "pp": {"mesh": {"pp": 2, "dp_shard": 1}},
    "pp x fsdp, bfloat16": {
        "mesh": {"pp": 2, "dp_shard": 2},
        "precision": {"compute": "bfloat16"},
        "recompute": FULL,
    },
    "pp x fsdp, level 2": {"mesh": {"pp": 2, "dp_shard": 2}, "shard": {"level": 2, "prefetch": 2}},
    "pp, interleaved": {
        "mesh": {"pp": 2, "dp_shard": 1},
        "pipeline": {"schedule": "Interleaved1F1B", "stages_per_rank": 2},
    },
    "pp, ZBV": {"mesh": {"pp": 2, "dp_shard": 1}, "pipeline": {"schedule": "ZBVZeroBubble", "stages_per_rank": 2}},
}
QUICK = [("llama", "fsdp, bfloat16"), ("deepseek_v3", "one process"), ("gpt2", "pp x fsdp, bfloat16")]
TYPES = ("bloom", "qwen3_moe", "gpt_oss", "gpt_neo", "falcon_h1", "recurrent_gemma", "jamba", "zamba2", "mamba")


def compare(run: SimulatedRun) -> list[int]:
    """Compare the steps of all pp ranks, and return how many layers are left out of each stage."""
    width = run.plan.mesh.world_size // run.plan.mesh.pp
    for pp_rank, profile in enumerate(simulate(run).profiles):
        alone = simulate_rank(run, pp_rank * width)
        assert memory_use(profile) == memory_use(alone)
        assert totals_of(profile.work()) == totals_of(alone.work())
        assert places_of(profile) == places_of(alone)
    try:
        return [len(stage.left_out) for stage in outline_of(run, all_layers=False).stages]
    except LayersNeededError:
        return []


def compare_stages(run: SimulatedRun) -> list[int]:
    """Compare the steps of all pp ranks, and return how many stages of each are simulated."""
    compare(run)
    outline, every = outline_of(run, all_layers=False), [range(it, it + 1) for it in range(run.plan.mesh.pp)]
    return sorted({len(short.held[0]) for short in short_pipelines(run, outline, every)})


def places_of(profile: RankProfile) -> list[tuple[object, ...]]:
    return [(action.phase, action.stage, action.microbatch, action.place) for action in profile.actions]


def deep_run(model_type: str, plan: str) -> SimulatedRun:
    values, settings = dict(DEEP_MODELS[model_type]), PLANS[plan]
    count = "n_layer" if model_type == "gpt2" else "num_hidden_layers"
    # Without a pipeline, the microbatches between the first and the last are put together too.
    pp, stages = settings["mesh"].get("pp", 1), settings.get("pipeline", {}).get("stages_per_rank", 1)
    if plan != "pp, ZBV":
        values[count] += (pp * stages - 1) * 6
    return make_run(model_type, settings, microbatches=5 if pp == 1 else 6, values=values)


@pytest.mark.parametrize(("model_type", "plan"), QUICK)
def test_layers_that_are_left_out_do_the_same_as_others(model_type: str, plan: str) -> None:
    ((left_out),) = run_on_ranks(1, compare, deep_run(model_type, plan), joins=False, timeout=600)
    assert sum(left_out) > 0


@pytest.mark.timeout(6000)
@pytest.mark.parametrize("plan", PLANS)
def test_layers_of_all_models_do_the_same_as_others(plan: str) -> None:
    for model_type in DEEP_MODELS:
        ((left_out),) = run_on_ranks(1, compare, deep_run(model_type, plan), joins=False, timeout=3000)
        # Some schedules compute the gradients of all weights of a stage in one pass.
        is_short = plan == "pp, ZBV" or (plan == "fsdp, kept, every second" and model_type != "gemma3_text")
        assert (sum(left_out) > 0) != is_short, (model_type, left_out)


STAGES: dict[str, dict[str, Any]] = {
    "one layer each, fsdp": {"mesh": {"dp_shard": 2}, "precision": {"compute": "bfloat16"}},
    "uneven, recomputed": {"mesh": {"dp_shard": 1}, "recompute": FULL},
    "one layer each, copies": {"mesh": {"dp_replicate": 2, "dp_shard": 1}},
    "six layers each, fsdp x copies": {"mesh": {"dp_replicate": 2, "dp_shard": 2}},
    "six layers each, tp": {"mesh": {"tp": 2, "dp_shard": 1}, "tensor": {"sequence_parallel": True}},
    "six layers each, LoopedBFS": {"mesh": {"dp_shard": 1}, "pipeline": {"schedule": "LoopedBFS"}},
    "one layer each, split": {"mesh": {"dp_shard": 1}, "pipeline": {"schedule": "InterleavedZeroBubble"}},
}
NUMBERS = {"one layer each": 8, "uneven": 21, "six layers each": 48}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {"optimizer": OptimizerConfig(name="lion")}),
        ("llama", {"optimizer": OptimizerConfig(name="muon")}),
        ("llama", {"lora": LoraConfig(rank=4)}),
        ("gemma3_text", {}),
        ("qwen3_moe", {}),
        ("deepseek_v3", {}),
    ],
    ids=["lion", "muon", "lora", "gemma3", "qwen3_moe", "deepseek_v3"],
)
def test_what_all_stages_hold_is_known_from_a_few(model_type: str, changes: dict[str, Any]) -> None:
    plan = {"mesh": {"pp": 2, "dp_shard": 2}, "pipeline": {"schedule": "Interleaved1F1B", "stages_per_rank": 4}}
    run = run_of(shrink(default_config(model_type), 24), plan, microbatches=6)
    (numbers,) = run_on_ranks(1, compare_stages, replace(run, **changes), joins=False, timeout=600)
    assert min(numbers) < 4


@pytest.mark.timeout(600)
@pytest.mark.parametrize("plan", STAGES)
def test_stages_that_are_left_out_do_the_same_as_others(plan: str) -> None:
    settings, (words, *_) = STAGES[plan], plan.split(",")
    layers = "even" if NUMBERS[words] % 8 == 0 else [2, 2, 3, 3, 3, 3, 2, 3]
    pipeline = {"schedule": "Interleaved1F1B", "stages_per_rank": 4, "layers_per_stage": layers}
    settings = {**settings, "mesh": {"pp": 2, **settings["mesh"]}, "pipeline": pipeline | settings.get("pipeline", {})}
    values = {**DEEP_MODELS["llama"], "num_hidden_layers": NUMBERS[words]}
    run = make_run("llama", settings, microbatches=6, values=values)
    (numbers,) = run_on_ranks(1, compare_stages, run, joins=False, timeout=600)
    assert numbers == ([3, 4] if words == "uneven" else [2, 4])


def test_middle_processes_of_a_long_pipeline_stand_for_each_other() -> None:
    settings = {
        "mesh": {"pp": 8, "dp_shard": 2},
        "shard": {"reshard_after_forward": "always", "reduce_gradients": "each_microbatch"},
    }
    run = make_run("llama", settings, microbatches=24, values={**DEEP_MODELS["llama"], "num_hidden_layers": 8})
    run_on_ranks(1, compare, run, joins=False, timeout=300)
    way = _shortest(run, outline_of(run, all_layers=False), programs_of(run))
    assert len(way.chosen) == 4
    assert num_microbatches(way.short.run.plan, way.short.run.batch) < 8


@pytest.mark.parametrize(
    ("schedule", "stages", "shard"),
    [
        ("Interleaved1F1B", 4, {"reshard_after_forward": "always"}),
        ("Interleaved1F1B", 2, {"reduce_gradients": "each_microbatch"}),
        ("Interleaved1F1B", 4, {"reshard_after_forward": "always", "reduce_gradients": "each_microbatch"}),
        ("LoopedBFS", 2, {"reshard_after_forward": "always"}),
    ],
)
def test_layers_that_several_stages_gather_in_vain_are_known(schedule: str, stages: int, shard: dict[str, str]) -> None:
    # FSDP2 gathers the last layer again after a backward pass, but not after each one.
    settings = {"mesh": {"pp": 2, "dp_shard": 2}, "pipeline": {"schedule": schedule, "stages_per_rank": stages}}
    values = {**DEEP_MODELS["llama"], "num_hidden_layers": 8}
    run = make_run("llama", {**settings, "shard": shard}, microbatches=12, values=values)
    run_on_ranks(1, compare, run, joins=False, timeout=300)


def test_pp_ranks_that_gather_in_other_passes_are_simulated_apart() -> None:
    settings = {"mesh": {"pp": 8, "dp_shard": 2}, "shard": {"reduce_gradients": "each_microbatch"}}
    settings |= {"pipeline": {"schedule": "Interleaved1F1B", "stages_per_rank": 2}}
    run = make_run("llama", settings, microbatches=32, values={**DEEP_MODELS["llama"], "num_hidden_layers": 32})
    way = _shortest(run, outline_of(run, all_layers=False), programs_of(run))
    assert 4 < len(way.chosen) < 8


def test_whole_parameters_are_never_gathered() -> None:
    settings = {"mesh": {"dp_replicate": 2, "dp_shard": 1}, "shard": {"reduce_gradients": "each_microbatch"}}
    found = gathering_of(make_run("llama", settings, microbatches=2).plan)
    assert found == Gathering(in_passes=False, reduces_each=False)


def test_stages_that_free_what_they_gather_are_all_simulated() -> None:
    settings = {
        "mesh": {"pp": 2, "dp_shard": 2},
        "pipeline": {"schedule": "Interleaved1F1B", "stages_per_rank": 4},
        "shard": {"reshard_after_forward": "always"},
    }
    run = make_run("llama", settings, microbatches=6, values={**DEEP_MODELS["llama"], "num_hidden_layers": 8})
    outline = outline_of(run, all_layers=False)
    assert {len(short.held[0]) for short in short_pipelines(run, outline, [range(1), range(1, 2)])} == {4}


@pytest.mark.timeout(3000)
def test_layers_of_many_classes_do_the_same_as_others() -> None:
    for model_type in TYPES:
        run = run_of(shrink(default_config(model_type), 12), PLANS["fsdp, bfloat16"], microbatches=4)
        run_on_ranks(1, compare, run, joins=False, timeout=600)


@pytest.mark.parametrize(
    ("kinds", "kept"),
    [
        ("", ""),
        ("LLLL", "LLLL"),
        ("L" * 80, "LLLL"),
        ("DDD" + "M" * 58, "DDDMMMM"),
        ("RN" * 40, "RNRNRN"),
        ("ABCD", "ABCD"),
    ],
)
def test_few_layers_of_each_kind_are_kept(kinds: str, kept: str) -> None:
    found = fewest_layers(kinds)
    assert "".join(kinds[index] for index in found) == kept
    assert [kinds[found[position]] for position in likes(kinds, found)] == list(kinds)


def test_likes_of_a_layer_have_its_neighbors() -> None:
    kinds = ("SSSSSF" * 11)[:62]
    kept = fewest_layers(kinds)
    assert len(kept) < 16
    for index, position in enumerate(likes(kinds, kept)):
        around = [kinds[max(0, at - 2) : at + 2] for at in (index, kept[position])]
        assert around[0] == around[1]


def test_layers_that_exchange_more_than_a_stream_are_all_simulated() -> None:
    model = build_meta_model(shrink(default_config("gemma3n_text"), 6), dtype=torch.float32, attention="sdpa")
    assert "is computed from more than the result of one layer" in (stream_problem(probe_structure(model).trace) or "")
    llama = build_meta_model(shrink(default_config("llama"), 6), dtype=torch.float32, attention="sdpa")
    assert stream_problem(probe_structure(llama).trace) is None


def test_layers_with_shared_parameters_are_all_needed() -> None:
    model = build_meta_model(shrink(default_config("llama"), 4), dtype=torch.float32, attention="sdpa")
    model.model.layers[2].mlp = model.model.layers[1].mlp
    with pytest.raises(LayersNeededError, match="its layers share parameters"):
        keep_layers(model, [0, 1, 3])


def test_kept_layers_are_those_of_the_model_with_new_numbers() -> None:
    config = shrink(default_config("gemma3_text"), 8)
    config.layer_types = ["sliding_attention", "full_attention"] * 4
    model = build_meta_model(config, dtype=torch.float32, attention="sdpa")
    third = model.model.layers[3]
    keep_layers(model, [0, 3, 6])
    assert [*model.model.layers][1] is third
    assert third.self_attn.layer_idx == 1
    assert model.config.num_hidden_layers == 3
    assert model.config.layer_types == ["sliding_attention", "full_attention", "sliding_attention"]


def action(*changes: int, place: int | None = None, phase: str = "gradients") -> ActionProfile:
    stage = 0 if phase == "forward" else None
    roles = np.zeros(len(changes), dtype=np.int64)
    return ActionProfile(phase, stage, stage, place, np.array(changes, dtype=np.int64), roles, (Counter(),))


def test_memory_grows_with_the_layers_in_number_or_in_size() -> None:
    few = Outside(action(4, 4, 100), (action(8, 8, 16, -8, -8, -16),))
    more = Outside(action(4, 4, 4, 4, 100), (action(8, 8, 8, 24, -8, -8, -8, -24),))
    grown = few.with_more_layers(more, 10)
    assert sorted(grown.state.changes.tolist()) == [4] * 22 + [100]
    assert sorted(grown.behind[0].changes.tolist()) == [-96] + [-8] * 12 + [8] * 12 + [96]


def test_sizes_that_grow_into_those_of_others_are_told_apart() -> None:
    # The tokens of all experts are counted together, beside a tensor of always the same size.
    steps = [Outside(action(4), (action(24, 8 * it, 8 * it, -24),)) for it in (3, 4, 9)]
    grown = steps[0].with_more_layers(steps[1], 6)
    assert sorted(grown.behind[0].changes.tolist()) == [-24, 24, 72, 72]
    # 24 may have become 8 or 32.
    steps = [Outside(action(4), (action(32, 8 * it, *[8] * it),)) for it in (3, 4)]
    with pytest.raises(UnevenGrowthError, match="there are other sizes"):
        steps[0].with_more_layers(steps[1], 6)


def test_sizes_that_shrink_with_a_layer_are_refused() -> None:
    few, more = (Outside(action(4), (action(size, -size),)) for size in (8, 6))
    with pytest.raises(UnevenGrowthError, match="something becomes less with a layer"):
        few.with_more_layers(more, 3)


def grown(few: SimulatedRun, whole: SimulatedRun, layers: int) -> tuple[Outside, Outside]:
    """Return what a process of `whole` does outside the passes: put together, and simulated."""
    found = simulate_with_one_less(few, 0, 0, 0)
    more = outside_of(found.less).with_more_layers(outside_of(found.full), layers + 1)
    return more, outside_of(simulate_without_passes(whole, 0))


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3"])
def test_growth_is_known_where_tokens_of_experts_are_counted(model_type: str) -> None:
    config = shrink(default_config(model_type), 4)
    if model_type == "deepseek_v3":
        config.first_k_dense_replace = 0
    few, whole = (run_of(shrink(config, number), {"mesh": {"dp_shard": 2}}, microbatches=3) for number in (4, 9))
    ((put_together, simulated),) = run_on_ranks(1, grown, few, whole, 5, joins=False, timeout=300)
    assert np.array_equal(np.sort(put_together.state.changes), np.sort(simulated.state.changes))
    for one, other in zip(put_together.behind, simulated.behind, strict=True):
        assert np.array_equal(np.sort(one.changes), np.sort(other.changes))
        assert one.work == other.work


def test_updates_of_one_parameter_after_the_other_are_repeated() -> None:
    matrices, vectors = (5, -5, 6, -6), (2, -2)
    steps = [Outside(action(4), (action(*matrices * it, 9, -9, *vectors * it, 3, -3),)) for it in (1, 2, 4)]
    grown = steps[0].with_more_layers(steps[1], 3)
    assert grown.behind[0].changes.tolist() == steps[2].behind[0].changes.tolist()


@pytest.mark.parametrize("name", ["adamw-8bit", "lion"])
def test_such_optimizers_keep_as_much_for_layers_that_are_left_out(name: OptimizerName) -> None:
    run = replace(deep_run("llama", "pp"), optimizer=OptimizerConfig(name=name))
    ((left_out),) = run_on_ranks(1, compare, run, joins=False, timeout=600)
    assert sum(left_out) > 0


@pytest.mark.parametrize("changes", [(9, -9, 8, -7), (8, 9, -8, -9), ()])
def test_growth_that_is_not_clear_is_refused(changes: tuple[int, ...]) -> None:
    few, more = (Outside(action(1), (action(*it),)) for it in ((8, -8), changes))
    with pytest.raises(UnevenGrowthError):
        few.with_more_layers(more, 3)


def test_stage_that_reduces_nothing_needs_no_layers_to_be_known() -> None:
    forward = (action(1, place=0, phase="forward"), action(2, place=1, phase="forward"))
    reductions = (replace(it, stage=0) for it in (action(phase="reduction"), action(3, phase="reduction")))
    quiet, other = (RankProfile.of_actions((action(1, phase="start"), *forward, it), 1, Counter()) for it in reductions)
    (passed,) = with_all_layers(quiet, Outside(action(1), ()), {0: [0, 1, 1]}).passes.values()
    assert [it.changes.tolist() for it in passed] == [[1], [2], [2], []]
    # What is freed or reduced in an unknown layer may be there once for each.
    with pytest.raises(LayersNeededError, match=r"in the reduction pass its layers run in the order \[\]"):
        with_all_layers(other, Outside(action(1), ()), {0: [0, 1, 1]})


def test_messages_that_no_border_explains_are_not_counted() -> None:
    program = [Instruction("send", messages=(Border(FORWARD, 0, number),)) for number in range(4)]
    work = Work("send", torch.float32, 0, 64, "pp")
    assert _between_stages({work: 4}, program[:2], program) == {work: 8}
    with pytest.raises(RuntimeError, match="do not belong to 2 instructions to send in equal parts"):
        _between_stages({work: 1}, program[:2], program[:3])


def test_layers_that_do_not_run_in_order_are_refused() -> None:
    passes = (action(1, place=0, phase="forward"), action(1, place=2, phase="forward"))
    few = RankProfile.of_actions((action(1, phase="start"), *passes), 1, Counter())
    with pytest.raises(LayersNeededError, match=r"in the forward pass its layers run in the order \[0, 2\]"):
        with_all_layers(few, Outside(action(1), ()), {0: [0, 1, 1, 1]})
