"""Stages of stock models, run in sequence in one process, compute the bits of the uncut model."""

import copy
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationMixin, LlamaConfig, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from meshtrain.config.run import ModelConfig
from meshtrain.errors import ModelError
from meshtrain.models.build import build_meta_model, load_hf_config
from meshtrain.parallel.cut.balance import even_layers
from meshtrain.parallel.cut.cutter import check_cut, cut
from meshtrain.parallel.cut.probe import find_layers, probe_structure
from meshtrain.parallel.cut.stage import Stage
from meshtrain.parallel.cut.stubs import Channel, PartStub
from tests.parity import DYNAMIC, GPT2, LLAMA, LONGROPE
from tests.tiny import tiny_config

SEQUENCE, BATCH = 8, 2
SMALL = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 98}
QUIET = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
WIDE = {"intermediate_size": 48, "max_position_embeddings": 64}
OPT = {**SMALL, "ffn_dim": 48, "max_position_embeddings": 64, "dropout": 0.0, "attention_dropout": 0.0}
GEMMA = {**LLAMA, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}
# Sequences of more than 6 tokens have other frequencies.
SHORT = LONGROPE | {"original_max_position_embeddings": 6}
PHIMOE = {"rope_parameters": SHORT | {"short_mscale": 1.2, "long_mscale": 1.4}}
CALM = {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0}
# Tied and untied heads, added and rotary positions, layers that return tuples, windows, and
# frequencies that depend on the sequence length.
MODELS = {
    "gpt2": ModelConfig(type="gpt2", config=GPT2),
    "llama": ModelConfig(type="llama", config={**LLAMA, "tie_word_embeddings": False}),
    "llama-tied": ModelConfig(type="llama", config={**LLAMA, "tie_word_embeddings": True}),
    "qwen3": ModelConfig(type="qwen3", config={**LLAMA, "head_dim": 8, "tie_word_embeddings": True}),
    "mistral": ModelConfig(type="mistral", config={**LLAMA, "sliding_window": 4}),
    "gpt_neox": ModelConfig(type="gpt_neox", config={**SMALL, **WIDE, **QUIET}),
    "opt": ModelConfig(type="opt", config={**OPT, "word_embed_proj_dim": 32}),
    "opt-projected": ModelConfig(type="opt", config={**OPT, "word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    "bloom": ModelConfig(type="bloom", config={**SMALL, **QUIET}, attention="eager"),
    "phi": ModelConfig(type="phi", config={**SMALL, **WIDE, "attention_dropout": 0.0, "resid_pdrop": 0.0}),
    "gemma2": ModelConfig(type="gemma2", config=GEMMA, attention="eager"),
    "gemma3_text": ModelConfig(type="gemma3_text", config=GEMMA),
    "phi3": ModelConfig(type="phi3", config={**LLAMA, "rope_parameters": SHORT, "original_max_position_embeddings": 6}),
    "phimoe": ModelConfig(type="phimoe", config={**LLAMA, **PHIMOE, **CALM}, attention="eager"),
    "dynamic": ModelConfig(type="llama", config={**LLAMA, "rope_parameters": DYNAMIC, "max_position_embeddings": 6}),
}
CUTS = ([1, 2, 1], [3, 1], [4, 0], [1, 1, 1, 1])
INPUTS = ("plain", "padded", "positions")


def config_of(name: str) -> PretrainedConfig:
    config = load_hf_config(MODELS[name])
    # The default grouped matrix product of experts does not support float64.
    config._experts_implementation = "eager"
    return config


def stock_model(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config_of(name), dtype=torch.float64, attn_implementation=MODELS[name].attention
    ).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def meta_model(name: str, **config: Any) -> PreTrainedModel:
    values = {**MODELS[name].config, **config}
    hf_config = load_hf_config(MODELS[name].model_copy(update={"config": values}))
    return build_meta_model(hf_config, dtype=torch.float32, attention=MODELS[name].attention)


def further_inputs(kind: str) -> dict[str, Tensor]:
    """Return the further inputs of every stage, beside the ids or the hidden state."""
    if kind == "padded":
        return {"attention_mask": (torch.arange(SEQUENCE) < torch.tensor([[5], [SEQUENCE]])).long()}
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    return {"position_ids": positions % 4} if kind == "positions" else {}


def run_stages(stages: Sequence[Stage], ids: Tensor, **inputs: Tensor) -> Tensor:
    sent: Any = ()
    for stage in stages:
        sent = stage.model(*sent, input_ids=ids, **inputs)
    assert isinstance(sent, Tensor)
    return sent


def gradients_of(stages: Sequence[Stage]) -> dict[str, Tensor]:
    """Return FQN -> gradient; the gradients of both copies of a tied weight are added."""
    found: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.model.named_parameters():
            fqn = stage.tied.get(name, name)
            if parameter.grad is None:
                continue
            found[fqn] = found[fqn] + parameter.grad if fqn in found else parameter.grad
    return found


@pytest.mark.parametrize("name", MODELS)
def test_stages_compute_the_bits_of_the_uncut_model(name: str) -> None:
    model = stock_model(name)
    ids = torch.randint(3, 98, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1))
    # Bloom has no positions: its heads look back by distance.
    for kind in INPUTS[:2] if name == "bloom" else INPUTS:
        inputs = further_inputs(kind)
        model.zero_grad()
        logits = model(input_ids=ids, use_cache=False, **inputs).logits
        weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        (logits * weights).sum().backward()
        expected = {fqn: parameter.grad for fqn, parameter in model.named_parameters()}
        for layers in CUTS:
            copied = copy.deepcopy(model)
            copied.zero_grad()
            check_cut(copy.deepcopy(copied).to("meta"), layers)
            stages = cut(copied, layers, range(len(layers)))
            found = run_stages(stages, ids, **inputs)
            assert torch.equal(found, logits), (kind, layers)
            (found * weights).sum().backward()
            gradients = gradients_of(stages)
            assert gradients.keys() == expected.keys()
            for fqn, gradient in gradients.items():
                assert torch.equal(gradient, expected[fqn]), (kind, layers, fqn)


# Ties inside a stage, positions inside an embedding module, projections and norms before the
# layers, a head registered before the embedding, positions from another class, and a preamble that
# changes its input in place.
@pytest.mark.parametrize("model_type", ["bert", "electra", "camembert", "bart", "pegasus", "ctrl", "mamba"])
def test_stages_of_unusual_classes_compute_the_bits_of_the_uncut_model(model_type: str) -> None:
    torch.manual_seed(0)
    config = tiny_config(model_type)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager").train()
    ids = torch.randint(3, 60, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1))
    logits = model(input_ids=ids, use_cache=False).logits
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (logits * weights).sum().backward()
    expected = {
        model.all_tied_weights_keys.get(fqn, fqn): parameter.grad
        for fqn, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    check_bits_of_stages(model, [1, 2, 1, 0], ids, logits, weights, expected)


def check_bits_of_stages(
    model: PreTrainedModel,
    layers: Sequence[int],
    ids: Tensor,
    logits: Tensor,
    weights: Tensor,
    expected: dict[str, Tensor],
) -> list[Stage]:
    check_cut(copy.deepcopy(model).to("meta"), layers)
    model.zero_grad()
    stages = cut(model, layers, range(len(layers)))
    found = run_stages(stages, ids)
    assert torch.equal(found, logits)
    (found * weights).sum().backward()
    gradients = gradients_of(stages)
    assert gradients.keys() == expected.keys()
    # Gradients of several stages are added in another order.
    assert all(torch.allclose(gradient, expected[fqn], rtol=1e-13, atol=1e-16) for fqn, gradient in gradients.items())
    return stages


@pytest.mark.parametrize("name", ["gpt2", "llama-tied", "llama"])
def test_every_parameter_is_on_exactly_one_stage(name: str) -> None:
    for num_layers in range(1, 10):
        model = meta_model(name, **{"n_layer" if name == "gpt2" else "num_hidden_layers": num_layers})
        expected = {fqn: parameter.shape for fqn, parameter in model.named_parameters()}
        tied = dict(model.all_tied_weights_keys)
        for num_stages in range(1, min(4, num_layers + 1) + 1):
            # With one stage more than layers, the last stage holds the head alone.
            layers = even_layers(num_layers, num_stages) if num_stages <= num_layers else [1] * num_layers + [0]
            stages = cut(copy.deepcopy(model), layers, range(num_stages))
            names = Counter(fqn for stage in stages for fqn, _ in stage.model.named_parameters())
            far = set(tied) if num_stages > 1 else set()
            assert names == Counter([*expected, *far]), (num_layers, num_stages)
            check_stages(stages, layers, expected, tied)


def check_stages(
    stages: Sequence[Stage], layers: Sequence[int], shapes: dict[str, torch.Size], tied: dict[str, str]
) -> None:
    starts = [sum(layers[:index]) for index in range(len(layers))]
    for stage in stages:
        assert (stage.first_layer, stage.last_layer) == (
            starts[stage.index],
            starts[stage.index] + layers[stage.index],
        )
        assert len(stage.own_layers()) == layers[stage.index]
        assert stage.is_first == (stage.index == 0)
        assert stage.is_last == (stage.index == len(layers) - 1)
        assert stage.tied == (tied if stage.is_last else {})
        for fqn, parameter in stage.model.named_parameters():
            assert parameter.shape == shapes[tied.get(fqn, fqn)]
            assert parameter.is_meta


def test_process_builds_its_own_stages_only() -> None:
    stages = cut(meta_model("llama"), [1, 1, 1, 1], [1, 3])
    assert [stage.index for stage in stages] == [1, 3]
    assert {fqn.split(".")[2] for stage in stages for fqn, _ in stage.model.named_parameters() if "layers" in fqn} == {
        "1",
        "3",
    }


def test_tied_head_of_a_padded_embedding_has_its_padding_index() -> None:
    _, last = cut(meta_model("llama-tied"), [2, 2], [0, 1])
    assert last.model.lm_head.padding_idx == 0
    _, last = cut(meta_model("llama"), [2, 2], [0, 1])
    assert not hasattr(last.model.lm_head, "padding_idx")


# Classes in which the layers pass on more than a hidden state


class Toy(PreTrainedModel, GenerationMixin):
    """A language model of the simplest parts.

    Each of the classes below does one thing that a chain of layers does not do.
    """

    config_class = LlamaConfig
    base_model_prefix = "model"
    _tied_weights_keys = {"lm_head.weight": "embed.weight"}  # noqa: RUF012 - as transformers declares it

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.embed = nn.Embedding(config.vocab_size, width)
        self.layers = nn.ModuleList(ToyLayer(width) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        self.add_parts(width)
        self.post_init()

    def add_parts(self, width: int) -> None:
        """Do nothing."""

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> CausalLMOutput:
        embedded = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        return CausalLMOutput(logits=self.lm_head(self.finish(self.run_layers(embedded), embedded)))

    def run_layers(self, x: Tensor) -> Tensor:
        """Chain the layers."""
        for layer in self.layers:
            x = layer(x)
        return x

    def finish(self, x: Tensor, embedded: Tensor) -> Tensor:
        """Prepare for the head."""
        return self.norm(x)


class ToyLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        return x + self.up(x)


class SecondStream(Toy):
    """Gives every layer the embedding as well."""

    def run_layers(self, x: Tensor) -> Tensor:
        first = x
        for layer in self.layers:
            x = layer(x, first)
        return x


class TwoResults(Toy):
    """Takes two tensors from each layer, and gives both to the next."""

    def add_parts(self, width: int) -> None:
        for layer in self.layers:
            layer.forward = partial(two_results, layer)

    def run_layers(self, x: Tensor) -> Tensor:
        extra = None
        for layer in self.layers:
            x, extra = layer(x, extra)
        return x + extra


def two_results(layer: nn.Module, x: Tensor, extra: Tensor | None) -> tuple[Tensor, Tensor]:
    projected = layer.get_submodule("up")(x if extra is None else x + extra.tanh())
    return x + projected, projected.sin()


class SharedTable(Toy):
    """Lets the first layers write tensors into a mapping that later layers read."""

    def add_parts(self, width: int) -> None:
        for index, layer in enumerate(self.layers):
            layer.forward = partial(write_or_read, layer, index)

    def run_layers(self, x: Tensor) -> Tensor:
        table: dict[str, tuple[Tensor, Tensor]] = {}
        for layer in self.layers:
            x = layer(x, table=table)
        return x


def write_or_read(layer: nn.Module, index: int, x: Tensor, table: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
    projected = layer.get_submodule("up")(x)
    if index == 0:
        table["first"] = projected.sin(), projected.cos()
    return x + projected * table["first"][index % 2]


class Integers(Toy):
    """Takes indices from each layer, which have no gradient."""

    def add_parts(self, width: int) -> None:
        for layer in self.layers:
            layer.forward = partial(choose_positions, layer)

    def run_layers(self, x: Tensor) -> Tensor:
        chosen = None
        for layer in self.layers:
            x, chosen = layer(x, chosen)
        return x


def choose_positions(layer: nn.Module, x: Tensor, chosen: Tensor | None) -> tuple[Tensor, Tensor]:
    projected = layer.get_submodule("up")(x)
    if chosen is not None:
        projected = projected + x.gather(1, chosen.expand_as(x))
    return x + projected, projected.sum(-1, keepdim=True).argsort(1)


class LooksBack(Toy):
    """Reads an attribute that an earlier layer has left."""

    def add_parts(self, width: int) -> None:
        for layer in self.layers:
            layer.forward = partial(leave_result, self, layer)

    def run_layers(self, x: Tensor) -> Tensor:
        self.left: list[Tensor] = []
        return super().run_layers(x)


def leave_result(model: LooksBack, layer: nn.Module, x: Tensor) -> Tensor:
    projected = layer.get_submodule("up")(x)
    model.left.append(projected)
    return x + projected * model.left[0]


class UsesForeignWeight(Toy):
    """Projects in a layer with the weight of the embedding."""

    def add_parts(self, width: int) -> None:
        for layer in self.layers:
            layer.forward = partial(use_weight, self.embed, layer)


def use_weight(embed: nn.Embedding, layer: nn.Module, x: Tensor) -> Tensor:
    return x + layer.get_submodule("up")(x) * embed.weight.mean(0)


class ChangesItsInput(Toy):
    """Adds to the hidden state in place, inside of the layers."""

    def add_parts(self, width: int) -> None:
        for layer in self.layers:
            layer.forward = partial(add_in_place, layer)


def add_in_place(layer: nn.Module, x: Tensor) -> Tensor:
    return x.add_(layer.get_submodule("up")(x))


class TwoRounds(Toy):
    """Runs all layers twice."""

    def run_layers(self, x: Tensor) -> Tensor:
        return super().run_layers(super().run_layers(x))


class HeadWithoutModule(Toy):
    """Multiplies by the weight of the embedding instead of calling a head."""

    def finish(self, x: Tensor, embedded: Tensor) -> Tensor:
        return self.norm(x) * self.embed.weight.mean(0)


class BetweenLayers(Toy):
    """Mixes the embedding in between the layers, from outside of them."""

    def run_layers(self, x: Tensor) -> Tensor:
        first = x
        for layer in self.layers:
            x = layer(x) + 0.1 * first
        return x


class PastTheLayers(Toy):
    """Adds the embedding after the layers."""

    def finish(self, x: Tensor, embedded: Tensor) -> Tensor:
        return self.norm(x + embedded)


class SkippedLayer(Toy):
    """Leaves one layer out."""

    def run_layers(self, x: Tensor) -> Tensor:
        for layer in list(self.layers)[1:]:
            x = layer(x)
        return x


class OtherShape(Toy):
    """Works with the sequence first."""

    def run_layers(self, x: Tensor) -> Tensor:
        return super().run_layers(x.transpose(0, 1)).transpose(0, 1)


class LonelyParameter(Toy):
    """Has a parameter of no module that is called."""

    def add_parts(self, width: int) -> None:
        self.scale = nn.Parameter(torch.ones(width))

    def finish(self, x: Tensor, embedded: Tensor) -> Tensor:
        return self.norm(x) * self.scale


class OtherTie(Toy):
    """Ties two layers."""

    _tied_weights_keys = {"layers.1.up.weight": "layers.0.up.weight"}  # noqa: RUF012


class LooksAtItsEmbedding(Toy):
    """Reads a weight that other stages do not hold."""

    def run_layers(self, x: Tensor) -> Tensor:
        return super().run_layers(x.to(self.embed.weight.dtype))


class FrozenStream(Toy):
    """Gives every layer a frozen table, like sinusoidal positions, which autograd does not show."""

    def add_parts(self, width: int) -> None:
        self.table = nn.Embedding(64, width)
        self.table.weight.requires_grad_(requires_grad=False)

    def run_layers(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            table = self.table(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            x = layer(x, table)
        return x


class OlderStream(Toy):
    """Gives every layer the output of the layer before the last."""

    def run_layers(self, x: Tensor) -> Tensor:
        before = None
        for layer in self.layers:
            x, before = layer(x, before), x.detach()
        return x


class SeesTokens(Toy):
    """Gives every layer the tokens, which later stages do not have."""

    def forward(
        self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> CausalLMOutput:
        self.tokens = input_ids
        return super().forward(input_ids, inputs_embeds, **kwargs)

    def run_layers(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.tokens)
        return x


class AllLayers(Toy):
    """Gives the head the sum of all layers."""

    def run_layers(self, x: Tensor) -> Tensor:
        total = 0.0
        for layer in self.layers:
            x = layer(x)
            total = total + x
        return total


class NormTwice(Toy):
    """Uses one norm before and after the layers."""

    def run_layers(self, x: Tensor) -> Tensor:
        return super().run_layers(self.norm(x))


class Pair(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.project(x), x


class PairBefore(Toy):
    """Has a module before the layers that returns two tensors."""

    def add_parts(self, width: int) -> None:
        self.pair = Pair(width)

    def run_layers(self, x: Tensor) -> Tensor:
        first, _ = self.pair(x)
        return super().run_layers(first)


class ScaledHead(Toy):
    """Scales the output of the layers before any module sees it.

    A stage of the last layers alone cannot detect it.
    """

    def finish(self, x: Tensor, embedded: Tensor) -> Tensor:
        return self.norm(2 * x)


CUTTABLE = (
    *(Toy, SecondStream, TwoResults, SharedTable, Integers, BetweenLayers, PastTheLayers, SkippedLayer, OtherShape),
    *(LonelyParameter, OtherTie, LooksAtItsEmbedding, FrozenStream, OlderStream, SeesTokens, AllLayers, PairBefore),
    ScaledHead,
)
REASONS: dict[type[Toy], str] = {
    NormTwice: "it calls norm on 2 stages, with one set of parameters",
    LooksBack: "layers.1 uses a result of layers.0 in aten::mul.Tensor, but not as an argument",
    UsesForeignWeight: "layers.0 uses embed.weight in aten::mean.dim, which belongs to another module",
    ChangesItsInput: "layers.0 changes its input in place",
    TwoRounds: "it calls layers.0 after layers.3, which is on a later stage",
    HeadWithoutModule: "it uses embed.weight outside of its module, in aten::mean.dim, on more than one stage",
}


def toy(kind: type[Toy]) -> Toy:
    with torch.device("meta"):
        return kind(LlamaConfig(**LLAMA, tie_word_embeddings=True))


@pytest.mark.parametrize("layers", [[1, 2, 1], [2, 2, 0], [1, 1, 1, 1]], ids=str)
@pytest.mark.parametrize("kind", CUTTABLE, ids=lambda kind: kind.__name__)
def test_stages_pass_on_all_that_layers_use(kind: type[Toy], layers: list[int]) -> None:
    torch.manual_seed(0)
    model = kind(LlamaConfig(**LLAMA, tie_word_embeddings=True)).double()
    ids = torch.randint(3, 60, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1))
    logits = model(input_ids=ids).logits
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (logits * weights).sum().backward()
    tied = model.all_tied_weights_keys
    expected = {tied.get(fqn, fqn): p.grad for fqn, p in model.named_parameters() if p.grad is not None}
    check_bits_of_stages(model, layers, ids, logits, weights, expected)


@pytest.mark.parametrize(
    ("kind", "shapes"),
    [
        (Toy, [(BATCH, SEQUENCE, 32)]),
        (SecondStream, [(BATCH, SEQUENCE, 32)] * 2),
        (SharedTable, [(BATCH, SEQUENCE, 32)] * 3),
        (Integers, [(BATCH, SEQUENCE, 32), (BATCH, SEQUENCE, 1)]),
        (OtherShape, [(SEQUENCE, BATCH, 32)]),
        (SeesTokens, [(BATCH, SEQUENCE, 32)]),
    ],
    ids=lambda it: it.__name__ if isinstance(it, type) else None,
)
def test_only_what_later_stages_use_is_sent(kind: type[Toy], shapes: list[tuple[int, ...]]) -> None:
    stages = cut(toy(kind), [2, 1, 1], range(3))
    sent = [[tuple(tensor.shape) for tensor in stage.sent_like(BATCH, SEQUENCE)] for stage in stages[:2]]
    received = [[tuple(tensor.shape) for tensor in stage.received_like(BATCH, SEQUENCE)] for stage in stages[1:]]
    assert sent == received
    assert sorted(sent[0]) == sorted(shapes)
    needs_gradient = [tensor.requires_grad for tensor in stages[1].received_like(BATCH, SEQUENCE)]
    assert sorted(needs_gradient) == ([False, True] if kind is Integers else [True] * len(shapes))


@pytest.mark.parametrize("kind", REASONS, ids=lambda kind: kind.__name__)
def test_class_that_cannot_be_cut_is_refused_by_name(kind: type[Toy]) -> None:
    with pytest.raises(ModelError) as caught:
        check_cut(toy(kind), [2, 2])
    assert str(caught.value) == f"{kind.__name__} cannot be cut into stages: {REASONS[kind]}; use pp = 1"


def test_simplest_class_can_be_cut() -> None:
    check_cut(toy(Toy), [2, 2])
    assert probe_structure(toy(Toy)).after == ["norm", "lm_head"]


def test_check_cut_leaves_the_model_unchanged() -> None:
    model = meta_model("gpt2")
    before = {name: (type(module), module.training, dict(vars(module))) for name, module in model.named_modules()}
    check_cut(model, [2, 2])
    after = {name: (type(module), module.training, dict(vars(module))) for name, module in model.named_modules()}
    assert after.keys() == before.keys()
    for name, (kind, training, values) in before.items():
        assert after[name][:2] == (kind, training)
        assert after[name][2].keys() == values.keys(), name


def test_model_without_a_list_of_layers_is_refused() -> None:
    model = meta_model("llama")
    model.config.num_hidden_layers = 7
    assert find_layers(model)[0] == "model.layers"
    model.model.layers = nn.Sequential(*model.model.layers)
    with pytest.raises(ModelError) as caught:
        find_layers(model)
    assert str(caught.value) == (
        "LlamaForCausalLM has no list of modules with parameters, so it cannot be cut or sharded by layer"
    )


def test_stub_has_the_attributes_and_modules_of_its_layer() -> None:
    model = build_meta_model(tiny_config("llama"), dtype=torch.float32)
    layer = find_layers(model)[1][0]
    stub = PartStub(layer, "model.layers.0", Channel())
    assert stub.self_attn is layer.self_attn
    assert stub.hidden_size == layer.hidden_size
    assert not list(stub.parameters())
    with pytest.raises(AttributeError, match="'LlamaDecoderLayer' object has no attribute 'mamba'"):
        print(stub.mamba)


def test_parameters_of_a_stub_are_zeros_of_their_shape() -> None:
    embedding = build_meta_model(tiny_config("llama"), dtype=torch.bfloat16).get_input_embeddings()
    stub = PartStub(embedding, "model.embed_tokens", Channel(device=torch.device("cpu")))
    assert (stub.weight.shape, stub.weight.dtype) == (embedding.weight.shape, torch.bfloat16)
    assert not stub.weight.any()
    assert stub.weight.untyped_storage().nbytes() == 2


def test_results_of_stubs_are_zeros_after_a_model_has_written_into_one() -> None:
    trace = probe_structure(build_meta_model(tiny_config("llama"), dtype=torch.float32)).trace
    channel = Channel(trace=trace, device=torch.device("cpu"))
    number = next(index for index, call in enumerate(trace.calls) if isinstance(call.result, Tensor))
    first, second = (channel.blank_result(number, ()) for _ in range(2))
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    with torch.inference_mode():
        first.fill_(1.0)
    third = channel.blank_result(number, ())
    assert not third.any()
    assert not third.is_inference()


class DrawsOnTheCpu(Toy):
    """Draws a number for every layer, as a class with layer drop does."""

    def run_layers(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if torch.rand([], device="cpu") < 2 else x
        return x


def test_tracing_leaves_the_random_stream_alone() -> None:
    model = toy(DrawsOnTheCpu)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    check_cut(model, [2, 2])
    assert torch.equal(torch.get_rng_state(), before)


class KeepsItsState(Toy):
    """Keeps the last results in attributes, one of which it makes, as RecurrentGemma does."""

    def add_parts(self, width: int) -> None:
        self.layers[0].state = None
        for layer in self.layers:
            layer.register_forward_hook(keep_result)

    def run_layers(self, x: Tensor) -> Tensor:
        return keep_result(self.layers[0], (), super().run_layers(x))


def keep_result(layer: nn.Module, args: Any, result: Tensor) -> Tensor:
    layer.state, layer.history = result, [result]
    return result


def test_tracing_leaves_no_state_behind() -> None:
    model = toy(KeepsItsState)
    probe_structure(model)
    assert model.layers[0].state is None
    assert not hasattr(model.layers[0], "history")
    check_cut(model, [2, 2])
