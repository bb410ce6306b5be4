"""The table [objective] of a run file."""

from typing import Annotated

from pydantic import Field

from meshtrain.config.settings import Fraction, Settings


class ObjectiveConfig(Settings):
    """What training minimizes besides the cross-entropy. The evaluation loss is the cross-entropy
    alone."""

    label_smoothing: Fraction = 0.0
    """Part of the probability of each target that is spread evenly over the vocabulary. 0: none."""
    z_loss: Annotated[float, Field(ge=0.0, le=10.0, allow_inf_nan=False)] = 0.0
    """Factor of the z-loss of PaLM, which keeps the logits from drifting: the mean over the trained
    tokens of the square of the logarithm of the sum of the exponentials of the logits. Usual is
    1e-4. 0: none."""


STOCK_OBJECTIVE = ObjectiveConfig()
