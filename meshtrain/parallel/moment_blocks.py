"""Blocks of the moments of an optimizer: whether a plan leaves them whole."""

from collections.abc import Mapping

from torch import nn
from transformers import PreTrainedModel

from meshtrain.config.optimizer import FEWEST_NUMBERS, MOMENT_BLOCK, OptimizerConfig, has_8bit_moments
from meshtrain.config.plan import ParallelPlan
from meshtrain.errors import ConfigError
from meshtrain.parallel.account import local_shapes


def check_moment_blocks(
    model: PreTrainedModel, adapters: Mapping[str, nn.Module], optimizer: OptimizerConfig, plan: ParallelPlan
) -> None:
    """Check that an optimizer with moments in blocks has any, and that the plan cuts none.

    Args:
        model: stock, on the meta device. What does not train is frozen.
        adapters: LoRA layers that were taken off the model.
        optimizer: of the run.
        plan: resolved.

    Raises:
        ConfigError: if it has none, or for the first block that the plan cuts.
    """
    if not optimizer.keeps_blocks:
        return
    what, found = f"optimizer.name = {optimizer.name!r}", False
    for name, parameter, shape in local_shapes(model, plan, adapters):
        if not parameter.requires_grad or not has_8bit_moments(parameter.shape):
            continue
        found = True
        if shape[-1] % MOMENT_BLOCK:
            raise ConfigError(
                f"{what}: {name} has rows of {parameter.shape[-1]} numbers, of which a process would hold "
                f"{shape[-1]}, which are no multiple of the {MOMENT_BLOCK} that share a scale",
                "set a smaller plan.mesh.tp or dp_shard, or another optimizer",
            )
    if not found:
        raise ConfigError(
            f"{what}: no parameter that trains has rows of a multiple of {MOMENT_BLOCK} numbers, and "
            f"{FEWEST_NUMBERS:,} numbers in all, so none would have moments in 8 bits",
            'set optimizer.name = "adamw"',
        )
