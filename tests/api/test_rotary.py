"""Models with length-dependent rotary frequencies compute the same on a mesh as in one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM, PreTrainedModel

import meshtrain
from meshtrain.checkpoint.manifest import read_manifest
from meshtrain.errors import ModelError
from tests.api.programs import Batch, full_parameters, make_adam, own_part, parallel
from tests.casts import lift_float32_casts
from tests.parity import DYNAMIC, LONGROPE
from tests.ranks import run_on_ranks

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Sequences of more than 10 tokens have other frequencies.
CONFIGS: dict[str, Callable[[], Any]] = {
    "longrope": lambda: Phi3Config(
        **SIZES, max_position_embeddings=40, original_max_position_embeddings=10, rope_parameters=dict(LONGROPE)
    ),
    "dynamic": lambda: LlamaConfig(**SIZES, max_position_embeddings=10, rope_parameters=dict(DYNAMIC)),
}
CLASSES: dict[str, type[PreTrainedModel]] = {"longrope": Phi3ForCausalLM, "dynamic": LlamaForCausalLM}
ROWS, LONGEST, BETWEEN, SHORT = 8, 14, 12, 8
FULL = {"recompute": {"mode": "full"}}
PROMPT = torch.tensor([[5, 9, 31, 7], [0, 0, 17, 3]])
MASK = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])


def stock_model(kind: str, *, seen: int = 0) -> Any:
    """Build a model that has already computed a sequence of `seen` tokens."""
    lift_float32_casts()
    torch.manual_seed(0)
    model = CLASSES[kind](CONFIGS[kind]()).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        if seen:
            model(torch.ones(1, seen, dtype=torch.long))
    return model


def batch_of(width: int) -> Batch:
    """Return a padded batch; all rows of its second half are short."""
    ids = torch.randint(3, 61, (ROWS, width), generator=torch.Generator().manual_seed(width))
    lengths = torch.tensor([[width], [5], [width], [width - 1], [6], [4], [6], [5]])
    mask = (torch.arange(width) < lengths).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def documents() -> Batch:
    """Return rows of two short documents; only the first row contains one of 12 tokens."""
    ids = torch.randint(3, 61, (ROWS, BETWEEN), generator=torch.Generator().manual_seed(3))
    positions = torch.cat([torch.arange(5), torch.arange(BETWEEN - 5)]).expand(ROWS, -1).clone()
    positions[0] = torch.arange(BETWEEN)
    return {"input_ids": ids, "position_ids": positions, "labels": ids}


BATCHES = [batch_of(BETWEEN), batch_of(SHORT), batch_of(LONGEST), batch_of(BETWEEN), documents(), batch_of(SHORT)]


def own_rows(model: Any, batch: Batch) -> Batch:
    """Return the rows of this data rank, padded to its own longest row."""
    rows = own_part(model, batch)
    width = int(rows["attention_mask"].sum(1).max()) if "attention_mask" in rows else BETWEEN
    return {name: value[:, :width] for name, value in rows.items()}


def loss_of(model: Any, batch: Batch) -> Tensor:
    """Return the loss of a batch, and backpropagate if gradients are enabled."""
    if isinstance(model, PreTrainedModel):
        # With a cache, transformers does not derive documents from positions.
        loss: Tensor = model(**batch, use_cache=False).loss
        if torch.is_grad_enabled():
            loss.backward()
        return loss
    run = model.forward_backward if torch.is_grad_enabled() else model.evaluate
    return run(batch | {"use_cache": False})


def use(model: Any, part: Callable[[Batch], Batch], generate: Callable[..., Tensor]) -> list[Any]:
    """Train on batches of all lengths, evaluate and generate; return the losses and the texts."""
    optimizer, found = make_adam(model), []
    for batch in BATCHES:
        optimizer.zero_grad()
        found.append(loss_of(model, part(batch)).item())
        optimizer.step()
        with torch.no_grad():
            found.append(loss_of(model, part(BATCHES[0])).item())
    options: dict[str, Any] = {"attention_mask": MASK, "max_new_tokens": 10, "pad_token_id": 0, "eos_token_id": None}
    texts = [generate(PROMPT, **options, do_sample=False), generate(PROMPT, **options, num_beams=3)]
    with torch.no_grad():
        found.append(loss_of(model, part(batch_of(BETWEEN))).item())
    return found + [text.tolist() for text in texts]


def use_stock(kind: str, seen: int) -> tuple[list[Any], dict[str, Tensor]]:
    model = stock_model(kind, seen=seen)
    found = use(model, lambda batch: batch, model.generate)
    return found, {name: value.detach() for name, value in model.named_parameters()}


Case = tuple[str, int, dict[str, int], dict[str, Any]]
CASES: dict[int, list[Case]] = {
    2: [
        ("longrope", 0, {"pp": 2}, FULL),
        ("longrope", 0, {"tp": 2}, {}),
        ("longrope", 0, {"dp_replicate": 2}, {}),
        ("dynamic", 20, {"pp": 2}, {}),
        ("dynamic", 0, {"pp": 2}, {"pipeline": {"schedule": "Interleaved1F1B", "stages_per_rank": 2}}),
        ("dynamic", 20, {"tp": 2}, FULL),
        ("dynamic", 0, {"dp_shard": 2}, FULL),
    ],
    4: [
        ("longrope", 0, {"pp": 2, "tp": 2}, {}),
        ("longrope", 0, {"pp": 2, "dp_shard": 2}, {}),
        ("dynamic", 0, {"pp": 2, "tp": 2}, FULL),
        ("dynamic", 20, {"pp": 2, "dp_replicate": 2}, {}),
    ],
}


def use_all(cases: list[Case]) -> list[tuple[list[Any], dict[str, Tensor]]]:
    answers = []
    for kind, seen, mesh, tables in cases:
        model = parallel(stock_model(kind, seen=seen), mesh, **tables)
        found = use(
            model,
            lambda batch, model=model: own_rows(model, batch),
            lambda ids, model=model, **options: meshtrain.generate(model, ids, **options),
        )
        answers.append((found, full_parameters(model)))
    return answers


@pytest.fixture(scope="module")
def expected() -> dict[tuple[str, int], Any]:
    wanted = [("longrope", 0), ("dynamic", 0), ("dynamic", 20)]
    return {(kind, seen): run_on_ranks(1, use_stock, kind, seen)[0] for kind, seen in wanted}


@pytest.mark.parametrize("world_size", CASES)
def test_every_mesh_computes_what_one_process_computes(world_size: int, expected: dict[tuple[str, int], Any]) -> None:
    for answers in run_on_ranks(world_size, use_all, CASES[world_size]):
        for case, (found, parameters) in zip(CASES[world_size], answers, strict=True):
            *losses, greedy, beams = expected[case[:2]][0]
            assert found[:-2] == pytest.approx(losses, rel=1e-12, abs=0), case
            assert found[-2:] == [greedy, beams], case
            for name, value in parameters.items():
                wanted = expected[case[:2]][1][name]
                assert (value - wanted).abs().max() <= 1e-12 * wanted.abs().max(), (case, name)


def test_earlier_sequences_change_the_loss(expected: dict[tuple[str, int], Any]) -> None:
    """If they were equal, the other tests of this file would prove nothing."""
    assert abs(expected["dynamic", 0][0][0] / expected["dynamic", 20][0][0] - 1) > 1e-5


def load_weights_again(folder: Path) -> None:
    """Compare with a freshly loaded model, which has not seen any sequence."""
    stock_model("dynamic").save_pretrained(folder)
    dist.barrier()
    wanted = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    losses = [loss_of(wanted, batch_of(width)).item() for width in (BETWEEN, LONGEST, BETWEEN)]
    for mesh in ({"tp": 2}, {"pp": 2}):
        model = parallel(stock_model("dynamic", seen=20), mesh)
        loss_of(model, batch_of(22))
        meshtrain.load_weights(model, folder)
        found = [loss_of(model, batch_of(width)).item() for width in (BETWEEN, LONGEST, BETWEEN)]
        assert found == pytest.approx(losses, rel=1e-12, abs=0)


def test_loaded_weights_start_with_short_frequencies(tmp_path: Path) -> None:
    run_on_ranks(2, load_weights_again, tmp_path)


def resume(mesh: dict[str, int], directory: Path, seen: int, steps: range) -> list[float]:
    """Resume in a model that has seen other sequences; save after the last step."""
    model = parallel(stock_model("dynamic", seen=seen), mesh)
    optimizer = SGD(model.parameters(), lr=0.1)
    meshtrain.rebind(optimizer)
    state = meshtrain.load_checkpoint(directory, meshtrain.TrainState(model, optimizer), missing_ok=True)
    assert state.step == steps[0]
    losses = train(model, optimizer, steps, lambda batch: own_part(model, batch))
    state.step = steps[-1] + 1
    meshtrain.save_checkpoint(directory, state)
    return losses


def train(model: Any, optimizer: SGD, steps: range, part: Callable[[Batch], Batch]) -> list[float]:
    losses = []
    for width in (LONGEST, BETWEEN, BETWEEN, LONGEST + 2, BETWEEN)[steps.start : steps.stop]:
        losses.append(loss_of(model, part(batch_of(width))).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train_in_one_process() -> list[float]:
    model = stock_model("dynamic")
    return train(model, SGD(model.parameters(), lr=0.1), range(5), lambda batch: batch)


def test_checkpoint_stores_the_longest_sequence(tmp_path: Path) -> None:
    (wanted,) = run_on_ranks(1, train_in_one_process)
    parts = [
        run_on_ranks(2, resume, {"tp": 2}, tmp_path, 0, range(1)),
        run_on_ranks(2, resume, {"pp": 2}, tmp_path, 20, range(1, 2)),
        run_on_ranks(2, resume, {"dp_shard": 2}, tmp_path, 0, range(2, 4)),
        run_on_ranks(1, resume, {"tp": 1}, tmp_path, 20, range(4, 5)),
    ]
    assert [loss for ranks in parts for loss in ranks[0]] == pytest.approx(wanted, rel=1e-12, abs=0)


def evaluate_on_one_rank(directory: Path) -> None:
    model, wanted = parallel(stock_model("dynamic"), {"dp_replicate": 2}), stock_model("dynamic", seen=24)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model(torch.ones(1, 24, dtype=torch.long))
    saved = meshtrain.save_checkpoint(directory, meshtrain.TrainState(model))
    assert read_manifest(saved).rotary_length == 24
    found = loss_of(model, own_rows(model, batch_of(BETWEEN))).item()
    assert found == pytest.approx(loss_of(wanted, batch_of(BETWEEN)).item(), rel=1e-12, abs=0)


def test_longest_sequence_of_one_data_rank_reaches_all_ranks(tmp_path: Path) -> None:
    run_on_ranks(2, evaluate_on_one_rank, tmp_path)


def refuse_different_lengths() -> str:
    with pytest.raises(ModelError) as refused:
        parallel(stock_model("dynamic", seen=20 * dist.get_rank()), {"pp": 2})
    return str(refused.value)


def test_different_longest_sequences_on_ranks_are_refused() -> None:
    for message in run_on_ranks(2, refuse_different_lengths):
        assert "the longest sequence of its rotary frequencies is 0 tokens and 20 tokens" in message
