"""Matrix products of linear layers in float8.

Modules:
    gather: weights that FSDP2 gathers in float8.
    layers: which linear layers of a model compute in float8, and why others do not.
    product: the product, forward and backward.

The package itself has `apply_float8`, which changes the linear layers of a stage. Weights and
activations stay in bfloat16, so sharding, stages and checkpoints are those of bfloat16.
"""

from collections.abc import Collection
from functools import cache, partial
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from meshtrain.compat.nn import mix_in
from meshtrain.config.plan import Float8Recipe
from meshtrain.parallel.cut.stage import Stage
from meshtrain.parallel.float8.product import RECIPES, Recipe, float8_linear
from meshtrain.parallel.tensor.modules import Product, ShardedConv1D, ShardedLinear


def apply_float8(stage: Stage, layers: Collection[str], recipe: Float8Recipe) -> list[nn.Module]:
    """Let linear layers of a stage compute in float8, in place.

    Args:
        stage: already cut by tensor parallelism, and without adapters.
        layers: names of the linear layers of the full model that do.
        recipe: of the plan.

    Returns:
        The layers of this stage that do.
    """
    changed = []
    modules = dict(stage.model.named_modules())
    for name in layers:
        module = modules.get(name)
        if module is None or not any(True for _ in module.parameters(recurse=False)):
            # It is on another stage.
            continue
        changed.append(module)
        product = _product(recipe, is_transposed=isinstance(module, Conv1D))
        if isinstance(module, ShardedLinear | ShardedConv1D):
            module.product = product
        else:
            mix_in(module, _InFloat8, product=_static(product))
    return changed


@cache
def _product(recipe: Float8Recipe, *, is_transposed: bool) -> Product:
    """Return one object for all layers, so that torch.compile compiles one graph for them."""
    return partial(_transposed if is_transposed else float8_linear, RECIPES[recipe])


@cache
def _static(product: Product) -> Any:
    return staticmethod(product)


def _transposed(recipe: Recipe, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return float8_linear(recipe, x, weight.T, bias)


class _InFloat8:
    """Mixin for a stock Linear or Conv1D that multiplies in float8."""

    product: Product
    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """Project (batch, seq, in) to (batch, seq, out)."""
        return self.product(x, self.weight, self.bias)
