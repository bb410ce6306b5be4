"""The tables [optimizer] and [learning_rate] of a run file."""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from meshtrain.config.settings import Fraction, NotNegative, Settings
from meshtrain.errors import ConfigError

LARGEST_RATE = 10.0
LearningRateScheduleName = Literal[
    "constant",
    "constant_with_warmup",
    "exponential",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
]
OptimizerName = Literal["adafactor", "adamw", "adamw-8bit", "adamw-schedule-free", "lion", "muon", "sgd"]
OptimizerState = Literal["parameters", "bfloat16"]
# `adamw-8bit`: how many numbers of a row share a scale, and how many a parameter has at least.
MOMENT_BLOCK, FEWEST_NUMBERS = 64, 4_096
AdjustedLearningRate = Literal["match_rms_adamw", "original"]
LearningRate = Annotated[float, Field(gt=0.0, le=LARGEST_RATE, allow_inf_nan=False)]
# Keys that one optimizer reads alone.
_OWN: dict[OptimizerName, tuple[str, ...]] = {
    "adafactor": ("beta2_decay", "clipping_threshold"),
    "muon": ("adamw_learning_rate", "muon_momentum", "adjust_lr_fn"),
}


class OptimizerKind(NamedTuple):
    """What is known of an optimizer without building it.

    Attributes:
        class_name: of its class.
        num_states: how many numbers it keeps for each one of a parameter.
        unread: keys that it does not read, of those that several optimizers read.
        num_matrix_states: how many numbers it keeps for each one of a matrix of the layers; None:
            as for other parameters.
    """

    class_name: str
    num_states: int
    unread: tuple[str, ...] = ()
    num_matrix_states: int | None = None


OPTIMIZERS: dict[OptimizerName, OptimizerKind] = {
    "adafactor": OptimizerKind("Adafactor", 1, ("beta1", "beta2", "epsilon", "state")),
    "adamw": OptimizerKind("AdamW", 2),
    "adamw-8bit": OptimizerKind("BlockwiseAdamW", 2, ("state",)),
    "adamw-schedule-free": OptimizerKind("ScheduleFreeAdamW", 2, ("state",)),
    "lion": OptimizerKind("Lion", 1, ("epsilon", "state")),
    "muon": OptimizerKind("Muon", 2, ("state",), num_matrix_states=1),
    "sgd": OptimizerKind("SGD", 1, ("beta2", "epsilon", "state")),
}


def has_8bit_moments(shape: Sequence[int]) -> bool:
    """Return whether `adamw-8bit` keeps the moments of a parameter in 8 bits.

    Args:
        shape: of the full parameter, so that all meshes agree.
    """
    return len(shape) > 1 and shape[-1] % MOMENT_BLOCK == 0 and math.prod(shape) >= FEWEST_NUMBERS


class GroupConfig(Settings):
    """Parameters that are trained with other settings than the rest."""

    parameters: Annotated[list[str], Field(min_length=1)]
    """Patterns of their names, in which `*` stands for one number. A pattern may also name a
    module, which stands for all parameters inside: `model.layers.*.mlp`. The first group that names
    a parameter counts."""
    learning_rate: Annotated[float, Field(ge=0.0, le=LARGEST_RATE, allow_inf_nan=False)] | None = None
    """Highest learning rate. It changes over the run as that of the rest. Left out: that of the
    rest."""
    weight_decay: Annotated[float, Field(ge=0.0, le=10.0, allow_inf_nan=False)] | None = None
    """Weight decay of all these parameters, also of norms and biases. Left out: as for the rest."""
    frozen: bool = False
    """Whether these parameters stay as they are: they get no gradient, and the optimizer keeps
    nothing for them."""

    @model_validator(mode="after")
    def _differs(self) -> Self:
        options = [key for key in ("learning_rate", "weight_decay") if getattr(self, key) is not None]
        if self.frozen and options:
            raise ConfigError(f"`{options[0]}` is set for a frozen group", "leave it out, or set frozen = false")
        if not (self.frozen or options):
            raise ConfigError(
                "none of `learning_rate`, `weight_decay` and `frozen` is set", "set one, or leave the group out"
            )
        return self


class OptimizerConfig(Settings):
    """The optimizer."""

    name: OptimizerName = "adamw"
    """`adamw`; `adafactor`, which keeps one number for each row and column of a matrix;
    `adamw-8bit`, which keeps its two numbers for each parameter in 8 bits; `adamw-schedule-free`,
    whose learning rate stays the same, and which evaluates and saves an average of the weights;
    `lion`, which keeps one number for each parameter where AdamW keeps two, and needs a learning
    rate about a fifth as high; `muon` for the matrices of the layers, with `adamw` for all other
    parameters; or `sgd` with momentum, which keeps one."""
    learning_rate: LearningRate = 3e-4
    """Highest learning rate; `[learning_rate]` defines how it changes over the run. `muon`: that of
    the matrices. `adafactor`: relative to the size of a parameter, so that 0.01 is usual."""
    adamw_learning_rate: LearningRate | None = None
    """`muon`: highest learning rate of all other parameters. Left out: `learning_rate`."""
    beta1: Fraction = 0.9
    """Decay rate of the mean of the gradients. `lion`: weight of the moment in a step. `sgd`:
    momentum. `adamw-schedule-free`: weight of the average in the weights that are trained."""
    beta2: Fraction = 0.95
    """Decay rate of the mean of the squared gradients. `lion`: decay rate of the moment."""
    epsilon: Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)] = 1e-8
    """Added to the denominator, against division by zero."""
    weight_decay: Annotated[float, Field(ge=0.0, le=10.0, allow_inf_nan=False)] = 0.1
    """Weight decay. It applies to matrices only, not to norms and biases. It is decoupled from the
    gradient, except under `sgd`, which adds it to the gradient."""
    beta2_decay: Annotated[float, Field(ge=-1.0, lt=0.0, allow_inf_nan=False)] = -0.8
    """`adafactor`: the mean of the squared gradients moves to the squares of step t by a part of
    t to this power."""
    clipping_threshold: Annotated[float, Field(ge=1.0, allow_inf_nan=False)] = 1.0
    """`adafactor`: largest root of the mean square of the update of a parameter, before the
    learning rate; `d` of `torch.optim.Adafactor`."""
    muon_momentum: Fraction = 0.95
    """`muon`: decay rate of the mean of the gradients of a matrix."""
    adjust_lr_fn: AdjustedLearningRate = "match_rms_adamw"
    """`muon`: factor of the learning rate of a matrix, as in `torch.optim.Muon`. `match_rms_adamw`
    is 0.2 times the root of its longer side, so that a learning rate of AdamW fits. `original` is
    the root of rows / columns, at least 1, and needs a learning rate of about 0.02."""
    state: OptimizerState = "parameters"
    """Number format of the two moments of AdamW between steps: that of the parameters, or
    `bfloat16` with stochastic rounding, for parameters in float32. It saves 4 bytes per
    parameter."""
    max_gradient_norm: Annotated[float, Field(gt=0.0)] = 1.0
    """Largest norm of the gradients of the whole model; larger gradients are scaled down. `inf`
    only measures."""
    groups: list[GroupConfig] = []
    """Parameters with settings of their own."""

    @model_validator(mode="after")
    def _reads_all(self) -> Self:
        of_others = [key for name, keys in _OWN.items() if name != self.name for key in keys]
        for key in (*OPTIMIZERS[self.name].unread, *of_others):
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ConfigError(f"`{key}` is not read by the optimizer {self.name!r}", "leave it out")
        if self.averages_weights and self.beta1 == 0:
            raise ConfigError(
                f"`beta1` = 0 keeps no average of the weights, which is the result of {self.name!r}", "raise it"
            )
        return self

    @property
    def averages_weights(self) -> bool:
        """Whether the result is an average of the weights."""
        return self.name == "adamw-schedule-free"

    @property
    def keeps_blocks(self) -> bool:
        """Whether it keeps numbers for blocks of a row, which no mesh may cut."""
        return self.name == "adamw-8bit"

    @property
    def takes_whole_matrices(self) -> bool:
        """Whether a matrix of the layers is updated as a whole, and not each number alone."""
        return OPTIMIZERS[self.name].num_matrix_states is not None

    def state_bytes(self, width: int, shape: Sequence[int], full: Sequence[int], *, of_matrix: bool) -> int:
        """Return the bytes that the optimizer keeps for a part of a parameter.

        Args:
            width: bytes of a number of the parameter.
            shape: of the part.
            full: shape of the parameter.
            of_matrix: whether it belongs to a matrix of the layers.
        """
        kind = OPTIMIZERS[self.name]
        number = kind.num_states
        if of_matrix and kind.num_matrix_states is not None:
            number = kind.num_matrix_states
        has_state = self.name != "sgd" or self.beta1 > 0
        size = math.prod(shape)
        if self.name == "adafactor" and len(shape) > 1:
            *stack, rows, columns = shape
            size = math.prod(stack) * (rows + columns)
        if self.keeps_blocks and has_8bit_moments(full):
            # A scale is in float32 at least.
            return number * (size + size // MOMENT_BLOCK * max(width, 4))
        return has_state * number * size * (width if self.state == "parameters" else 2)


STOCK_OPTIMIZER = OptimizerConfig()


class LearningRateConfig(Settings):
    """How the learning rate changes over the run: a schedule of `transformers.get_scheduler`."""

    name: LearningRateScheduleName = "cosine"
    """Name of the schedule. All schedules that depend on the step only are available.
    `exponential` is none of transformers: the rate changes by the same factor in each step, from
    the argument `lr_start` in the first one to `optimizer.learning_rate` in the last."""
    warmup_steps: NotNegative = 0
    """Number of steps over which the learning rate rises from 0."""
    arguments: dict[str, Any] = {}
    """Further arguments of the schedule, under the names of transformers, such as `num_cycles`
    or `min_lr_rate`."""
