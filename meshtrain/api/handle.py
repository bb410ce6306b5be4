"""The state that meshtrain keeps for a parallel model of a program."""

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from meshtrain.config.arguments import described
from meshtrain.errors import ModelError
from meshtrain.parallel.pipeline import Pipeline

ATTRIBUTE = "meshtrain"


@dataclass
class Handle:
    """A parallel model, as the functions of this package see it.

    Attributes:
        pipeline: computes the model.
        device: of this rank's part.
        source: the local directory that the model came from, if known.
        has_values: whether the parameters have been filled; a model from meta has none at first.
        adapted: the PeftModel around the model, if there is one.
        num_forwards: number of training passes so far, for the random streams of dropout.
        is_generating: whether forward passes follow each other with the same parameters.
    """

    pipeline: Pipeline
    device: torch.device
    source: str | None = None
    has_values: bool = True
    num_forwards: int = 0
    is_generating: bool = False
    adapted: Any = None

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise ModelError(
            "a parallel model cannot be copied: its process groups and hooks belong to it alone",
            "parallelize a stock model for each copy, or keep copies of the parameters that you need "
            "(parameter.detach().clone())",
        )

    def check_values(self) -> None:
        """Check that the parameters have values.

        Raises:
            ModelError: if not.
        """
        if not self.has_values:
            raise ModelError(
                "the parameters of this model have no values yet, because it was built on meta",
                "call meshtrain.initialize(model, seed=0), meshtrain.load_weights(model, folder) or "
                "meshtrain.load_checkpoint(directory, state) first",
            )


def handle_of(model: object) -> Handle:
    """Return the handle of a parallel model, or of the model inside an adapter around it.

    Raises:
        ModelError: if it is not what `meshtrain.parallelize` returned.
    """
    handle = find_handle(model)
    if handle is None:
        raise ModelError(
            f"{described(model)} is not a parallel model", "pass what meshtrain.parallelize(model, plan) returns"
        )
    return handle


def find_handle(model: object) -> Handle | None:
    """Return the handle of a parallel model; None for anything else."""
    if isinstance(model, Pipeline):
        # The model of a run, which its hooks receive.
        on_gpu = model.mesh.device_type == "cuda"
        return Handle(model, torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"))
    inner: Any = model
    # An adapter of peft may surround it.
    if isinstance(inner, nn.Module) and hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()  # type: ignore[operator]
    handle = vars(inner).get(ATTRIBUTE) if hasattr(inner, "__dict__") else None
    return handle if isinstance(handle, Handle) else None


def pipeline_of(model: object) -> Pipeline:
    """Return the pipeline of a parallel model."""
    return handle_of(model).pipeline
