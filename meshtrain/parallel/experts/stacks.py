"""The stacked experts of a model: modules whose own parameters have one matrix for each expert."""

from torch import nn

from meshtrain.compat.transformers import can_leave_out_experts, selection_bias
from meshtrain.errors import ModelError


def expert_stacks(model: nn.Module) -> dict[str, nn.Module]:
    """Return name -> module of stacked experts, in the order of the model.

    Args:
        model: or a part of one.
    """
    return {name: module for name, module in model.named_modules() if can_leave_out_experts(module)}


def block_of(model: nn.Module, stack: str) -> nn.Module:
    """Return the module around a stack of experts, which has their router.

    Args:
        stack: its name in the model.
    """
    return model.get_submodule(stack.rpartition(".")[0])


def selection_biases(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return stack -> module and name of the bias that its router selects experts with.

    Stacks without such a bias are left out.

    Args:
        model: or a part of one.
    """
    found = {name: selection_bias(block_of(model, name)) for name in expert_stacks(model)}
    return {name: bias for name, bias in found.items() if bias is not None}


def expert_parameters(model: nn.Module) -> set[str]:
    """Return the names of the parameters that have one matrix or row for each expert."""
    stacks = expert_stacks(model).items()
    return {f"{name}.{kind}" for name, stack in stacks for kind, _ in stack.named_parameters(recurse=False)}


def numbers_of_experts(model: nn.Module) -> dict[str, int]:
    """Return name -> number of experts of each stack that says it."""
    numbers = {name: getattr(stack, "num_experts", None) for name, stack in expert_stacks(model).items()}
    return {name: number for name, number in numbers.items() if isinstance(number, int)}


def num_experts(stack: nn.Module) -> int:
    """Return the number of experts of a stack, on all ranks of ep or on this one alone.

    Raises:
        ModelError: if some of its parameters do not belong to single experts.
    """
    number = getattr(stack, "num_experts", None)
    for name, parameter in stack.named_parameters():
        if number is None or "." in name or len(parameter) != number:
            raise ModelError(
                f"{name} {tuple(parameter.shape)} of {type(stack).__name__} does not belong to single experts, of "
                f"which there are {number}"
            )
    assert isinstance(number, int)
    return number
