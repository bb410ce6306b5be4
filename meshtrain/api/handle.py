"""What a parallel model of a user's knows of itself."""

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
    """A parallel model, as the functions of this room see it.

    Attributes:
        pipeline: what computes.
        device: where.
        source: the local directory that the model came from, if it is known.
        has_values: whether the parameters have been filled; a model from meta has none at first.
        adapted: the PeftModel around the model, if there is one.
        num_forwards: training steps so far, for the streams of dropout.
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
            "a parallel model cannot be copied: its process groups and hooks are its own; make a stock model parallel "
            "for each, or keep what you need of the parameters (parameter.detach().clone())"
        )

    def check_values(self) -> None:
        """Check that there is something to compute with.

        Raises:
            ModelError: if the parameters have no values yet.
        """
        if not self.has_values:
            raise ModelError(
                "the parameters of this model have no values yet, it was built on meta; call "
                "meshtrain.initialize(model, seed=0), meshtrain.load_weights(model, folder) or "
                "meshtrain.load_checkpoint(directory, state) first"
            )


def handle_of(model: object) -> Handle:
    """Return the handle of what `meshtrain.parallelize` returned, or of the model inside of an adapter around it.

    Raises:
        ModelError: for anything else.
    """
    handle = find_handle(model)
    if handle is None:
        raise ModelError(
            f"{described(model)} is no parallel model; give what meshtrain.parallelize(model, plan) returns"
        )
    return handle


def find_handle(model: object) -> Handle | None:
    """Return the handle of a parallel model; None of any other."""
    if isinstance(model, Pipeline):
        # That of a run, which its hooks are given.
        on_gpu = model.mesh.device_type == "cuda"
        return Handle(model, torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"))
    inner: Any = model
    # An adapter of peft around it.
    if isinstance(inner, nn.Module) and hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()  # type: ignore[operator]
    handle = vars(inner).get(ATTRIBUTE) if hasattr(inner, "__dict__") else None
    return handle if isinstance(handle, Handle) else None


def pipeline_of(model: object) -> Pipeline:
    """Return what computes in a parallel model."""
    return handle_of(model).pipeline
