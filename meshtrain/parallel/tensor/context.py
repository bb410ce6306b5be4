"""Where a module lies in the model, and what the classes that apply a style share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import PretrainedConfig

from meshtrain.compat.dtensor import ModuleStyle
from meshtrain.config.plan import Style
from meshtrain.parallel.tensor.region import Edge, Region

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class ModuleContext:
    """The position of a module in the model, and what its style needs to know.

    Attributes:
        name: FQN of the module.
        region: how hidden states are distributed around the module.
        entered: whether the block around the module has already entered the sharded weights, so
            that the input of the module is full.
        gathers_logits: whether a gathered output is joined to the full one; False for logits that
            the loss takes sharded.
        styles: module name -> style, of the complete model.
        sharded_dims: name of a sharded parameter -> the dimension that is sharded over tp.
        summed: names of full parameters whose gradients are summed by rules of their own.
        config: of the language model.
    """

    name: str
    region: Region
    entered: bool
    gathers_logits: bool
    styles: Mapping[str, Style]
    sharded_dims: Mapping[str, int]
    summed: frozenset[str]
    config: PretrainedConfig


class AppliedStyle(ModuleStyle):
    """Base of the classes that change a module in place, as a style asks.

    Args:
        context: of the module.
    """

    def __init__(self, context: ModuleContext) -> None:
        super().__init__()
        self.context, self.region = context, context.region

    def shards_parameters(self, module: nn.Module) -> bool:
        """Return whether the rules shard parameters of the module's own."""
        own = (kind for kind, _ in module.named_parameters(recurse=False))
        return any(f"{self.context.name}.{kind}" in self.context.sharded_dims for kind in own)

    def shard_parameters(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Shard the module's own parameters that the rules shard, in place."""
        for kind, parameter in list(module.named_parameters(recurse=False)):
            dim = self.context.sharded_dims.get(f"{self.context.name}.{kind}")
            if dim is not None:
                shards = distribute_tensor(parameter.detach(), mesh, [Shard(dim)], src_data_rank=None)
                module.register_parameter(kind, nn.Parameter(shards, requires_grad=parameter.requires_grad))


def full_parameters(name: str, module: nn.Module, dims: Mapping[str, int]) -> list[str]:
    """Return the names, inside a module, of its own parameters that are not sharded.

    Args:
        name: of the module.
        module: with parameters of its own.
        dims: name of a sharded parameter -> the dimension that is sharded over tp.
    """
    return [kind for kind, _ in module.named_parameters(recurse=False) if f"{name}.{kind}" not in dims]


def full_biases(name: str, module: nn.Module, dims: Mapping[str, int]) -> list[str]:
    """Return those that stacked experts add to results which are then summed over tp.

    Their names end with `bias`. Others, such as scales, are factors, which every process needs.
    """
    return [kind for kind in full_parameters(name, module, dims) if kind.endswith("bias")]


def change_input(change: Edge, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
    """Change the hidden states that a module receives: a forward pre-hook with `change` bound."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}


def change_output(change: Edge, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Change the hidden states that a module returns: a forward hook, after `change` is bound."""
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)
