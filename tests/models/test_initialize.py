"""Random initialization in one process has transformers' distributions; some models are refused."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel, PreTrainedModel
from transformers import initialization as init
from transformers.initialization import TORCH_INIT_FUNCTIONS

from meshtrain.config.run import ModelConfig
from meshtrain.errors import ModelError
from meshtrain.models.build import build_meta_model, load_hf_config
from meshtrain.models.initialize import initialize_weights, materialize
from meshtrain.models.initialize import restore_buffers as restore
from meshtrain.models.layout import local_tensor
from meshtrain.models.tiles import TILE_COLUMNS, TILE_ROWS, fill_tiles
from meshtrain.parallel.cut.cutter import cut
from meshtrain.parallel.cut.originals import originals_in_place
from meshtrain.parallel.pipeline import full_tensor
from tests.parity import GPT2, LLAMA
from tests.ranks import run_on_ranks

CPU = torch.device("cpu")
WIDE = {
    "gpt2": ModelConfig(type="gpt2", config={**GPT2, "n_embd": 192, "vocab_size": 400}),
    "llama": ModelConfig(type="llama", config={**LLAMA, "hidden_size": 192, "intermediate_size": 320}),
    "qwen3": ModelConfig(type="qwen3", config={**LLAMA, "hidden_size": 192, "tie_word_embeddings": True}),
}
TINY = LlamaConfig(**{**LLAMA, "num_hidden_layers": 1})


def initialized(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Materialize and initialize a meta model, as a run does."""
    materialize(model, CPU, tied=dict(model.all_tied_weights_keys))
    initialize_weights(model, seed=seed, names={name: name for name, _ in model.named_parameters()})
    return model


def on_meta(model_class: type[PreTrainedModel]) -> PreTrainedModel:
    with torch.device("meta"):
        return model_class(TINY)


def refusal(model_class: type[PreTrainedModel]) -> str:
    with pytest.raises(ModelError) as caught:
        initialized(on_meta(model_class))
    return str(caught.value)


def fill(shape: tuple[int, ...], key: str, draw: Callable[..., Any] = nn.init.normal_) -> Tensor:
    tensor = torch.full(shape, torch.nan)
    fill_tiles(tensor, lambda tile, stream: draw(tile, generator=stream), key=key)
    return tensor


@pytest.mark.parametrize("name", WIDE)
def test_every_parameter_has_the_distribution_of_the_stock_model(name: str) -> None:
    config = load_hf_config(WIDE[name])
    torch.manual_seed(3)
    stock = dict(AutoModelForCausalLM.from_config(config, dtype=torch.float32).named_parameters())
    ours = dict(initialized(build_meta_model(config, dtype=torch.float32)).named_parameters())
    assert ours.keys() == stock.keys()
    for parameter_name, parameter in ours.items():
        expected = stock[parameter_name].detach()
        if expected.dim() == 1:
            assert torch.equal(parameter, expected), f"{parameter_name}: norms are one, biases zero"
        else:
            # Two samples of n values: their standard deviations agree to some 1 / sqrt(n).
            ratio = (parameter.std() / expected.std()).item()
            assert abs(ratio - 1) < 5 / parameter.numel() ** 0.5 + 0.01, f"{parameter_name}: {ratio}"
            assert abs(parameter.mean().item()) < 5 * expected.std().item() / parameter.numel() ** 0.5


def test_residual_projections_of_gpt2_are_scaled_by_depth() -> None:
    model = initialized(build_meta_model(load_hf_config(WIDE["gpt2"]), dtype=torch.float32))
    residual = 0.02 / (2 * 4) ** 0.5
    for name, parameter in model.named_parameters():
        if name.endswith("c_proj.weight"):
            assert parameter.std().item() == pytest.approx(residual, rel=0.02)
        elif name.endswith(("c_attn.weight", "c_fc.weight")):
            assert parameter.std().item() == pytest.approx(0.02, rel=0.02)


def test_values_depend_on_the_seed() -> None:
    config = load_hf_config(ModelConfig(type="llama", config=LLAMA))
    once, again, other = (
        dict(initialized(build_meta_model(config, dtype=torch.float32), seed).named_parameters()) for seed in (0, 0, 1)
    )
    assert all(torch.equal(once[name], again[name]) for name in once)
    assert not any(torch.equal(once[name], other[name]) for name in once if once[name].dim() == 2)


def test_no_two_parameters_are_equal() -> None:
    model = initialized(build_meta_model(load_hf_config(ModelConfig(type="llama", config=LLAMA)), dtype=torch.float32))
    matrices = [tuple(parameter[0, :8].tolist()) for parameter in model.parameters() if parameter.dim() == 2]
    # The row of the padding token is zero.
    assert len(set(matrices)) == len(matrices)


def test_buffers_equal_those_of_the_stock_model() -> None:
    rope = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
    for values in (LLAMA, {**LLAMA, "rope_parameters": rope}):
        config = load_hf_config(ModelConfig(type="llama", config=values))
        stock = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        ours = initialized(build_meta_model(config, dtype=torch.float32))
        restored = build_meta_model(config, dtype=torch.float32)
        materialize(restored, CPU, tied=dict(restored.all_tied_weights_keys))
        with torch.no_grad():
            for parameter in restored.parameters():
                parameter.fill_(7.0)
        restore(restored)
        for name, buffer in stock.named_buffers():
            assert torch.equal(ours.get_buffer(name), buffer)
            assert torch.equal(restored.get_buffer(name), buffer)
        assert all(bool((parameter == 7.0).all()) for parameter in restored.parameters()), "parameters are left alone"


class Xavier(LlamaForCausalLM):
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, nn.Linear):
            init.xavier_uniform_(module.weight)


class Orthogonal(LlamaForCausalLM):
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, nn.Linear):
            init.orthogonal_(module.weight)


class Forgotten(LlamaForCausalLM):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.scale = nn.Parameter(torch.ones(3))
        self.shift = nn.Parameter(torch.randn(3) * 0.1)


class PartByPart(LlamaForCausalLM):
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, nn.Linear):
            init.normal_(module.weight[:2])


class DrawsByItself(LlamaForCausalLM):
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, nn.Linear):
            module.weight.uniform_()


class Computes(LlamaForCausalLM):
    """Its rule joins a parameter with a tensor of its own, as that of RWKV."""

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, nn.Linear):
            init.copy_(module.weight, torch.ones_like(module.weight * 0.3 + torch.ones(module.weight.shape)))


class OtherHead(LlamaForCausalLM):
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self.lm_head:
            init.normal_(module.weight, std=0.5)


class FilledFromAround(LlamaForCausalLM):
    """The rules of modules around them fill head and embedding, as in ModernBERT's decoder."""

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LlamaModel):
            init.uniform_(module.embed_tokens.weight)
        elif module is self:
            init.normal_(self.lm_head.weight, std=0.5)


class UnknownBuffer(LlamaForCausalLM):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.register_buffer("table", torch.arange(3.0) * 2, persistent=False)


class EmptyBuffer(LlamaForCausalLM):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.register_buffer("table", torch.full((3,), torch.nan), persistent=False)


class ZeroesPadding(LlamaForCausalLM):
    """Its rule zeroes the row of the padding, also if the parameter has values already."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.lm_head.padding_idx = 3

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if getattr(module, "padding_idx", None) == 3:
            init.zeros_(module.weight[3])


def shipped(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a class like those in transformers: the rules run for modules with values as well."""
    return type(kind.__name__, (kind,), {"is_custom_code": classmethod(lambda cls: False)})


DRAWING = (Xavier, Orthogonal, Forgotten, PartByPart, DrawsByItself)
TOUCHING = tuple(map(shipped, (ZeroesPadding, DrawsByItself, Computes)))


def drawn_in_shards() -> list[list[str]]:
    """Return the parameters of each class whose shards are not those of the plain model."""
    different = []
    for kind in DRAWING:
        plain = dict(initialized(on_meta(kind)).named_parameters())
        model = on_meta(kind)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        sharded = dict(initialized(model).named_parameters())
        different.append([name for name in plain if not torch.equal(full_tensor(sharded[name]), plain[name])])
    return different


def test_every_draw_gives_the_same_values_in_shards() -> None:
    assert run_on_ranks(2, drawn_in_shards) == [[[]] * len(DRAWING)] * 2


def restored(*, in_shards: bool) -> list[bool]:
    """Return whether each class has the stock buffers, and its parameters as they were."""
    same = []
    for kind in TOUCHING:
        model = on_meta(kind)
        if in_shards:
            fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        materialize(model, CPU, tied={})
        with torch.no_grad():
            for parameter in model.parameters():
                local_tensor(parameter).fill_(7.0)
        restore(model)
        stock = dict(kind(TINY).named_buffers())
        same.append(all(torch.equal(buffer, stock[name]) for name, buffer in model.named_buffers()))
        same.append(all(bool((local_tensor(parameter) == 7.0).all()) for parameter in model.parameters()))
    return same


def test_rules_that_use_parameters_restore_buffers_alone() -> None:
    assert restored(in_shards=False) == [True] * 2 * len(TOUCHING)
    assert run_on_ranks(2, partial(restored, in_shards=True)) == [[True] * 2 * len(TOUCHING)] * 2


def test_draws_have_the_distribution_of_their_rules() -> None:
    xavier, orthogonal, forgotten, parts, own = (initialized(on_meta(kind)) for kind in DRAWING)
    head = xavier.lm_head.weight
    bound = (6 / sum(head.shape)) ** 0.5
    assert bound * 0.9 < head.abs().max().item() <= bound
    columns = orthogonal.lm_head.weight
    assert torch.allclose(columns.T @ columns, torch.eye(columns.shape[1]), atol=1e-5)
    assert forgotten.scale.tolist() == [1.0, 1.0, 1.0]
    assert forgotten.shift.std().item() > 0
    assert parts.lm_head.weight[:2].std().item() == pytest.approx(1.0, rel=0.3)
    assert parts.lm_head.weight[2:].std().item() == pytest.approx(0.02, rel=0.3)
    assert (own.lm_head.weight.min().item(), own.lm_head.weight.max().item()) == pytest.approx((0.0, 1.0), abs=0.01)
    assert TORCH_INIT_FUNCTIONS["normal_"] is nn.init.normal_, "the functions of transformers are put back"


def test_seed_changes_every_draw() -> None:
    for kind in DRAWING:
        one, other = (dict(initialized(on_meta(kind), seed).named_parameters()) for seed in (0, 1))
        same = {name for name, value in one.items() if torch.equal(value, other[name])}
        assert all("norm" in name or name == "scale" for name in same), (kind, same)


@pytest.mark.parametrize("kind", [OtherHead, FilledFromAround])
@pytest.mark.parametrize("layers", [[4], [2, 2], [4, 0]], ids=str)
def test_tied_head_has_the_values_of_its_embedding_on_every_mesh(
    kind: type[PreTrainedModel], layers: list[int]
) -> None:
    config = LlamaConfig(**{**LLAMA, "tie_word_embeddings": True})
    with torch.device("meta"):
        stages = cut(kind(config), layers, range(len(layers)))
    for stage in stages:
        materialize(stage.model, CPU, tied=stage.names_of_one_parameter())
        before = dict(stage.model.named_parameters(remove_duplicate=False))
        with originals_in_place(stage.model, stage.copies_of_far_originals()):
            names = {name: stage.tied.get(name, name) for name, _ in stage.model.named_parameters()}
            initialize_weights(stage.model, seed=0, names=names)
        after = dict(stage.model.named_parameters(remove_duplicate=False))
        assert {name: id(value) for name, value in after.items()} == {name: id(it) for name, it in before.items()}
    head, embedding = stages[-1].model.lm_head.weight, stages[0].model.model.embed_tokens.weight
    assert torch.equal(head, embedding)
    torch.manual_seed(0)
    stock = kind(config).lm_head.weight
    assert head.std().item() == pytest.approx(stock.std().item(), rel=0.1)
    assert head.mean().item() == pytest.approx(stock.mean().item(), abs=0.05)


def test_buffer_without_a_rule_has_the_value_of_the_constructor() -> None:
    model = initialized(on_meta(UnknownBuffer))
    assert model.table.tolist() == [0.0, 2.0, 4.0]
    model = on_meta(UnknownBuffer)
    materialize(model, CPU, tied={})
    restore(model)
    assert model.table.tolist() == [0.0, 2.0, 4.0]


def test_buffer_without_a_value_is_refused() -> None:
    assert refusal(EmptyBuffer) == "EmptyBuffer has no rule for its buffer table, so it cannot be built on meta"


@pytest.mark.parametrize("shape", [(), (5,), (3000,), (130, 7), (3, 70, 1030), (70, 40, 30, 1)])
def test_tiles_fill_every_element(shape: tuple[int, ...]) -> None:
    tensor = fill(shape, "a")
    assert bool(tensor.isfinite().all())
    assert torch.equal(tensor, fill(shape, "a"))
    assert not torch.equal(tensor, fill(shape, "b"))
    assert tensor.unique().numel() == pytest.approx(tensor.numel(), rel=0.02), "no two tiles are alike"


def test_tile_depends_on_its_position_and_not_on_the_tensor_size() -> None:
    small, large = fill((TILE_ROWS, TILE_COLUMNS), "a"), fill((3 * TILE_ROWS, 2 * TILE_COLUMNS), "a")
    assert torch.equal(large[:TILE_ROWS, :TILE_COLUMNS], small)


def test_small_matrices_of_a_convolution_share_tiles() -> None:
    draws = []
    fill((2 * TILE_ROWS, TILE_COLUMNS, 1, 1), "a", lambda tile, generator: draws.append(tile.fill_(1.0)))
    assert len(draws) == 2


@pytest.mark.parametrize("kind", ["normal_", "uniform_", "trunc_normal_"])
def test_tiles_keep_the_distribution(kind: str) -> None:
    draw = TORCH_INIT_FUNCTIONS[kind]
    stock = draw(torch.empty(500, 2000), generator=torch.Generator().manual_seed(1))
    ours = fill((500, 2000), "a", draw)
    assert ours.mean().item() == pytest.approx(stock.mean().item(), abs=0.005)
    assert ours.std().item() == pytest.approx(stock.std().item(), rel=0.005)
    assert ours.min().item() == pytest.approx(stock.min().item(), rel=0.2, abs=0.01)
