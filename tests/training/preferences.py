"""Runs on judged answers, and the same training of a stock model with formulas written by hand."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from meshtrain.config.data import DataConfig, TokenizerConfig
from meshtrain.config.plan import ParallelPlan
from meshtrain.config.preference import PreferenceConfig
from meshtrain.config.run import ModelConfig, RunConfig
from meshtrain.data.cache import Cache
from meshtrain.models.adapters import initialize_adapters, without_adapters
from meshtrain.runtime.ranks import RankError
from tests.data.corpora import byte_tokenizer
from tests.ranks import run_on_ranks
from tests.training.runs import QWEN3, VOCABULARY, WORDS, build_run, read_checkpoint, steps_of, train_here
from tests.training.stock_optimizer import stock_adamw

Record = dict[str, Any]
SEQUENCE = 32
PAIRS = ("prompt", "chosen", "rejected")


def write_base(directory: Path, *, seed: int = 0) -> None:
    """Write a model in float64 and its tokenizer, which makes a token of each byte."""
    torch.manual_seed(seed)
    config = Qwen3Config(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **QWEN3)
    Qwen3ForCausalLM(config).double().save_pretrained(directory / "base")
    byte_tokenizer(Cache(directory / "cache")).copy(directory / "base")


def write_records(path: Path, loss: str, *, number: int = 22, seed: int = 0) -> list[Record]:
    """Write prompts with answers, pairs of them or judged ones, each at most 25 tokens long."""
    draw = np.random.default_rng(seed)

    def words(most: int) -> str:
        return " ".join(draw.choice(WORDS, 4))[: draw.integers(1, most + 1)]

    records: list[Record] = []
    for _ in range(number):
        prompt = words(12)
        if loss == "kto":
            records.append({"prompt": prompt, "completion": words(12), "label": bool(draw.integers(2))})
        else:
            records.append({"prompt": prompt, "chosen": words(12), "rejected": words(12)})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return records


def preference_run(
    directory: Path, name: str, plan: ParallelPlan, config: PreferenceConfig, **changes: Any
) -> RunConfig:
    """Return a run of 3 steps on the records in the directory."""
    data = DataConfig(
        train=[str(directory / "records.jsonl")],
        format=config.records or "text",
        form="padded",
        sequence_length=SEQUENCE,
        tokenizer=TokenizerConfig(path=str(directory / "base")),
        cache_directory=str(directory / "cache"),
    )
    model = ModelConfig(path=str(directory / "base"), weights="pretrained")
    run = build_run(directory / name, "qwen3", plan, steps=3, micro_batch_size=1, data=data)
    return run.model_copy(update={"model": model, "preference": config, **changes})


def train(run: RunConfig) -> None:
    """Train on as many ranks as the plan needs."""
    run_on_ranks(run.plan.mesh.world_size, train_here, run, joins=False)


def refused(run: RunConfig) -> str:
    """Train until a process refuses to, and return its message."""
    with pytest.raises(RankError) as caught:
        train(run)
    return str(caught.value.original)


class Answer(NamedTuple):
    """An answer behind its prompt."""

    log_prob: Tensor
    """() in nats."""
    length: int


def answer_of(model: Any, tokenizer: Tokenizer, prompt: str, answer: str) -> Answer:
    """Return what a model says about an answer, in a row of its own, without padding."""
    before, after = (tokenizer.encode(text, add_special_tokens=False).ids for text in (prompt, answer))
    ids = torch.tensor([*before, *after, tokenizer.token_to_id("<|endoftext|>")])
    log_probs = F.log_softmax(model(input_ids=ids[None]).logits[0].double(), -1)
    each = log_probs[:-1].gather(1, ids[1:, None])[len(before) - 1 :]
    return Answer(each.sum(), len(each))


class Stock(NamedTuple):
    """What the stock model in one process gives."""

    losses: list[float]
    terms: list[dict[str, float]]
    parameters: dict[str, Tensor]
    evaluation: dict[str, float]


LossOfStep = Callable[[Any, Any, Tokenizer, Sequence[Record], Sequence[int]], tuple[Tensor, dict[str, float]]]
"""Maps model, reference, tokenizer, all records and those of a step to loss and terms."""


def train_stock(
    run: RunConfig,
    records: list[Record],
    loss_of: LossOfStep,
    held_out: list[Record],
    train_one: Callable[[RunConfig], list[dict[str, Any]]] = train_here,
) -> Stock:
    """Train the stock model on the records that a run in this process sees, step by step.

    Args:
        train_one: trains the run on this process.
    """
    seen = train_one(run)
    tokenizer = Tokenizer.from_file(str(Path(str(run.data.tokenizer.path)) / "tokenizer.json"))
    options = {"dtype": torch.float64, "experts_implementation": "eager"}
    model, reference = (
        AutoModelForCausalLM.from_pretrained(run.model.path, **options).train(is_trained)
        for is_trained in (True, False)
    )
    if run.lora.rank is not None:
        asked = PeftConfig(r=run.lora.rank, lora_alpha=run.lora.rank, target_modules="all-linear")
        base, model = model, get_peft_model(model, asked).double()
        with without_adapters(base) as layers:
            initialize_adapters(base, layers, seed=run.seed)
    trained, config = [it for it in model.parameters() if it.requires_grad], run.optimizer
    optimizer = stock_adamw(trained, config)
    losses, terms = [], []
    for step in seen:
        loss, found = loss_of(model, reference, tokenizer, records, step["ids"])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, config.max_gradient_norm)
        optimizer.step()
        losses.append(loss.item())
        terms.append(found)
    parameters = {name: it.detach() for name, it in model.named_parameters() if it.requires_grad}
    evaluation: dict[str, float] = {}
    if held_out:
        loss, found = loss_of(model, reference, tokenizer, held_out, range(len(held_out)))
        evaluation = {"eval_loss": loss.item(), **{f"eval_{name}": value for name, value in found.items()}}
    return Stock(losses, terms, parameters, evaluation)


def compare(directory: Path, stock: Stock) -> None:
    """Compare the losses, metrics and parameters that a run has left."""
    found = steps_of(directory)
    assert len(found) == len(stock.losses)
    for step, loss, terms in zip(found, stock.losses, stock.terms, strict=True):
        for name, wanted in {"loss": loss, **terms}.items():
            if name == "rewards/accuracies" and step["step"] == 1 and "rewards/margins" in terms:
                # Both rewards are rounding until the model differs from its reference.
                assert abs(terms["rewards/margins"]) < 1e-12 or step[name] == close(wanted)
                continue
            assert step[name] == close(wanted), (
                f"{directory.name}, step {step['step']}: {name} {step[name]}, not {wanted}"
            )
    saved = read_checkpoint(directory)
    for name, wanted in stock.parameters.items():
        key = name.removeprefix("base_model.model.")
        # The parts of fused experts have a dimension of their own.
        own = saved[f"model.{key}"].reshape(wanted.shape)
        torch.testing.assert_close(own, wanted, rtol=0, atol=1e-12, msg=lambda text, k=key: f"{k}: {text}")


def reward_terms(chosen: Tensor, rejected: Tensor) -> dict[str, float]:
    """Return the metrics of rewards (pairs,)."""
    return {
        "rewards/chosen": chosen.mean().item(),
        "rewards/rejected": rejected.mean().item(),
        "rewards/margins": (chosen - rejected).mean().item(),
        "rewards/accuracies": (chosen > rejected).double().mean().item(),
    }


def close(value: float) -> Any:
    """Return what a value within 1e-12 equals; a value is null in a file if it is not finite."""
    return pytest.approx(value, rel=1e-12, abs=1e-12) if np.isfinite(value) else None
