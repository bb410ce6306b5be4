"""The matrices of the decoder layers, which some optimizers update as a whole."""

from collections.abc import Iterator

from torch import nn

from meshtrain.parallel.cut.stage import Stage
from meshtrain.parallel.experts.stacks import expert_stacks


def hidden_matrices(stage: Stage) -> set[str]:
    """Return the names of the parameters of a stage that are matrices of its layers.

    These are parameters of two dimensions, but not embeddings, and stacks of one or several
    matrices for each expert.
    """
    held = {parameter for layer in stage.own_layers() for parameter in matrices_of(layer)}
    return {name for name, parameter in stage.named_parameters() if parameter in held}


def matrices_of(layer: nn.Module) -> Iterator[nn.Parameter]:
    """Yield those parameters of a layer."""
    # A parameter of two dimensions that belongs to experts has a bias for each of them.
    experts = {it for stack in expert_stacks(layer).values() for it in stack.parameters(recurse=False)}
    for module in layer.modules():
        if not isinstance(module, nn.Embedding):
            for parameter in module.parameters(recurse=False):
                if parameter.dim() > 2 if parameter in experts else parameter.dim() == 2:
                    yield parameter
