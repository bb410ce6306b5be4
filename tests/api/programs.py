"""A user's training loop, once around the stock model and once around a parallel one."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer
from transformers import AutoModelForCausalLM, PreTrainedModel

import meshtrain
from meshtrain.api.handle import pipeline_of
from meshtrain.config.mesh import DATA_AXES
from meshtrain.models.build import load_hf_config
from meshtrain.models.fused import join_parts
from meshtrain.parallel.pipeline import full_tensor
from meshtrain.runtime.mesh import axis_size, data_rank
from tests.casts import lift_float32_casts
from tests.parity import MODELS, VOCABULARY

ROWS = 8
Batch = dict[str, Tensor]


def stock_model(name: str, *, seed: int = 0) -> PreTrainedModel:
    """Build a tiny model as a user does, with random values in float64 in which nothing is zero."""
    lift_float32_casts()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(load_hf_config(MODELS[name])).double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def padded_batches(widths: tuple[int, ...] = (8, 12, 6, 10)) -> list[Batch]:
    """Return padded batches of different widths; some rows end early, others start late.

    They are views, as in a program that truncates a wider batch.
    """
    generator = torch.Generator().manual_seed(1)
    batches = []
    for width in widths:
        ids = torch.randint(3, VOCABULARY, (ROWS, width + 1), generator=generator)
        mask = torch.ones_like(ids)
        mask[1, width // 2 :] = 0
        mask[2, : width // 3] = 0
        batch = {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
        batches.append({name: value[:, :width] for name, value in batch.items()})
    return batches


def own_part(model: Any, batch: Batch) -> Batch:
    """Return the rows of this data rank."""
    mesh = pipeline_of(model).mesh
    return {name: value.chunk(axis_size(mesh, *DATA_AXES))[data_rank(mesh)] for name, value in batch.items()}


def make_adam(model: Any) -> Optimizer:
    return Adam(model.parameters(), lr=1e-2, eps=1e-4)


def train(model: Any, optimizer: Optimizer, batches: list[Batch], part: Callable[[Batch], Batch]) -> list[float]:
    """Train as a user does, a step for each batch, and return the losses."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        if isinstance(model, PreTrainedModel):
            loss = model(**part(batch)).loss
            loss.backward()
        else:
            loss = model.forward_backward(part(batch))
        optimizer.step()
        losses.append(loss.item())
    return losses


def full_parameters(model: Any) -> dict[str, Tensor]:
    """Return the parameters of this rank as full tensors, under the stock names."""
    pipeline = pipeline_of(model)
    ours = {name: full_tensor(parameter).detach() for name, parameter in pipeline.owned_parameters().items()}
    return join_parts(ours, pipeline.fused)


def expected(name: str, optimize: Callable[[Any], Optimizer] = make_adam) -> tuple[list[float], dict[str, Tensor]]:
    """Train the stock model on full batches."""
    model = stock_model(name)
    losses = train(model, optimize(model), padded_batches(), lambda batch: batch)
    return losses, {key: value.detach() for key, value in model.named_parameters()}


def parallel(model: PreTrainedModel, mesh: Mapping[str, int], **tables: Any) -> Any:
    """Call `meshtrain.parallelize` on a rank of the pool, which may not start those of a proof."""
    return meshtrain.parallelize(model, {"mesh": dict(mesh), **tables}, prove_unknown_class=False)
