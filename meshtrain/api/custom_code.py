"""Check for code of the program inside a model that would silently be lost when it is cut."""

from types import MethodType

from torch import nn
from transformers import PreTrainedModel

from meshtrain.compat.nn import own_forward
from meshtrain.compat.transformers import has_loss_of_program
from meshtrain.config.plan import ParallelPlan
from meshtrain.errors import ModelError
from meshtrain.models.fused import fused_modules
from meshtrain.parallel.cut.hooks import has_hooks_on_itself


def check_own_code(model: PreTrainedModel, plan: ParallelPlan) -> None:
    """Check that no loss, hook or forward that the program has put into the model would be lost.

    Args:
        model: stock, not cut yet.
        plan: resolved.

    Raises:
        ModelError: naming what would be lost.
    """
    own = {name: module for name, module in model.named_modules() if own_forward(module) is not None}
    for name in fused_modules(model, plan.tensor.fused):
        if name in own or has_hooks_on_itself(model.get_submodule(name)):
            what = "a forward of yours" if name in own else "a hook"
            raise ModelError(
                f"{name} has {what}, but tensor.fused keeps that projection in parts; put it on the module around it"
            )
    if plan.mesh.pp == 1:
        return
    if has_loss_of_program(model):
        raise ModelError(
            "model.loss_function was set to a function of yours, but the last stage of a pipeline computes the mean "
            "cross entropy itself; use a mesh with pp = 1, which uses the model's own loss"
        )
    if "" in own:
        raise ModelError(
            "model.forward was replaced by one of yours, but the stages of a pipeline run that of the class, and "
            "compute the loss themselves; use a mesh with pp = 1, or replace the forward of a module inside"
        )
    if has_hooks_on_itself(model):
        raise ModelError(
            "the model itself has a hook, but the stages of a pipeline are called with other inputs and return "
            "other outputs than it; put it on a module inside, or use a mesh with pp = 1"
        )
    for name, module in own.items():
        if not _is_method_of(module):
            raise ModelError(
                f"the forward of {name} was replaced by a function that is not a method of it, and would still compute "
                "with the module that was cut; pass it as types.MethodType(function, module), with the module as "
                "its first argument, or use a mesh with pp = 1"
            )


def _is_method_of(module: nn.Module) -> bool:
    forward = own_forward(module)
    return isinstance(forward, MethodType) and forward.__self__ is module
