"""torch's private names exist and do what `meshtrain.compat` uses them for."""

import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from meshtrain.compat import autograd, dcp, distributed, dtensor, fsdp, operators
from meshtrain.compat import nn as compat_nn
from meshtrain.models.weights.lazy_tensor import LazyTensor
from tests.ranks import run_on_ranks


def test_parameters_and_buffers_of_a_module() -> None:
    module = nn.BatchNorm1d(2)
    module.register_buffer("hidden", torch.zeros(1), persistent=False)
    assert compat_nn.parameter_table(module).keys() == {"weight", "bias"}
    assert [name for name, _ in compat_nn.saved_buffers(module)] == [
        "running_mean",
        "running_var",
        "num_batches_tracked",
    ]
    kept, buffers = vars(module).copy(), compat_nn.buffer_table(module).copy()
    module.register_buffer("more", torch.zeros(1))
    module.note = 1
    compat_nn.restore_attributes(module, kept, buffers)
    assert not hasattr(module, "note")
    assert not hasattr(module, "more")


def test_hooks_of_a_module_are_found() -> None:
    module = nn.Linear(2, 2)
    for register in (
        module.register_forward_pre_hook,
        module.register_forward_hook,
        module.register_full_backward_pre_hook,
        module.register_full_backward_hook,
    ):
        before = sum(map(len, compat_nn.hook_tables(module)))
        register(lambda *_: None)
        assert sum(map(len, compat_nn.hook_tables(module))) == before + 1
    copy = compat_nn.instance_of(nn.Linear, module)
    assert sum(map(len, compat_nn.hook_tables(copy))) == 2
    assert copy.weight is module.weight


def test_compiled_model_is_recognized() -> None:
    assert compat_nn.is_compiled(torch.compile(nn.Linear(1, 1)))
    assert not compat_nn.is_compiled(nn.Linear(1, 1))


def test_replaced_forwards_are_restored() -> None:
    own, other = nn.Linear(1, 1), nn.Linear(1, 1)
    compat_nn.set_forward(own, mine := partial(torch.mul, 2))
    before = [compat_nn.own_forward(module) for module in (own, other)]
    for module, forward in zip((own, other), before, strict=True):
        compat_nn.set_forward(module, torch.neg)
        assert module(torch.ones(1)) == -1
        compat_nn.restore_forward(module, forward)
    assert compat_nn.own_forward(own) is mine
    assert compat_nn.own_forward(other) is None


class Fixed(compat_nn.Unmovable):
    def check_move(self, change):
        raise ValueError("fixed")


@pytest.mark.parametrize("move", ["float", "half", "cpu", "cuda", "to_empty", "to"])
def test_module_that_cannot_be_moved(move: str) -> None:
    module = nn.Linear(1, 1)
    compat_nn.mix_in(module, Fixed)
    arguments = {"to_empty": {"device": "cpu"}, "to": {"dtype": torch.float64}}.get(move, {})
    with pytest.raises(ValueError, match="fixed"):
        getattr(nn.Sequential(module), move)(**arguments)


def test_backward_pass_state_is_detected() -> None:
    seen: list[object] = []
    x = torch.ones(2, requires_grad=True)

    def hook(_: Tensor) -> None:
        seen.append(autograd.number_of_backward_pass())
        autograd.when_backward_ends(lambda: seen.append(x.grad is not None))

    y = x * 2
    y.register_hook(hook)
    assert autograd.number_of_backward_pass() == -1
    y.sum().backward()
    assert seen[0] != -1
    assert seen[1:] == [True]


def test_tensor_properties() -> None:
    x = torch.empty(2, 2, device="meta")
    before = autograd.times_changed(x)
    x[0].add_(1)
    assert autograd.times_changed(x) == before + 1
    assert autograd.memory_of(x) == autograd.memory_of(x.t()) != autograd.memory_of(x.clone())
    parameter = nn.Parameter(torch.zeros(1))
    assert not autograd.has_gradient_hooks(parameter)
    parameter.register_post_accumulate_grad_hook(lambda _: None)
    assert autograd.has_gradient_hooks(parameter)
    over = autograd.tensor_over(nn.Parameter, data := torch.zeros(2), requires_grad=True)
    assert over.data_ptr() == data.data_ptr()
    assert over.requires_grad
    empty = autograd.tensor_without_memory(LazyTensor, (2, 3), torch.bfloat16)
    assert (empty.shape, empty.dtype, empty.device.type) == ((2, 3), torch.bfloat16, "cpu")
    assert len(autograd.tensors_in([x, {"a": (x, 1)}])) == 2
    assert torch.equal(autograd.map_tensors(torch.neg, [torch.ones(1), 2])[0], -torch.ones(1))


def test_operators_compute_and_are_recognized() -> None:
    norms = operators.norms([torch.tensor([3.0, 4.0]), torch.tensor([-7.0])])
    assert [norm.item() for norm in norms] == [5.0, 7.0]
    assert operators.norms([torch.tensor([3.0, -4.0])], float("inf"))[0] == 4
    operators.multiply([x := torch.ones(2)], torch.tensor(3.0))
    assert x.tolist() == [3.0, 3.0]
    seen = []

    class Seen(autograd.OperatorMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Seen():
        torch.ones(1).item()
        torch.ones(1).to(torch.float64)
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert seen.count(operators.ITEMS[0]) == 1
    assert any(func.overloadpacket in operators.CASTS for func in seen)
    assert any(func in operators.EXPENSIVE for func in seen)


def on_two_ranks() -> None:
    mesh = init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
    assert not dtensor.is_split_late(Shard(0))
    assert (dtensor.split_dim(Shard(1)), dtensor.split_dim(Replicate())) == (1, None)
    parts = dtensor.split(torch.arange(5.0), 2)
    assert torch.equal(parts[dist.get_rank()], dtensor.local_part(tensor))
    like = dtensor.tensor_like(local := torch.zeros(parts[dist.get_rank()].shape), tensor)
    assert like.placements == tensor.placements
    assert dtensor.local_part(like) is local
    late = _StridedShard(0, split_factor=2)
    assert dtensor.is_split_late(late)
    assert dtensor.split_dim(late) == 0
    with_fsdp()
    assert "cpu" in distributed.device_types(dist.group.WORLD)
    distributed.default_store().set("x", "1")
    distributed.set_timeouts(dist.default_pg_timeout)
    assert isinstance(pickle.loads(distributed.flight_records()), dict)
    assert not distributed.is_inside_ddp()


def with_fsdp() -> None:
    model = nn.Linear(4, 4)
    model.unused = nn.Parameter(torch.zeros(4))
    fully_shard(model)
    assert fsdp.gathered_parameters(model) == []
    filled: set[nn.Parameter] = set()
    fsdp.before_reduction(model, partial(fsdp.fill_lacking_gradients, filled=filled))
    loss = model(torch.ones(1, 4)).sum()
    assert len(fsdp.gathered_parameters(model)) == 3
    loss.backward()
    assert filled == {model.unused}
    assert model.unused.grad is not None
    fsdp.forget_gathered_gradients(model)


class Branches(nn.Module):
    """Two projections, of which a call may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor, *, uses_second: bool) -> torch.Tensor:
        return self.first(x) + self.second(x) if uses_second else self.first(x)


def lack_gradients_in_one_microbatch(uses: list[list[bool]]) -> list[float]:
    """Return the sums of both gradients after microbatches that add up in float32."""
    model = Branches()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    model.set_gradient_divide_factor(1.0)
    model.set_force_sum_reduction_for_comms(True)
    fsdp.before_reduction(model, partial(fsdp.fill_lacking_gradients, filled=set()))
    for number, ranks in enumerate(uses):
        model.set_requires_gradient_sync(number == len(uses) - 1)
        model(torch.ones(2, 8), uses_second=ranks[dist.get_rank()]).sum().backward()
    return [float(it.weight.grad.full_tensor().sum()) for it in (model.first, model.second)]


NONE, ONE = [False, False], [True, False]


@pytest.mark.parametrize("uses", [[NONE, NONE], [ONE, NONE], [NONE, ONE]], ids=str)
def test_gradients_that_are_missing_have_the_format_of_the_others(uses: list[list[bool]]) -> None:
    # Two rows of ones, 64 weights, for each microbatch and rank.
    for found in run_on_ranks(2, lack_gradients_in_one_microbatch, uses):
        assert found == [4 * 128.0, sum(map(sum, uses)) * 128.0]


def test_distributed_functions_on_two_ranks() -> None:
    run_on_ranks(2, on_two_ranks)


def test_schedules_and_stages_have_private_names() -> None:
    assert all(issubclass(get_schedule_class(name), distributed.TorchSchedule) for name in ("1F1B", "ZBVZeroBubble"))
    assert "_post_metadata_inference_cleanup" in vars(PipelineStage)


def test_checkpoint_metadata_classes_exist() -> None:
    for module, name in dcp.TABLE_PARTS:
        home = {"torch": torch, "torch.serialization": torch.serialization}.get(module)
        assert hasattr(home or (filesystem if module.endswith("filesystem") else metadata), name), (module, name)
    kind = type(metadata.TensorProperties().memory_format)
    assert not isinstance(kind, str)
    assert dcp.memory_format(int, "TORCH_CONTIGUOUS_FORMAT") is None


def test_nested_values_are_flattened_and_unflattened() -> None:
    nest = {"a": [torch.ones(1), 2], "b": (None, "c")}
    leaves, structure = autograd.flatten(nest)
    assert len(leaves) == 4
    assert autograd.unflatten(leaves, structure) == nest


def test_nonzero_of_a_meta_tensor_returns_all_entries() -> None:
    with autograd.all_entries_nonzero():
        assert torch.ones(3, 2, device="meta").nonzero().shape == (6, 2)


def test_children_are_replaced_without_registration() -> None:
    module = nn.Module()
    module.layers = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    first = module.layers[:1]
    compat_nn.module_table(module)["layers"] = first
    assert module.layers is first
