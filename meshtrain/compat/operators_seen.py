"""What an observer of the operators of torch must know about them."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import flop_registry

MESSAGES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""The namespaces of the operators that send messages.

Why: those of the functional collectives are private.
Holds: torch 2.11 to 2.13.
"""

QUERIES = ("prim",)
"""The namespaces of the operators that only ask for a property, such as the device.

Why: fake tensors answer with an operator, and others do not.
Holds: torch 2.11 to 2.13.
"""

WAITS = ("wait_tensor", "barrier", "monitored_barrier_")
"""The operators of `MESSAGES` that move no data.

Why: torch has no list of them.
Holds: torch 2.11 to 2.13.
"""

BUFFERED = ("_allgather_base_", "_reduce_scatter_base_", "recv_")
"""The operators whose arguments FSDP2 and torch's schedules allocate for messages alone.

Why: the names under the public collectives are private.
Holds: torch 2.11 to 2.13.
"""

GATHERED = "split_with_sizes_copy"
"""The first operator of FSDP2 that needs a gathered message.

Why: FSDP2 awaits the message on a stream, and no operator shows it.
Holds: torch 2.11 to 2.13.
"""

ATTENTION = "scaled_dot_product"
"""What the names of the operators of attention have in common.

Why: the operators under the public function are private.
Holds: torch 2.11 to 2.13.
"""

HOOK = "_record_function_enter_new"
"""The name of the operator with which FSDP2 begins each piece of its hooks.

Why: FSDP2 marks these pieces for profilers, so a simulation sees how many there are. So do the
few calls of an optimizer, which count as well.
Holds: torch 2.11 to 2.13.
"""


def attention_of_cpu(full_name: str) -> str | None:
    """Return which pass an operator of attention that exists on a CPU only does, by its full name.

    Returns:
        `forward` or `backward`; None for any other operator.

    Why: the operators under the public function are private.
    Holds: torch 2.11 to 2.13.
    """
    if not (ATTENTION in full_name and "_for_cpu" in full_name):
        return None
    return "backward" if "_backward" in full_name else "forward"


LOOKUPS = ("embedding", "gather", "index", "index_select")
"""The operators that read a part of their first argument.

Why: no property of an operator tells it.
Holds: torch 2.11 to 2.13.
"""

UNTOUCHING = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view")
"""The operators that return memory without reading or writing it.

Why: no property of an operator tells it.
Holds: torch 2.11 to 2.13.
"""


def name_of(func: Any) -> tuple[str, str]:
    """Return the namespace and the name of an operator, without its overload.

    Why: only its private schema has them apart.
    Holds: torch 2.11 to 2.13.
    """
    namespace, _, name = func._schema.name.partition("::")
    return namespace, name


def full_name_of(func: Any) -> str:
    """Return the name of an operator by which `operator_of` finds it, such as "aten.mm.default".

    Why: an operator cannot be pickled, and only its string has all parts of its name.
    Holds: torch 2.11 to 2.13.
    """
    return str(func)


def operator_of(full_name: str) -> Any:
    """Return the operator of a name that `full_name_of` has returned.

    Why: torch has no public function for it.
    Holds: torch 2.11 to 2.13.
    """
    namespace, packet, overload = full_name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def shown_name(name: str) -> str:
    """Return the name of an operator that sends messages as people know it, such as "allgather".

    Why: the names under the public collectives are private.
    Holds: torch 2.11 to 2.13.
    """
    return name.strip("_").removesuffix("_base")


def message_kind(name: str) -> str:
    """Return all_reduce, all_gather, reduce_scatter, or `send` for all other messages.

    Why: an operation has one name in c10d and another among the functional collectives.
    Holds: torch 2.11 to 2.13.
    """
    plain = name.replace("_", "")
    kinds = ("all_reduce", "all_gather", "reduce_scatter")
    return next((kind for kind in kinds if plain.startswith(kind.replace("_", ""))), "send")


def changed_arguments(func: Any, args: Any) -> list[Any]:
    """Return the arguments that an operator changes.

    Why: only its private schema tells them. It includes the gradients of fused optimizers, which
    change them if they are given a loss scale. Here they are not.
    Holds: torch 2.11 to 2.13.
    """
    found = zip(func._schema.arguments, args, strict=False)
    return [it for kind, it in found if kind.alias_info and kind.alias_info.is_write and kind.name != "grads"]


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the floating-point operations of an operator: those of matrix products and attention.

    Why: torch's counter sees DTensors at their global shape. It does not know attention on the CPU,
    nor, in torch 2.11, attention with fewer heads of keys than of queries.
    Holds: torch 2.11 to 2.13.
    """
    name = func._schema.name
    if ATTENTION in name:
        return _attention_flops(name, args)
    packet = func._overloadpacket
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=result))
    return 0


def _attention_flops(name: str, args: Any) -> int:
    """Return 2 operations for each multiplication: of 2 products, and of 5 in the backward pass."""
    is_backward = name.endswith("_backward")
    query, key, value = args[1:4] if is_backward else args[:3]
    batch, heads, queries, width = query.shape
    # The backward pass computes the scores again, and differentiates both products.
    columns = 3 * width + 2 * value.shape[-1] if is_backward else width + value.shape[-1]
    return int(2 * batch * heads * queries * key.shape[-2] * columns)


def group_name_of(argument: Any) -> str | None:
    """Return the name of the process group that an argument of a collective denotes, or None.

    Why: functional collectives take a name, the others a boxed group.
    Holds: torch 2.11 to 2.13.
    """
    if isinstance(argument, torch.ScriptObject):
        try:
            return str(dist.ProcessGroup.unbox(argument).group_name)
        except RuntimeError:
            # It is something else in a box, such as the operation of a reduction.
            return None
    return None


def tensors_of(values: Any) -> list[Tensor]:
    """Return the tensors in nested lists and tuples, as operators take and return them.

    Why: `tensors_in` of `meshtrain.compat.autograd` knows all nests, but takes several times as
    long, and a simulation calls this for every operator.
    Holds: torch 2.11 to 2.13.
    """
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, list | tuple):
        return [tensor for value in values for tensor in tensors_of(value)]
    return []
