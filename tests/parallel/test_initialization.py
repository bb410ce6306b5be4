"""The initial weights are the same on every mesh."""

import functools
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import AutoModelForCausalLM

from meshtrain.models import tiles
from meshtrain.models.build import build_meta_model, load_hf_config
from meshtrain.models.fused import FusedParameter, join_parts
from meshtrain.models.initialize import initialize_weights, materialize, restore_buffers
from meshtrain.models.layout import local_indices, local_ranges, local_tensor
from tests.parallel.test_parity import MESHES
from tests.parity import MODELS, Case, build
from tests.ranks import run_on_ranks
from tests.tiny import tiny_config

NAMES = ("gpt2-tied", "llama-untied", "llama-tied", "qwen3")
PAD = 0
# Every mesh of the parity tests, and two stages per process.
PLANS = (*((mesh, 1) for mesh in MESHES), ((2, 1, 1, 1), 2), ((2, 1, 1, 2), 2))


@dataclass(frozen=True)
class Piece:
    """The part of a tensor on one process."""

    shape: torch.Size
    ranges: list[slice]
    values: Tensor


@dataclass
class Weights:
    """The tensors of one process after initialization, under the names of a checkpoint."""

    fused: tuple[FusedParameter, ...]
    owned: dict[str, Piece] = field(default_factory=dict)
    far_copies: dict[str, Piece] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


def use_small_tiles() -> None:
    """Split the tensors of tiny models into many tiles, with other borders than the shards."""
    tiles.TILE_ROWS, tiles.TILE_COLUMNS = 10, 14


def initial_weights(case: Case, seed: int) -> Weights:
    use_small_tiles()
    pipeline = build(case, seed=seed)
    pipeline.initialize(seed)
    canonical = pipeline.canonical_names()
    weights = Weights(pipeline.fused)
    for name, parameter in pipeline.named_parameters():
        kept = weights.owned if canonical[name] == name else weights.far_copies
        kept[canonical[name]] = Piece(
            parameter.shape, local_ranges(parameter), local_tensor(parameter.detach()).clone()
        )
    for stage in pipeline.stages:
        weights.buffers |= {name: buffer.clone() for name, buffer in stage.model.named_buffers()}
    return weights


def initial_weights_of(cases: list[Case], seed: int = 0) -> list[Weights]:
    return [initial_weights(case, seed) for case in cases]


@functools.cache
def all_weights(world_size: int) -> dict[Case, list[Weights]]:
    """Initialize every model on every mesh of this size."""
    cases = [
        Case(name, mesh, "Interleaved1F1B" if stages > 1 else "1F1B", stages)
        for name in NAMES
        for mesh, stages in PLANS
        if Case(name, mesh).world_size == world_size
    ]
    answers = run_on_ranks(world_size, initial_weights_of, cases)
    return {case: [answer[number] for answer in answers] for number, case in enumerate(cases)}


def join_pieces(pieces: Iterable[tuple[str, Piece]]) -> dict[str, Tensor]:
    """Return the full tensors; pieces on several processes must be equal."""
    tensors: dict[str, Tensor] = {}
    for name, piece in pieces:
        whole = tensors.setdefault(name, torch.full(piece.shape, torch.nan, dtype=piece.values.dtype))
        place = whole[tuple(piece.ranges)]
        assert bool((place.isnan() | (place == piece.values)).all()), f"{name} differs between processes"
        place.copy_(piece.values)
    assert not any(bool(tensor.isnan().any()) for tensor in tensors.values()), "a part lies nowhere"
    return tensors


def owned(ranks: list[Weights]) -> dict[str, Tensor]:
    return join_pieces(item for weights in ranks for item in weights.owned.items())


def fingerprint(ranks: list[Weights]) -> str:
    """Return the SHA-256 of all tensors under the stock names, in the order of the names."""
    tensors = join_parts(owned(ranks), ranks[0].fused)
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name}{tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].contiguous().numpy().tobytes())
    return digest.hexdigest()


@functools.cache
def fingerprint_of_one_process(name: str) -> str:
    return fingerprint(all_weights(1)[Case(name, (1, 1, 1, 1))])


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_every_mesh_has_the_same_initial_weights(world_size: int) -> None:
    for case, ranks in all_weights(world_size).items():
        assert fingerprint(ranks) == fingerprint_of_one_process(case.model), case


@pytest.mark.parametrize("name", NAMES)
def test_one_process_holds_the_parameters_of_the_stock_model(name: str) -> None:
    ranks = all_weights(1)[Case(name, (1, 1, 1, 1))]
    stock = AutoModelForCausalLM.from_config(load_hf_config(MODELS[name]), dtype=torch.float64)
    ours = join_parts(owned(ranks), ranks[0].fused)
    assert {n: p.shape for n, p in ours.items()} == {n: p.shape for n, p in stock.named_parameters()}


def test_tied_copies_are_equal_and_padding_rows_are_zero() -> None:
    for world_size in (1, 2, 4, 8):
        for case, ranks in all_weights(world_size).items():
            tensors = owned(ranks)
            copies = join_pieces(item for weights in ranks for item in weights.far_copies.items())
            assert len(copies) == (case.mesh[0] > 1 and case.model != "llama-untied"), case
            assert all(torch.equal(copied, tensors[name]) for name, copied in copies.items()), case
            if case.model == "gpt2-tied":
                assert bool(tensors["transformer.wte.weight"].ne(0).any(-1).all()), "GPT-2 pads no token"
            else:
                assert bool((tensors["model.embed_tokens.weight"][PAD] == 0).all()), case
                assert bool(tensors["model.embed_tokens.weight"][PAD + 1 :].ne(0).any(-1).all())
            if case.model == "llama-untied":
                assert bool(tensors["lm_head.weight"][PAD].ne(0).any()), "a head of its own has no padding row"


def test_rotary_buffers_of_every_stage_equal_the_stock_model() -> None:
    for name in ("llama-untied", "qwen3"):
        stock = AutoModelForCausalLM.from_config(load_hf_config(MODELS[name]), dtype=torch.float64)
        expected = dict(stock.named_buffers())
        assert any("inv_freq" in buffer for buffer in expected)
        for world_size in (1, 2, 4, 8):
            for case, ranks in all_weights(world_size).items():
                for weights in ranks if case.model == name else ():
                    assert weights.buffers.keys() == expected.keys(), case
                    for buffer, value in weights.buffers.items():
                        assert value.dtype == expected[buffer].dtype
                        assert torch.equal(value, expected[buffer]), (case, buffer)


def test_another_seed_gives_different_weights() -> None:
    case = Case("llama-untied", (1, 1, 1, 1))
    (other,) = run_on_ranks(1, initial_weights_of, [case], 1)
    assert fingerprint(other) != fingerprint_of_one_process("llama-untied")
    assert not torch.equal(owned(other)["lm_head.weight"], owned(all_weights(1)[case])["lm_head.weight"])


def fill_sharded_tensors() -> list[bool]:
    """Fill tensors of 1 to 4 dimensions under several placements, and compare with the full one."""
    use_small_tiles()
    mesh = init_device_mesh("cpu", (2, 2))
    same = []
    for shape in ((23,), (37, 31), (5, 23, 31), (13, 7, 3, 2)):
        whole = torch.empty(shape)
        fill(whole)
        placements = [
            (first, second)
            for first in (Replicate(), *(Shard(dim) for dim in range(len(shape))))
            for second in (Replicate(), *(Shard(dim) for dim in range(len(shape))))
        ]
        for pair in placements:
            sharded = distribute_tensor(torch.full(shape, torch.nan), mesh, pair, src_data_rank=None)
            fill(sharded)
            expected = whole
            for dim, index in enumerate(local_indices(sharded)):
                expected = expected.index_select(dim, index)
            same.append(torch.equal(local_tensor(sharded), expected))
    dist.barrier()
    return same


def fill(tensor: Tensor) -> None:
    tiles.fill_tiles(tensor, lambda tile, stream: nn.init.normal_(tile, generator=stream), key="a")


def test_any_shard_of_any_dimension_is_part_of_the_full_tensor() -> None:
    for same in run_on_ranks(4, fill_sharded_tensors):
        assert len(same) == 4 + 9 + 16 + 25
        assert all(same)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_activation_has_the_values_of_its_constructor(dtype: torch.dtype) -> None:
    # Its default dtype is bfloat16, in which the bound of xIELU is 0.2 % smaller.
    wanted = AutoModelForCausalLM.from_config(tiny_config("apertus"), dtype=dtype).model.layers
    model = build_meta_model(tiny_config("apertus"), dtype=dtype)
    materialize(model, torch.device("cpu"), tied={})
    initialize_weights(model, seed=0, names={name: name for name, _ in model.named_parameters()})
    restored = build_meta_model(tiny_config("apertus"), dtype=dtype)
    materialize(restored, torch.device("cpu"), tied={})
    restore_buffers(restored)
    for layer, other, stock in zip(model.model.layers, restored.model.layers, wanted, strict=True):
        for name, value in stock.mlp.act_fn.named_parameters():
            torch.testing.assert_close(layer.mlp.act_fn.get_parameter(name), value, rtol=1e-6, atol=0)
        for name, value in stock.mlp.act_fn.named_buffers():
            assert torch.equal(layer.mlp.act_fn.get_buffer(name), value), name
            assert torch.equal(other.mlp.act_fn.get_buffer(name), value), name
