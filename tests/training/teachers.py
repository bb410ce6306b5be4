"""Runs with a teacher, and the same training of two stock models in one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from meshtrain.config.data import TokenizerConfig
from meshtrain.config.distillation import DistillationConfig
from meshtrain.config.run import ModelConfig, RunConfig
from meshtrain.training import loop
from tests.ranks import run_on_ranks
from tests.training.preferences import Stock, compare, write_base
from tests.training.runs import GPT2, VOCABULARY, Mesh, build_plan, build_run, train_here
from tests.training.stock_optimizer import stock_adamw

WEIGHT, TEMPERATURE = 0.3, 2.5


def write_teacher(directory: Path, *, seed: int = 1, **changes: Any) -> None:
    """Write a model of another class, in float64, that is sure of its tokens, with dropout."""
    torch.manual_seed(seed)
    values = {"vocab_size": VOCABULARY, "initializer_range": 0.3, **GPT2, **changes}
    config = GPT2Config(bos_token_id=0, eos_token_id=0, **values)
    GPT2LMHeadModel(config).double().save_pretrained(directory / "teacher")


def run_on(directory: Path, mesh: Mesh, **changes: Any) -> RunConfig:
    """Return a run of 3 steps that learns from the teacher in the directory."""
    options = {name: changes.pop(name) for name in ("schedule", "sequence_parallel") if name in changes}
    plan = changes.pop("plan", build_plan(mesh, **options))
    config = DistillationConfig(teacher=str(directory / "teacher"), weight=WEIGHT, temperature=TEMPERATURE)
    model = ModelConfig(path=str(directory / "base"), weights="pretrained")
    name = changes.pop("name", "-".join(map(str, mesh)))
    run = build_run(directory / name, "qwen3", plan, **{"steps": 3, "distillation": config, **changes})
    data = run.data.model_copy(update={"tokenizer": TokenizerConfig(path=str(directory / "base"))})
    return run.model_copy(update={"data": data, "model": model})


def both_terms(model: Any, teacher: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the mean cross-entropy and divergence of trained tokens, by torch's own functions."""
    labels = batch.pop("labels")
    is_trained = labels != -100
    logits = model(**batch, use_cache=False).logits[is_trained]
    with torch.no_grad():
        theirs = teacher(**batch, use_cache=False).logits[is_trained]
    ours, wanted = (F.log_softmax(it / TEMPERATURE, -1) for it in (logits, theirs))
    divergence = F.kl_div(ours, wanted, reduction="batchmean", log_target=True)
    return F.cross_entropy(logits, labels[is_trained]), divergence


def train_stock(run: RunConfig, train_one: Callable[[RunConfig], Any]) -> Stock:
    """Train the stock model on the tokens that a run in this process sees, step by step.

    Args:
        train_one: trains the run on this process.
    """
    batches: list[dict[str, Tensor]] = []
    step_of_product = loop.train_step

    def spy(context: Any, step: int, batch: dict[str, Tensor], sample_ids: np.ndarray) -> Any:
        batches.append({**batch})
        return step_of_product(context, step, batch, sample_ids)

    loop.train_step = spy
    train_one(run)
    paths = str(run.model.path), str(run.distillation.teacher)
    options = {"dtype": torch.float64, "experts_implementation": "eager"}
    model, teacher = (AutoModelForCausalLM.from_pretrained(it, **options).eval() for it in paths)
    trained, config = [*model.parameters()], run.optimizer
    optimizer = stock_adamw(trained, config)
    losses, terms = [], []
    for batch in batches:
        cross_entropy, divergence = both_terms(model, teacher, batch)
        loss = (1 - WEIGHT) * cross_entropy + WEIGHT * TEMPERATURE**2 * divergence
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, config.max_gradient_norm)
        optimizer.step()
        losses.append(loss.item())
        terms.append({"cross_entropy": cross_entropy.item(), "kl": divergence.item()})
    return Stock(losses, terms, {name: it.detach() for name, it in model.named_parameters()}, {})


def write_models(directory: Path) -> None:
    """Write a model, and a teacher of another class."""
    write_base(directory)
    write_teacher(directory)


def stock_of(directory: Path, train_one: Callable[[RunConfig], Any] = train_here, **changes: Any) -> Stock:
    """Return what two stock models give in one process, and compare a run there with it."""
    run = run_on(directory, (1, 1, 1, 1), name="one", **changes)
    (stock,) = run_on_ranks(1, train_stock, run, train_one, joins=False)
    compare(directory / "one", stock)
    return stock
