"""Proof of tensor parallelism with dropout, in which the plan is measured against itself.

No stock model drops the same elements as a mesh does. Dropout is a function of seed, step and
microbatch, so a repeated step drops the same elements. The loss is then a smooth function of the
parameters, and the gradient must be its derivative: it is compared with the finite difference along
a random direction. What all processes of a tp group hold must stay bit-identical while they train.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from meshtrain.compat.casts import float32_casts_lifted
from meshtrain.compat.transformers import copy_expert_implementation
from meshtrain.errors import ModelError, TrainingStopped, UserError
from meshtrain.models.build import build_meta_model
from meshtrain.models.initialize import restore_buffers
from meshtrain.models.layout import local_indices, local_tensor
from meshtrain.parallel.pipeline import Pipeline, full_tensor
from meshtrain.parallel.randomness import stream_key
from meshtrain.runtime.ranks import RankError, run_on_ranks
from meshtrain.training.self_check import check_parameters
from meshtrain.training.step import StepContext, StepResult, train_step
from meshtrain.verify.case import ProofCase, with_noise
from meshtrain.verify.parallel import build_on_ranks, build_step_context, fill, local_rows, without_warnings
from meshtrain.verify.reference import given_weights

RATE, STEPS = 0.2, 5
SMALL_STEPS = (1e-6, 1e-8)
"""Distances of the finite difference, the most precise first.

A router that changes its choice within the distance makes the loss jump. Then the next one is used.
"""
TOLERANCE = 1e-6
ATTENTION_NAMES = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
# Rates that drop complete layers, and those of parts that are not the language model.
OTHER_NAMES = ("layerdrop", "classifier", "summary")


@dataclass(frozen=True)
class DropoutProof:
    """The result of a proof with dropout.

    Attributes:
        error: of the derivative of the loss along a random direction, relative to the norm of the
            gradient.
        drift: what differs, after a few steps, between processes that must hold the same; None if
            nothing does.
    """

    error: float
    drift: str | None

    @property
    def difference(self) -> str | None:
        """What is wrong, as text; None if nothing is."""
        if self.drift is not None:
            return self.drift
        # NaN is not within the tolerance.
        return None if self.error <= TOLERANCE else f"the derivative of the loss by {self.error:.0e}"


def drops_attention(config: PretrainedConfig) -> bool:
    """Return whether a class can drop attention probabilities."""
    return any(name.rpartition(".")[2] in ATTENTION_NAMES for name in _rates(config.get_text_config().to_dict()))


def with_dropout(case: ProofCase) -> ProofCase:
    """Return a case with dropout at every rate of its configuration."""
    config = case.hf_config
    values = _filled(config.to_dict())
    if "output_router_logits" in values:
        # The loss that is measured does not include that of the routers.
        values["output_router_logits"] = False
    new = type(config).from_dict(values)
    copy_expert_implementation(config, new)
    return replace(case, hf_config=new)


def prove_dropout(case: ProofCase) -> DropoutProof:
    """Train a case on its ranks, with dropout at every rate, and return the proof.

    Raises:
        UserError: for a model or a plan that the ranks refuse, and for a model that drops nothing.
        RankError: if it does not run.
    """
    dropping = with_dropout(case)
    # A class may refuse rates above zero.
    build_meta_model(dropping.hf_config, dtype=torch.float32, attention="eager")
    try:
        errors = run_on_ranks(case.world_size, measure, dropping, timeout=300.0)
    except RankError as error:
        if isinstance(error.original, TrainingStopped):
            return DropoutProof(float("nan"), str(error.original))
        if isinstance(error.original, UserError):
            raise error.original from error
        raise
    return DropoutProof(max(errors), None)


@without_warnings()
def measure(case: ProofCase) -> float:
    """Run the proof of `prove_dropout` on a rank, and return the error of the derivative."""
    weights = with_noise(given_weights(case))
    pipeline = build_on_ranks(case, case.plan)
    for stage in pipeline.stages:
        restore_buffers(stage.model)
    with float32_casts_lifted():
        fill(pipeline, weights)
        context, batch = build_step_context(pipeline), local_rows(pipeline, _without_padding(case))
        if not _drops(context, batch):
            raise ModelError(f"a tiny copy of a {case.hf_config.model_type} drops nothing, whatever its rates are")
        error = derivative_error(context, batch)
        for step in range(STEPS):
            train_step(context, step, batch, np.arange(case.global_batch_size))
        check_parameters(pipeline)
    return error


def _without_padding(case: ProofCase) -> dict[str, Tensor]:
    """Return a global batch without the padding token.

    Its embedding gets no gradient, although the loss depends on it.
    """
    # The configuration of CodeGen has no `pad_token_id`.
    batch, padding = case.batches()[0], getattr(case.hf_config.get_text_config(), "pad_token_id", None)
    if padding is not None:
        ids = batch["input_ids"]
        batch["input_ids"] = torch.where(ids == padding, (ids + 1) % case.vocabulary, ids)
    return batch


def _drops(context: StepContext, batch: Mapping[str, Tensor]) -> bool:
    """Return whether two steps with the same parameters and samples have different losses.

    What else may draw, such as the noise of routers, has no effect in a tiny copy.
    """
    still = replace(context, learning_rate=lambda step: 0.0)
    one, other = (train_step(still, step, batch, np.arange(len(batch["input_ids"]))).loss for step in (0, 1))
    return one != other


def derivative_error(context: StepContext, batch: Mapping[str, Tensor]) -> float:
    """Compare gradient and finite difference along a random direction, with the masks of step 0.

    Args:
        context: its parameters are restored afterward, except for rounding.
        batch: of this process.

    Returns:
        The difference, relative to the norm of the gradient; the same on all processes.
    """
    slopes: list[float] = []

    def note_slope(_: Mapping[str, Tensor]) -> None:
        slopes.append(_slope(context.pipeline))

    still = replace(context, learning_rate=lambda step: 0.0, inspect=note_slope)

    def result_at(shift: float) -> StepResult:
        _shift(context.pipeline, shift)
        result = train_step(still, 0, batch, np.arange(len(batch["input_ids"])))
        _shift(context.pipeline, -shift)
        return result

    here, error = result_at(0.0), float("inf")
    for step in SMALL_STEPS:
        slope = (result_at(step).loss - result_at(-step).loss) / (2 * step)
        error = min(error, abs(slope - slopes[0]) / here.gradient_norm)
        if error <= TOLERANCE:
            break
    return error


def _slope(pipeline: Pipeline) -> float:
    """Return the derivative of the loss along the direction, according to the gradient."""
    total = 0.0
    canonical = pipeline.canonical_names()
    for name, parameter in pipeline.owned_parameters().items():
        if parameter.grad is not None:
            gradient = full_tensor(parameter.grad)
            total += float((gradient * _direction(canonical.get(name, name), gradient)).sum())
    return total


def _shift(pipeline: Pipeline, distance: float) -> None:
    """Move all parameters along the direction."""
    canonical = pipeline.canonical_names()
    with torch.no_grad():
        for name, parameter in pipeline.named_parameters():
            direction = _direction(canonical[name], parameter)
            for dim, index in enumerate(local_indices(parameter)):
                direction = direction.index_select(dim, index)
            local_tensor(parameter).add_(direction, alpha=distance)


def _direction(name: str, like: Tensor) -> Tensor:
    stream = torch.Generator().manual_seed(stream_key("direction", name))
    return torch.randn(like.shape, generator=stream, dtype=torch.float64)


def _rates(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the dropout rates of a configuration and of its inner tables."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from (f"{name}.{inner}" for inner in _rates(_named(value)))
        elif _is_rate(name, value):
            yield name


def _filled(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _filled(value) if isinstance(value, dict) and _named(value) else RATE if _is_rate(name, value) else value
        for name, value in values.items()
    }


def _named(table: Mapping[Any, Any]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if isinstance(name, str)}


def _is_rate(name: str, value: Any) -> bool:
    # MPT's rate is an integer, which can drop nothing or all.
    return isinstance(value, float) and "drop" in name and not any(other in name for other in OTHER_NAMES)
