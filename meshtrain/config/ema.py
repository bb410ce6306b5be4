"""The table [ema] of a run file."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from meshtrain.config.settings import Count, Settings
from meshtrain.errors import ConfigError

FLOAT32_BYTES = 4


class EmaConfig(Settings):
    """An exponential moving average of the weights, in float32, beside the weights that train. It
    is sharded and saved as they are, and `meshtrain export --ema` writes it."""

    decay: Annotated[float, Field(gt=0.0, lt=1.0, allow_inf_nan=False)] | None = None
    """Fraction of the average that stays at each update; the rest comes from the weights. Usual is
    0.999 to 0.9999. Left out: no average."""
    every: Count = 1
    """Number of steps between updates."""
    evaluate: bool = False
    """Evaluate the average too. The weights are copied meanwhile."""

    @model_validator(mode="after")
    def _has_decay(self) -> Self:
        if self.decay is None:
            for key in ("every", "evaluate"):
                if getattr(self, key) != type(self).model_fields[key].default:
                    raise ConfigError(f"`{key}` is not read without `decay`", "set `decay`, or leave it out")
        return self

    def bytes_per_number(self, parameter: int) -> int:
        """Return the bytes that the average keeps for a number of a parameter.

        Args:
            parameter: bytes of the number itself.
        """
        return 0 if self.decay is None else max(FLOAT32_BYTES, parameter)


NO_EMA = EmaConfig()
