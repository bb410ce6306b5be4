"""What a run asks of its model between steps, beside the loss on validation data."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from transformers import PretrainedConfig

from meshtrain.parallel.pipeline import Pipeline

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Evaluation(NamedTuple):
    """What was found, the same on all processes."""

    metrics: Mapping[str, float] = _NOTHING
    """Name -> number, for the metrics of the run."""
    note: Mapping[str, Any] = _NOTHING
    """What is not a number, as `RunState.note`."""


class Evaluator(Protocol):
    """Evaluates the model of a run between steps."""

    @property
    def every(self) -> int | None:
        """Return the number of steps between evaluations; None: only at the end."""

    def check(self, config: PretrainedConfig, tokenizer: Path) -> None:
        """Check before the process group is joined what can be checked there.

        Args:
            config: of the model.
            tokenizer: the directory with the tokenizer of the run.

        Raises:
            UserError: for what the model cannot be asked.
        """

    def evaluate(self, pipeline: Pipeline, tokenizer: Path) -> Evaluation:
        """Evaluate the model. Collective.

        Args:
            pipeline: of the run. Parameters, gradients, modes and random states stay as they are.
            tokenizer: the directory with the tokenizer of the run.
        """
