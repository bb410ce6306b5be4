"""A program with its own loop stops, and resumes on another mesh."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
)

import meshtrain
from meshtrain.checkpoint.huggingface.export import export_checkpoint
from meshtrain.errors import CheckpointError, ModelError
from tests.casts import lift_float32_casts
from tests.ranks import run_on_ranks

SIZES = {"vocab_size": 101, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
CONFIG = GPT2Config(**SIZES, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2)
PLAN = {"precision": {"parameters": "float64", "compute": "float64", "reduce": "float64"}}


def build(seed: int | None) -> GPT2LMHeadModel:
    """Return the stock model, on meta if there is no seed."""
    if seed is None:
        return meshtrain.build_model(CONFIG, dtype=torch.float64)
    torch.manual_seed(seed)
    return GPT2LMHeadModel(CONFIG).double()


def batch(step: int) -> Tensor:
    return torch.randint(101, (4, 8), generator=torch.Generator().manual_seed(step))


def train(model: Any, state: meshtrain.TrainState, scheduler: StepLR, last_step: int) -> list[float]:
    losses = []
    while state.step < last_step:
        ids = batch(state.step)
        if hasattr(model, "forward_backward"):
            loss = model.forward_backward({"input_ids": ids, "labels": ids})
        else:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        scheduler.step()
        state.step += 1
        losses.append(loss.item())
    return losses


def program(mesh: dict[str, int], directory: Path, seed: int | None, last_step: int) -> list[float]:
    """Train from the newest checkpoint, if any, to `last_step` and save."""
    lift_float32_casts()
    model = meshtrain.parallelize(build(seed), {"mesh": mesh, **PLAN})
    optimizer = SGD(model.parameters(), lr=0.5, momentum=0.9)
    meshtrain.rebind(optimizer)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.5)
    state = meshtrain.load_checkpoint(directory, meshtrain.TrainState(model, optimizer), missing_ok=seed is not None)
    if state.values:
        scheduler.load_state_dict(state.values["scheduler"])
    losses = train(model, state, scheduler, last_step)
    state.values = {"scheduler": scheduler.state_dict()}
    if "pp" not in mesh:
        # The gathered parameters are freed after use, also without a backward pass.
        with torch.no_grad():
            model(input_ids=batch(0))
    assert meshtrain.save_checkpoint(directory, state, keep=1) == directory / f"step-{last_step}"
    return losses


def train_in_one_process() -> list[float]:
    lift_float32_casts()
    model = build(0)
    optimizer = SGD(model.parameters(), lr=0.5, momentum=0.9)
    state = meshtrain.TrainState(model, optimizer)
    return train(model, state, StepLR(optimizer, step_size=2, gamma=0.5), 8)


def test_custom_loop_resumes_on_another_mesh(tmp_path: Path) -> None:
    (wanted,) = run_on_ranks(1, train_in_one_process)
    parts = [
        run_on_ranks(2, program, {"tp": 2}, tmp_path, 0, 2),
        run_on_ranks(2, program, {"dp_shard": 2}, tmp_path, None, 4),
        run_on_ranks(2, program, {"pp": 2}, tmp_path, None, 6),
        run_on_ranks(1, program, {"tp": 1}, tmp_path, 1, 7),
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["step-7"]
    for (begin, end), ranks in zip(((0, 2), (2, 4), (4, 6), (6, 7)), parts, strict=True):
        for losses in ranks:
            assert losses == pytest.approx(wanted[begin:end], rel=1e-12)
    export_checkpoint(tmp_path, tmp_path.with_name("exported"))
    exported = GPT2LMHeadModel.from_pretrained(tmp_path.with_name("exported"), dtype=torch.float64)
    with torch.no_grad():
        assert exported(batch(7), labels=batch(7)).loss.item() == pytest.approx(wanted[7], rel=1e-6)


def with_dropout(directory: Path, *stops: int) -> list[float]:
    """Train to each of the steps in a new model."""
    losses = []
    for last_step in stops:
        torch.manual_seed(0)
        stock = GPT2LMHeadModel(GPT2Config(**SIZES)).double()
        model = meshtrain.parallelize(stock, {"mesh": {"tp": 2}, **PLAN}, seed=3)
        optimizer = SGD(model.parameters(), lr=0.5)
        meshtrain.rebind(optimizer)
        state = meshtrain.load_checkpoint(directory, meshtrain.TrainState(model, optimizer), missing_ok=True)
        losses += train(model, state, StepLR(optimizer, step_size=9), last_step)
        meshtrain.save_checkpoint(directory, state)
    return losses


def test_resumed_training_draws_the_same_dropout_masks(tmp_path: Path) -> None:
    whole, other = run_on_ranks(2, with_dropout, tmp_path / "whole", 4)
    stopped, _ = run_on_ranks(2, with_dropout, tmp_path / "stopped", 2, 4)
    assert whole == other == stopped
    assert len(set(whole)) == 4


def refusals(directory: Path) -> None:
    stock = build(0)
    with pytest.raises(
        ModelError, match=r"a GPT2LMHeadModel is not a parallel model; pass what meshtrain\.parallelize"
    ):
        meshtrain.save_checkpoint(directory, meshtrain.TrainState(stock))
    model = meshtrain.parallelize(build(None), {"mesh": {"tp": 1}, **PLAN})
    with pytest.raises(ModelError, match="the parameters of this model have no values yet"):
        meshtrain.save_checkpoint(directory, meshtrain.TrainState(model))
    with pytest.raises(CheckpointError, match=r"has no checkpoint: no step-N directory with a manifest"):
        meshtrain.load_checkpoint(directory, meshtrain.TrainState(model))


def test_stock_models_and_models_without_values_are_not_saved(tmp_path: Path) -> None:
    run_on_ranks(1, refusals, tmp_path)


LLAMA = {
    "vocab_size": 103,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
OTHERS = (
    LlamaConfig(**LLAMA | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}),
    LlamaConfig(**LLAMA, rope_parameters={"rope_type": "default", "rope_theta": 50.0}),
    MistralConfig(**LLAMA, sliding_window=4),
)


def state_of(config: PretrainedConfig) -> meshtrain.TrainState:
    torch.manual_seed(0)
    model = meshtrain.parallelize(AutoModelForCausalLM.from_config(config), {"mesh": {"tp": 2}})
    optimizer = SGD(model.parameters(), lr=0.5)
    meshtrain.rebind(optimizer)
    return meshtrain.TrainState(model, optimizer, step=1)


def load_another(directory: Path) -> list[str]:
    """Load checkpoints of models with equal tensor shapes and different computations."""
    meshtrain.save_checkpoint(directory, state_of(LlamaConfig(**LLAMA)))
    messages = []
    for other in OTHERS:
        state = state_of(other)
        with pytest.raises(CheckpointError) as refused:
            meshtrain.load_checkpoint(directory, state)
        messages.append(str(refused.value).replace(str(directory), ""))
    with pytest.raises(CheckpointError) as refused:
        meshtrain.load_weights(state.model, directory / "step-1")
    messages.append(str(refused.value).replace(str(directory), ""))
    # These settings do not make it another model.
    free = state_of(LlamaConfig(**LLAMA, attention_dropout=0.1, use_cache=False, eos_token_id=7))
    assert meshtrain.load_checkpoint(directory, free).step == 1
    return messages


def test_checkpoint_of_another_model_is_refused_even_if_its_tensors_fit(tmp_path: Path) -> None:
    heads, theta, kind, weights = run_on_ranks(2, load_another, tmp_path)[0]
    advice = "build the model as it was, or load the weights alone with meshtrain.load_weights"
    assert f"/step-1: config.num_attention_heads is 4 in the checkpoint and 8 in this program; {advice}" in heads
    assert re.search(
        r"/step-1: config.rope_parameters is \{.*10000.0.*\} in the checkpoint and \{.*50.0.*\} in this program; "
        "build the",
        theta,
    )
    assert kind == weights
    assert kind == (
        "/step-1: the model is a llama in the checkpoint and a mistral in this program; "
        "meshtrain.build_model('/step-1') builds its model"
    )


def save_an_earlier_step(directory: Path) -> str:
    state = state_of(LlamaConfig(**LLAMA))
    for step in (100, 200):
        state.step = step
        meshtrain.save_checkpoint(directory, state)
    meshtrain.load_checkpoint(directory / "step-100", state)
    state.step = 150
    with pytest.raises(CheckpointError) as refused:
        meshtrain.save_checkpoint(directory, state)
    # A damaged later checkpoint, from which no restart would resume, is no obstacle.
    if dist.get_rank() == 0:
        next((directory / "step-200").glob("*.distcp")).write_bytes(b"")
    dist.barrier()
    meshtrain.save_checkpoint(directory, state)
    return str(refused.value).replace(str(directory), "")


def test_save_beside_a_later_checkpoint_is_refused(tmp_path: Path) -> None:
    assert run_on_ranks(2, save_an_earlier_step, tmp_path)[0] == (
        "step 150 is to be saved, but /step-200 is later, and a restart would continue from there; remove later "
        "checkpoints, or save into another directory"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-100", "step-150", "step-200"]
