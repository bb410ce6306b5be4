"""Refuse code of a program that a parallel model would not run."""

from types import MethodType

from torch import nn
from transformers import PreTrainedModel

from meshtrain.compat.nn import own_forward
from meshtrain.compat.transformers import has_loss_of_program
from meshtrain.config.plan import ParallelPlan
from meshtrain.errors import ModelError
from meshtrain.models.fused import fused_modules
from meshtrain.parallel.cut.hooks import has_hooks_on_itself


def check_code_of_projections(model: PreTrainedModel, plan: ParallelPlan) -> None:
    """Check that no hook or forward of the program is on a projection that the plan replaces.

    Args:
        model: stock, not cut yet.
        plan: resolved.

    Raises:
        ModelError: naming what would be lost.
    """
    own = _own_forwards(model)
    for name in fused_modules(model, plan.tensor.fused):
        if name in own or has_hooks_on_itself(model.get_submodule(name)):
            what = "a replaced forward" if name in own else "a hook"
            raise ModelError(
                f"{name} has {what}, but tensor.fused keeps that projection in parts", "put it on the module around it"
            )


def check_code_of_stages(model: PreTrainedModel) -> None:
    """Check that no loss, hook or forward of the program would be lost in a pipeline.

    Args:
        model: stock, not cut yet.

    Raises:
        ModelError: naming what would be lost.
    """
    own = _own_forwards(model)
    if has_loss_of_program(model):
        raise ModelError(
            "model.loss_function was set by the program, but the last stage of a pipeline computes the mean cross "
            "entropy itself",
            "pass it as meshtrain.parallelize(..., loss=...), or use a mesh with pp = 1, which uses the model's own "
            "loss",
        )
    if "" in own:
        raise ModelError(
            "model.forward was replaced by the program, but the stages of a pipeline run the forward of the class, "
            "and compute the loss themselves",
            "use a mesh with pp = 1, or replace the forward of a module inside",
        )
    if has_hooks_on_itself(model):
        raise ModelError(
            "the model itself has a hook, but the inputs and outputs of pipeline stages differ from those of the model",
            "put it on a module inside, or use a mesh with pp = 1",
        )
    for name, module in own.items():
        if not _is_method_of(module):
            raise ModelError(
                f"the forward of {name} was replaced by a function that is not a method of it, and would still "
                "compute with the module that was cut",
                "pass it as types.MethodType(function, module), with the module as its first argument, or use a mesh "
                "with pp = 1",
            )


def _own_forwards(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return name -> module, for each module whose forward the program has replaced."""
    return {name: module for name, module in model.named_modules() if own_forward(module) is not None}


def _is_method_of(module: nn.Module) -> bool:
    forward = own_forward(module)
    return isinstance(forward, MethodType) and forward.__self__ is module
