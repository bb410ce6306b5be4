"""torch's DTensor: the layouts of FSDP2 over tensor parallelism, and local parts."""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.distributed.tensor.placement_types import _StridedShard


def is_split_late(placement: Placement) -> bool:
    """Return whether a mesh axis splits the parts that the axes after it have made.

    Why: FSDP2 uses this private placement for parameters that tensor parallelism has sharded.
    Holds: torch 2.11 to 2.13.
    """
    return isinstance(placement, _StridedShard)


def split_dim(placement: Placement) -> int | None:
    """Return the dimension that a placement splits; None if it splits none.

    Why: `is_shard()` is silently False for the private placement of FSDP2 over tensor parallelism.
    Holds: torch 2.11 to 2.13.
    """
    return placement.dim if isinstance(placement, (Shard, _StridedShard)) else None


def split(tensor: Tensor, parts: int) -> list[Tensor]:
    """Split a tensor along dimension 0 as DTensor does; the last parts may be shorter, or empty.

    Why: the sizes of uneven parts must be those of DTensor, which has no public function for them.
    Holds: torch 2.11 to 2.13.
    """
    pieces, _ = Shard(0)._split_tensor(tensor, parts, with_padding=False, contiguous=True)
    return pieces


def local_part(tensor: DTensor) -> Tensor:
    """Return the part of a DTensor on this process, outside autograd.

    Why: `to_local` takes part in autograd, and costs several times as much. An optimizer needs
    every parameter and gradient several times a step.
    Holds: torch 2.11 to 2.13.
    """
    return tensor._local_tensor


Late = Callable[[Tensor], Tensor]
_OF_GRADIENTS = "_meshtrain_of_gradients"


class _LocalPart(torch.autograd.Function):
    """The local part of a parameter. Its gradient gets the layout of the parameter."""

    @staticmethod
    def forward(ctx: Any, full: DTensor, late: Late | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.spec, ctx.late, local = _spec_of_gradients(full._spec), late, full._local_tensor
        ctx.stride = local.stride()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[DTensor | None, None]:
        if gradient is None:
            return None, None
        spec = ctx.spec
        if ctx.late is not None:
            gradient = ctx.late(gradient)
        if gradient.stride() != ctx.stride:
            # An optimizer relies on the order of the parameter in memory, which the DTensor claims.
            gradient = torch.empty_strided(
                gradient.shape, ctx.stride, dtype=gradient.dtype, device=gradient.device
            ).copy_(gradient)
        if torch.is_grad_enabled():
            # The gradient has a gradient itself.
            of_full = DTensor.from_local(gradient, spec.mesh, spec.placements, shape=spec.shape, stride=spec.stride)
            return of_full, None
        return DTensor(gradient, spec, requires_grad=False), None


def _spec_of_gradients(spec: DTensorSpec) -> DTensorSpec:
    # One copy for all gradients, because torch may change what the spec of a tensor knows.
    found: DTensorSpec | None = spec.__dict__.get(_OF_GRADIENTS)
    if found is None or found.tensor_meta is not spec.tensor_meta:
        found = spec.__dict__[_OF_GRADIENTS] = copy(spec)
    return found


def local_in_graph(tensor: DTensor, late: Late | None = None) -> Tensor:
    """Return the part of a DTensor on this process, through which gradients flow back to it.

    Args:
        tensor: a parameter, or what was computed from some.
        late: given the gradient that autograd has for the part, returns the whole one. Only for
            parameters, in a pass with gradients that is not compiled.

    Why: `to_local` does the same, but its backward pass takes 0.2 ms on a CPU. With tensor
    parallelism each parameter needs it in every microbatch, which is 1% of a step.
    Holds: torch 2.11 to 2.13.
    """
    if late is None and (
        not torch.is_grad_enabled() or torch.compiler.is_compiling() or any(it.is_partial() for it in tensor.placements)
    ):
        return tensor.to_local()
    return _LocalPart.apply(tensor, late)  # type: ignore[no-untyped-call]


def tensor_like(local: Tensor, like: DTensor) -> DTensor:
    """Return a DTensor over the memory of `local`, with the layout of `like`.

    `local` has the shape of the local part of `like`.

    Why: `DTensor.from_local` moves an offloaded tensor to the device of the mesh, and values loaded
    into that copy would be lost.
    Holds: torch 2.11 to 2.13.
    """
    return DTensor(local, like._spec, requires_grad=False)


def tensor_reduced_like(local: Tensor, like: DTensor, dim: int) -> DTensor:
    """Return a DTensor over the memory of `local`: that of `like` with size 1 in one dimension.

    A process has what its part of `like` was reduced to. So mesh axes that split this dimension
    have copies.

    Args:
        local: has the shape of the local part of `like`, but for size 1 in the dimension.
        like: a sharded tensor.
        dim: that was reduced; may be negative.

    Why: as for `tensor_like`, `DTensor.from_local` would move an offloaded tensor.
    Holds: torch 2.11 to 2.13.
    """
    dim %= like.dim()
    placements = tuple(Replicate() if split_dim(it) == dim else it for it in like.placements)
    return _tensor_over(local, like.device_mesh, placements, [1 if at == dim else n for at, n in enumerate(like.shape)])


def tensor_of_shape_like(local: Tensor, like: DTensor, shape: Sequence[int]) -> DTensor:
    """Return a DTensor over the memory of `local`, of another shape but laid out as `like`.

    Args:
        local: this process's part.
        like: a sharded tensor.
        shape: of the result. Each process holds the same part of it as of `like`.

    Why: as for `tensor_like`, `DTensor.from_local` would move an offloaded tensor.
    Holds: torch 2.11 to 2.13.
    """
    return _tensor_over(local, like.device_mesh, like.placements, shape)


def _tensor_over(local: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: Sequence[int]) -> DTensor:
    full = torch.empty(shape, device="meta")
    meta = TensorMeta(full.shape, full.stride(), local.dtype)
    return DTensor(local, DTensorSpec(mesh, placements, meta), requires_grad=False)


class ModuleStyle(ParallelStyle):
    """A style for `parallelize_module`, which changes one module in `apply`.

    Why: torch's own styles are extended by a private method.
    Holds: torch 2.11 to 2.13.
    """

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Change a module in place, and return it."""
        raise NotImplementedError

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self.apply(module, device_mesh)
