"""The function `rebind`: it connects an optimizer to the parameters of a parallel model."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from meshtrain.api.arguments import check_optimizer
from meshtrain.api.values import Successors
from meshtrain.compat.dtensor import local_part
from meshtrain.errors import ModelError
from meshtrain.models.layout import local_tensor
from meshtrain.parallel.local_parameter import LocalParameter, as_local, choose_kernels
from meshtrain.parallel.shard import is_gathered

# They compute element by element, so the part of a parameter on this process is all they need.
ELEMENTWISE = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
SUCCESSORS = "meshtrain_successors"
HAS_ALL = "meshtrain_has_all"
"""Attribute of a parallel parameter: whether this process holds a part of every parameter."""
_WATCHED: list[RemovableHandle] = []


def rebind(optimizer: Optimizer) -> None:
    """Connect an optimizer that was made before `meshtrain.parallelize` to the new parameters.

    Its parameter groups stay the same objects, so a scheduler that was made for it continues to
    work. State of a parameter (moments) is cut as the parameter was. An optimizer that was made
    after `parallelize`, from `model.parameters()`, may be passed as well: it then works on the
    tensors of this process, with torch's fused kernels.

    The optimizers of torch that compute element by element get `LocalParameter`s. Any other gets
    the DTensors themselves, through which torch computes with the full matrix. Muon supports them;
    torch's Adafactor does not and fails at its first step over tp or dp_shard. Such optimizers see
    a projection that the stock model fuses (GPT-2's `c_attn`) as the matrices that are stored
    (query, key, value), so their step differs from that in one process.

    With float16 use `torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler`, and call its
    `unscale_` before its `step`: torch's own GradScaler would decide on each rank separately
    whether to skip a step. Clip with `meshtrain.clip_grad_norm(model, ...)`, because the parameters
    that the optimizer holds afterwards give the norm of this process only. torch's own GradScaler
    and clipping raise an error with `LocalParameter`s.

    Args:
        optimizer: changed in place.

    Raises:
        ModelError: if its state has something that cannot be cut, it holds no parameter of a
            parallel model, or it is LBFGS, whose parameters cannot be changed.

    Source: ZeRO (arXiv:1910.02054): an optimizer needs only the shards that are stored on its
    process.
    """
    check_optimizer("rebind: optimizer", optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ModelError(
            "rebind: LBFGS has a list of its parameters that cannot be changed",
            "make it after meshtrain.parallelize, on a mesh with tp = 1 and pp = 1",
        )
    held = _held(optimizer)
    if held and not any(map(_is_of_parallel_model, held)):
        raise ModelError(
            f"rebind: this {type(optimizer).__name__} holds {len(held)} parameters, and none of a parallel model",
            "call it after meshtrain.parallelize, with the optimizer of that model",
        )
    local = type(optimizer) in ELEMENTWISE
    for group in optimizer.param_groups:
        followed: list[nn.Parameter] = []
        for parameter in group["params"]:
            for successor, state in _inherited(parameter, optimizer.state.pop(parameter, {})):
                bound = as_local(successor) if local else successor
                followed.append(bound)
                if state:
                    optimizer.state[bound] = _local_state(state) if local else state
        group["params"] = followed
    if local:
        choose_kernels(optimizer)


def _held(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _is_of_parallel_model(parameter: nn.Parameter) -> bool:
    # Gathered parameters are accepted here; the check at the first step reports them in more
    # detail.
    known = hasattr(parameter, SUCCESSORS) or hasattr(parameter, HAS_ALL) or is_gathered(parameter)
    return known or isinstance(parameter, (LocalParameter, DTensor))


def _check_sees_all(optimizer: Optimizer, held: Sequence[nn.Parameter]) -> None:
    if not isinstance(optimizer, torch.optim.LBFGS):
        return
    # Over tp torch cannot concatenate its gradients, some of which are cut. Over pp each rank would
    # take a different step.
    num_cut = sum(isinstance(parameter, DTensor) for parameter in held)
    if 0 < num_cut < len(held) or not all(getattr(parameter, HAS_ALL, True) for parameter in held):
        raise ModelError(
            "LBFGS computes with all parameters at once, which no rank has over tp or pp",
            "use a mesh with tp = 1 and pp = 1, or an optimizer such as torch.optim.AdamW",
        )


def _inherited(parameter: nn.Parameter, state: Mapping[str, object]) -> list[tuple[nn.Parameter, dict[str, object]]]:
    successors = getattr(parameter, SUCCESSORS, None)
    if successors is None:
        return [(parameter, dict(state))]
    inherited: dict[nn.Parameter, dict[str, object]] = {successor: {} for successor in successors}
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == successors.shape and value.dim() > 0:
            for successor, part in successors.shards(value):
                inherited[successor][key] = part.clone().to(local_tensor(successor.detach()).device)
        elif isinstance(value, Tensor) and value.numel() > 1:
            raise ModelError(
                f"the optimizer has {key!r} of {successors.name} in the shape {tuple(value.shape)}, which cannot be "
                f"cut as the parameter is ({tuple(successors.shape)})",
                "make the optimizer after meshtrain.parallelize",
            )
        else:
            for successor in successors:
                inherited[successor][key] = value.clone() if isinstance(value, Tensor) else value
    return list(inherited.items())


def _local_state(state: Mapping[str, object]) -> dict[str, object]:
    """Return the state of an optimizer for a DTensor as that for its part on this process."""
    return {key: value.to_local() if isinstance(value, DTensor) else value for key, value in state.items()}


def record_successors(successors: Mapping[nn.Parameter, Successors]) -> None:
    """Record on every old parameter what it has become, for optimizers that still hold it."""
    has_all = all(any(True for _ in found) for found in successors.values())
    for old, found in successors.items():
        setattr(old, SUCCESSORS, found)
        for successor in found:
            setattr(successor, HAS_ALL, has_all)
    if not _WATCHED:
        _WATCHED.append(register_optimizer_step_pre_hook(_check_bound))


def _check_bound(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Refuse a step of an optimizer that holds parameters that nothing uses now.

    They have no gradients, so the step would silently change nothing.

    Raises:
        ModelError: naming one of them; or if they are gathered parameters, or the model's
            parameters have left the memory that they shared with the optimizer's.
    """
    held = _held(optimizer)
    _check_sees_all(optimizer, held)
    lost = [parameter for parameter in held if getattr(parameter, SUCCESSORS, None) is not None]
    if lost:
        raise ModelError(
            f"this {type(optimizer).__name__} holds {len(lost)} parameters from before meshtrain.parallelize "
            f"({getattr(lost[0], SUCCESSORS).name}), which nothing uses now",
            "call meshtrain.rebind(optimizer) after it",
        )
    if gathered := [parameter for parameter in held if is_gathered(parameter)]:
        raise ModelError(
            f"this {type(optimizer).__name__} was made between a forward pass and its backward pass, and holds "
            f"{len(gathered)} temporary, gathered parameters, which nothing uses later",
            "make it before the forward pass, or after the backward pass",
        )
    moved = [p for p in held if isinstance(p, LocalParameter) and p.data_ptr() != local_part(p.full).data_ptr()]
    if moved:
        raise ModelError(
            f"{len(moved)} parameters of this {type(optimizer).__name__} have left the memory that it was bound to, "
            "so its step would have no effect: a part of the model was cast or moved since",
            "do that before meshtrain.parallelize",
        )
