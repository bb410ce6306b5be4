"""Checkpoints of programs with their own loop: any torch optimizer, from any mesh to any mesh."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from meshtrain.checkpoint.dcp.store import write_checkpoint
from meshtrain.checkpoint.manifest import SavedGroup, SavedOptimizer, read_manifest
from meshtrain.checkpoint.storage.directory import list_checkpoints
from meshtrain.checkpoint.storage.publishing import Retention
from meshtrain.config.optimizer import OptimizerConfig
from meshtrain.errors import CheckpointError, TrainingStopped
from meshtrain.models.layout import local_tensor
from meshtrain.parallel.local_parameter import as_local
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.training.optimizer_state import state_tensors
from meshtrain.training.saved_optimizer import restore_options
from meshtrain.training.saving import restore_state, save_state
from meshtrain.training.state import TrainState, saved_tensors
from meshtrain.verify.parallel import build_step_context
from tests.checkpoint.stages import manifest_of
from tests.parallel.steps import start, take_step
from tests.parity import Case
from tests.ranks import run_on_ranks
from tests.training.runs import read_checkpoint

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adam": {"lr": 1e-2, "amsgrad": True},
    "SGD": {"lr": 1e-2, "momentum": 0.9},
    "Adagrad": {"lr": 1e-2},
    "NAdam": {"lr": 1e-3, "betas": (0.8, 0.99)},
}
# This optimizer creates all state before the first step.
EAGER = ("Adagrad",)
# The tied embedding is unsharded, sharded by rows over tp or dp_shard, and on two stages; nothing
# divides 101 rows.
TP = Case("gpt2-odd", (1, 1, 1, 2))
SHARDED = Case("gpt2-odd", (1, 1, 2, 1))
STAGES = Case("gpt2-odd", (2, 1, 1, 2))
ALONE = Case("gpt2-odd", (1, 1, 1, 1))
FROZEN, NEVER = "transformer.wpe.weight", "transformer.h.3.ln_2.bias"
VALUES = {"scheduler": {"last_lr": [0.1, float("inf")], "best": None}, "place": 17, "name": "é"}


def build_optimizer(name: str, parameters: Iterable[tuple[str, nn.Parameter]], **options: Any) -> Optimizer:
    """Return a torch optimizer with two groups."""
    trained = [(fqn, parameter) for fqn, parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [as_local(parameter) for _, parameter in trained if parameter.dim() == dims], "weight_decay": decay}
        for dims, decay in ((2, 0.1), (1, 0.0))
    ]
    return getattr(torch.optim, name)(groups, **{**OPTIMIZERS.get(name, {}), **options})


def begin(case: Case) -> Pipeline:
    pipeline = start(case)
    for fqn, parameter in pipeline.named_parameters():
        parameter.requires_grad = fqn != FROZEN
    return pipeline


def state_with(pipeline: Pipeline, name: str, **options: Any) -> TrainState:
    return TrainState(pipeline, build_optimizer(name, pipeline.named_parameters(), **options))


def give_gradients(pipeline: Pipeline, step: int) -> None:
    """Set gradients that depend on step and value alone, for every parameter but one."""
    for fqn, parameter in pipeline.named_parameters():
        if parameter.requires_grad and fqn != NEVER:
            parameter.grad = (parameter.detach() * (step + 1)).cos()


def take_steps(pipeline: Pipeline, state: TrainState, number: int) -> None:
    assert state.optimizer is not None
    for _ in range(number):
        give_gradients(pipeline, state.step)
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.step += 1


def leave(case: Case, root: Path) -> None:
    """Take two steps with each optimizer, and save."""
    pipeline = begin(case)
    for name in OPTIMIZERS:
        state = state_with(pipeline, name)
        take_steps(pipeline, state, 2)
        assert state.optimizer is not None
        state.optimizer.param_groups[1]["lr"] = 0.125
        state.values = VALUES
        assert save_state(root / name, pipeline, state, keep=1) == root / name / "step-2"
        take_steps(pipeline, state, 1)
        save_state(root / f"{name}-further", pipeline, state, keep=1)


def pass_on(case: Case, root: Path, to: Path) -> None:
    """Load the checkpoint of another mesh, save it unchanged, and save it a step later."""
    pipeline = begin(case)
    for name in OPTIMIZERS:
        state = state_with(pipeline, name, lr=0.5)
        take_steps(pipeline, state, 1)
        manifest = restore_state(root / name, pipeline, state, missing_ok=False)
        assert manifest is not None
        assert manifest.step == 2
        assert (state.step, state.values) == (2, VALUES)
        assert state.optimizer is not None
        assert [group["lr"] for group in state.optimizer.param_groups] == [OPTIMIZERS[name]["lr"], 0.125]
        assert state.optimizer.param_groups[0].get("betas", (0.8, 0.99)) in ((0.8, 0.99), (0.9, 0.999))
        check_states(pipeline, state.optimizer, {FROZEN} if name in EAGER else {FROZEN, NEVER})
        save_state(to / name, pipeline, state, keep=1)
        take_steps(pipeline, state, 1)
        save_state(to / f"{name}-further", pipeline, state, keep=1)


def check_states(pipeline: Pipeline, optimizer: Optimizer, without: set[str]) -> None:
    """Check that trained parameters, with both ends of a tie, have state, and others none."""
    for fqn, parameter in pipeline.named_parameters():
        assert bool(state_tensors(optimizer, {fqn: parameter})) == (fqn not in without), fqn


def test_every_optimizer_resumes_on_other_meshes_bit_for_bit(tmp_path: Path) -> None:
    homes = [tmp_path / str(number) for number in range(4)]
    run_on_ranks(2, leave, TP, homes[0])
    for number, case in enumerate((SHARDED, STAGES, ALONE), start=1):
        run_on_ranks(case.world_size, pass_on, case, homes[number - 1], homes[number])
    for name in OPTIMIZERS:
        for suffix in ("", "-further"):
            wanted = read_checkpoint(homes[0] / f"{name}{suffix}")
            without = (FROZEN,) if name in EAGER else (FROZEN, NEVER)
            assert not any(key.endswith(without) for key in wanted if key.startswith("optimizer."))
            assert {f"model.{FROZEN}", f"model.{NEVER}"} <= wanted.keys()
            for home in homes[1:]:
                found = read_checkpoint(home / f"{name}{suffix}")
                assert found.keys() == wanted.keys()
                assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []
    manifest = read_manifest(homes[3] / "NAdam" / "step-2")
    assert manifest.optimizer is not None
    assert (manifest.optimizer.name, manifest.optimizer.scalars) == ("NAdam", ("mu_product", "step"))
    assert json.loads(manifest.optimizer.groups[1].options)["lr"] == 0.125
    assert "transformer.h.0.ln_1.bias" in manifest.optimizer.groups[1].parameters


class Counting(torch.optim.SGD):
    """Keeps Python numbers, None, and sometimes values that no checkpoint can hold."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for state in self.state.values():
            state.update(count=state.get("count", 0) + 3, share=0.1, is_late=True, extra=None)


def keep_numbers(root: Path) -> dict[str, Any]:
    pipeline = start(ALONE)
    for optimizer in (
        Counting([*map(as_local, dict(pipeline.named_parameters()).values())], momentum=0.5) for _ in "ab"
    ):
        state = TrainState(pipeline, optimizer)
        if not list_checkpoints(root):
            take_steps(pipeline, state, 2)
            save_state(root, pipeline, state, keep=1)
        else:
            restore_state(root, pipeline, state, missing_ok=False)
    return {
        key: value for key, value in optimizer.state[next(iter(optimizer.state))].items() if key != "momentum_buffer"
    }


def test_python_numbers_in_optimizer_state_are_restored(tmp_path: Path) -> None:
    assert run_on_ranks(1, keep_numbers, tmp_path) == [{"count": 6, "share": 0.1, "is_late": True}]


def without_local_parts(root: Path) -> None:
    """Save an optimizer of DTensors, and load it into one of local parts."""
    pipeline = begin(TP)
    trained = [(fqn, parameter) for fqn, parameter in pipeline.named_parameters() if parameter.requires_grad]
    groups = [{"params": [p for _, p in trained if p.dim() == dims], "weight_decay": 0.0} for dims in (2, 1)]
    state = TrainState(pipeline, torch.optim.Adam(groups, foreach=False))
    take_steps(pipeline, state, 2)
    save_state(root, pipeline, state, keep=1)
    other = TrainState(pipeline, build_optimizer("Adam", trained, amsgrad=False))
    restore_state(root, pipeline, other, missing_ok=False)
    for fqn, parameter in trained:
        one, two = (state_tensors(each.optimizer, {fqn: parameter}) for each in (state, other))
        assert one.keys() == two.keys()
        assert all(torch.equal(local_tensor(one[key]), local_tensor(two[key])) for key in one)
    restore_state(root, pipeline, state, missing_ok=False)
    take_steps(pipeline, state, 1)


def test_dtensor_and_local_parameters_have_the_same_states(tmp_path: Path) -> None:
    run_on_ranks(2, without_local_parts, tmp_path)


def test_restored_options_keep_their_types() -> None:
    parameters = [nn.Parameter(torch.zeros(2))]
    optimizer = torch.optim.Adam(parameters, lr=torch.tensor(0.5, dtype=torch.float64), betas=(0.5, 0.6))
    rate = optimizer.param_groups[0]["lr"]
    options = json.dumps({"lr": 0.1, "betas": [0.7, 0.8], "initial_lr": 0.3})
    restore_options(optimizer, SavedOptimizer(name="Adam", groups=(SavedGroup(options=options, parameters=()),)))
    (group,) = optimizer.param_groups
    assert group["lr"] is rate
    assert (rate.item(), group["betas"], group["initial_lr"], group["eps"]) == (0.1, (0.7, 0.8), 0.3, 1e-8)


def load_a_run(root: Path) -> tuple[bool, list[float]]:
    """Save like a run and load with a custom AdamW, first without a model configuration."""
    pipeline = start(TP)
    context = build_step_context(pipeline)
    take_step(context, 0)
    tensors = saved_tensors(pipeline, context.optimizer)
    config = pipeline.stages[0].model.config
    manifest = manifest_of(1).model_copy(update={"model_type": config.model_type})
    state = TrainState(pipeline, build_optimizer("AdamW", pipeline.named_parameters(), lr=0.25))
    write_checkpoint(root, tensors, manifest=manifest, huggingface=None, retention=Retention(newest=1))
    with pytest.raises(CheckpointError, match=r"/step-1 cannot be read: .*; nothing was changed there$"):
        restore_state(root, pipeline, state, missing_ok=False)
    write_checkpoint(
        root, tensors, manifest=manifest, huggingface=config.save_pretrained, retention=Retention(newest=1)
    )
    restore_state(root, pipeline, state, missing_ok=False)
    assert state.optimizer is not None
    mine = saved_tensors(pipeline, state.optimizer)
    same = all(torch.equal(local_tensor(mine[key]), local_tensor(tensors[key])) for key in tensors)
    return same and mine.keys() == tensors.keys(), [group["lr"] for group in state.optimizer.param_groups]


def load_a_run_with_sgd(root: Path) -> bool:
    """Save like a run with SGD, and load with that of a program; with AdamW that is refused."""
    pipeline = start(TP)
    context = build_step_context(pipeline, OptimizerConfig(name="sgd"))
    take_step(context, 0)
    tensors, config = saved_tensors(pipeline, context.optimizer), pipeline.stages[0].model.config
    changes = {"model_type": config.model_type, "optimizer_name": "sgd"}
    write_checkpoint(
        root,
        tensors,
        manifest=manifest_of(1).model_copy(update=changes),
        huggingface=config.save_pretrained,
        retention=Retention(newest=1),
    )
    mine = build_optimizer("SGD", pipeline.named_parameters(), lr=0.25, momentum=0.9)
    restore_state(root, pipeline, TrainState(pipeline, mine), missing_ok=False)
    found = saved_tensors(pipeline, mine)
    other = TrainState(pipeline, build_optimizer("AdamW", pipeline.named_parameters(), lr=0.25))
    message = "the optimizer is SGD in the checkpoint and AdamW in this program; continue with the same one"
    with pytest.raises(CheckpointError, match=message):
        restore_state(root, pipeline, other, missing_ok=False)
    assert any(key.startswith("optimizer.momentum_buffer.") for key in found)
    return all(torch.equal(local_tensor(found[key]), local_tensor(tensors[key])) for key in tensors)


def test_checkpoint_of_a_run_with_sgd_fills_that_of_a_program(tmp_path: Path) -> None:
    assert run_on_ranks(2, load_a_run_with_sgd, tmp_path) == [True, True]


def test_checkpoint_of_a_run_fills_a_custom_optimizer(tmp_path: Path) -> None:
    assert run_on_ranks(2, load_a_run, tmp_path) == [(True, [0.25, 0.25])] * 2


def messages(root: Path) -> list[str]:
    """Return the messages of refusals, first while saving, then while loading."""
    pipeline = begin(TP)
    state = state_with(pipeline, "Adam")
    take_steps(pipeline, state, 1)
    found: list[str] = []

    def refused(work: Callable[[], object]) -> None:
        with pytest.raises((CheckpointError, TrainingStopped)) as raised:
            work()
        found.append(str(raised.value))

    def save(**changes: Any) -> None:
        save_state(root, pipeline, TrainState(**{**vars(state), **changes}), keep=2)

    def load(**changes: Any) -> None:
        restore_state(root, pipeline, TrainState(**{**vars(state), **changes}), missing_ok=False)

    def others(name: str, **options: Any) -> Optimizer:
        return build_optimizer(name, pipeline.named_parameters(), **options)

    refused(load)
    assert restore_state(root, pipeline, state, missing_ok=True) is None
    rank = dist.get_rank()
    refused(lambda: save_state(root, pipeline, state, keep=0))
    refused(lambda: save(values={"a": [1, (2,)]}))
    refused(lambda: save(values={"a": {1: 2}}))
    refused(lambda: save(values={"place": rank}))
    refused(lambda: save(step=7 + rank))
    refused(lambda: save(optimizer=torch.optim.SGD([nn.Parameter(torch.zeros(2, 3))])))
    refused(lambda: save(optimizer=others("Adam", lr=0.1 + rank)))
    refused(lambda: save(optimizer=others("Adam") if rank else others("SGD")))
    with_callable = others("Adam")
    with_callable.param_groups[1]["warm"] = abs
    refused(lambda: save(optimizer=with_callable))
    adam = state.optimizer
    parameter = adam.param_groups[0]["params"][0]
    kept = adam.state[parameter]
    adam.state[parameter] = {**kept, "rows": torch.zeros(3)}
    refused(save)
    adam.state[parameter] = {**kept, "exp_avg": 1}
    refused(save)
    adam.state[parameter] = kept if rank else {}
    refused(save)
    adam.state[parameter] = {**kept, "exp_avg": kept["exp_avg"] * float("nan")}
    refused(save)
    adam.state[parameter] = kept
    assert not list_checkpoints(root)
    save()
    save(optimizer=None, step=5)
    refused(load)
    dist.barrier()
    if rank == 0:
        (root / "step-5" / "manifest.json").unlink()
    dist.barrier()
    refused(lambda: load(optimizer=None))
    refused(lambda: load(optimizer=others("AdamW")))
    other_order = others("Adam")
    other_order.param_groups.reverse()
    refused(lambda: load(optimizer=other_order))
    more = others("Adam")
    more.param_groups.append({**more.param_groups[0], "params": []})
    refused(lambda: load(optimizer=more))
    fewer = others("Adam")
    fewer.param_groups[1]["params"] = []
    refused(lambda: load(optimizer=fewer))
    dist.barrier()
    if rank == 0:
        damaged = next((root / "step-1").glob("*.distcp"))
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    dist.barrier()
    refused(lambda: restore_state(root / "step-1", pipeline, state, missing_ok=False))
    return found


def test_mismatched_state_is_a_one_line_error_on_all_processes(tmp_path: Path) -> None:
    first, second = run_on_ranks(2, messages, tmp_path)
    assert first == second
    assert [line.replace(str(tmp_path), "ROOT") for line in first] == [
        "ROOT has no checkpoint: no step-N directory with a manifest; pass another directory, or missing_ok=True",
        "keep = 0: the checkpoint that is written must stay; pass 1 or more",
        "state.values['a'][1] is a tuple, which JSON does not have; save what JSON has: None, bools, numbers "
        "and strings, in lists and in dicts with strings for keys",
        "state.values['a'] has the key 1, and JSON has strings only; save what JSON has: None, bools, "
        "numbers and strings, in lists and in dicts with strings for keys",
        'state.values is {"place": 1} on rank 1 and {"place": 0} on rank 0, but it is saved once; make it '
        "the same on all ranks: gather values that differ",
        "state.step is 8 on rank 1 and 7 on rank 0, but it is saved once; make it the same on all ranks: "
        "gather values that differ",
        "the optimizer holds a tensor that is not a parameter of the model, of shape (2, 3); make it from the "
        "parallel model, or call meshtrain.rebind(optimizer)",
        "the optimizer of rank 1 has lr = 1.1 in group 0, that of rank 0 has 0.1; make the same optimizer on "
        "every process, with the same groups in the same order, empty ones included",
        "the optimizer of rank 1 is Adam, that of rank 0 is SGD; make the same optimizer on every process, "
        "with the same groups in the same order, empty ones included",
        "an option of the optimizer cannot be saved: param_groups[1]['warm'] is a "
        "builtin_function_or_method, which JSON does not have",
        "Adam keeps 'rows' of transformer.wte.weight as a tensor (3,); a checkpoint holds numbers, and "
        "tensors of the shape of the parameter, here (51, 32); use an optimizer that keeps nothing else",
        "Adam keeps 'exp_avg' as a number of one parameter and as a tensor of the parameter's shape of "
        "another; use an optimizer that keeps one kind for all parameters",
        "the optimizer of rank 0 has transformer.wte.weight in group 0 with no state, that of rank 1 in "
        "group 0 with exp_avg, exp_avg_sq, max_exp_avg_sq, step; make the same optimizer on every process, "
        "with the same groups in the same order, empty ones included, and both ends of a tied weight in one "
        "group",
        "step 1: these values are not finite: optimizer.exp_avg.transformer.wte.weight; training stopped before a "
        "checkpoint was written; resume from the last one with a lower optimizer.learning_rate, or a lower "
        "optimizer.max_gradient_norm",
        "ROOT/step-5: it holds no optimizer state, and the state to load has Adam; use the same optimizer, or load "
        "the weights alone with load_weights",
        "ROOT/step-1: it holds state of Adam, and the state to load has no optimizer; use the same optimizer, or "
        "load the weights alone with load_weights",
        "ROOT/step-1: the optimizer is Adam in the checkpoint and AdamW in this program; continue with the same one",
        "ROOT/step-1: 67 parameters are in other groups than in the checkpoint: "
        "transformer.h.0.attn.c_attn.k.bias (in group 1 in the checkpoint, in group 0 in this program), "
        "transformer.h.0.attn.c_attn.k.weight (in group 0 in the checkpoint, in group 1 in this program), "
        "transformer.h.0.attn.c_attn.q.bias (in group 1 in the checkpoint, in group 0 in this program) and 64 more; "
        "make the groups as they were when it was saved",
        "ROOT/step-1: the optimizer has 2 groups in the checkpoint and 3 in this program; make the groups as they "
        "were when it was saved",
        "ROOT/step-1: 42 parameters are in other groups than in the checkpoint: "
        "transformer.h.0.attn.c_attn.k.bias (in group 1 in the checkpoint, in none in this program), "
        "transformer.h.0.attn.c_attn.q.bias (in group 1 in the checkpoint, in none in this program), "
        "transformer.h.0.attn.c_attn.v.bias (in group 1 in the checkpoint, in none in this program) and 39 more; make "
        "the groups as they were when it was saved",
        "ROOT/step-1/__0_0.distcp is not what was written: the size is right, but the content differs; use another "
        "checkpoint",
    ]
