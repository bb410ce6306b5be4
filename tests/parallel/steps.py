"""A new pipeline and its first steps, for tests that examine the result of a step."""

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshtrain.config.run import ModelConfig
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.training.optimizer_state import state_tensors
from meshtrain.training.step import StepContext, StepResult, train_step
from tests.parity import GLOBAL_BATCH, Case, batches, build, smallest_part


def start(case: Case, *, model: ModelConfig | None = None, seed: int = 0) -> Pipeline:
    """Build the pipeline of a case on the ranks; its random values do not depend on `seed`."""
    pipeline = build(case, model=model, seed=seed)
    pipeline.initialize(0)
    return pipeline


def take_step(context: StepContext, step: int, batch: dict[str, Tensor] | None = None) -> StepResult:
    """Train on the fewest rows that the schedule accepts, by default of the first global batch."""
    rows = smallest_part(context.pipeline, batch or batches()[0])
    return train_step(context, step, rows, np.arange(GLOBAL_BATCH))


def moments(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return AdamW's moments of a parameter with its layout, empty before its first gradient."""
    return {
        key.split(".")[1]: value
        for key, value in state_tensors(optimizer, {"": parameter}).items()
        if ".step." not in key
    }


def steps_done(optimizer: Optimizer, parameter: nn.Parameter) -> float:
    """Return the number of steps in which a parameter had a gradient."""
    return state_tensors(optimizer, {"": parameter}).get("optimizer.step.", torch.zeros(1)).item()
