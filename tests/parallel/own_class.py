"""A class of a user, which no family and no plan of transformers knows, and broken twins of it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class OwnConfig(PretrainedConfig):
    model_type = "own"

    def __init__(self, **kwargs: Any) -> None:
        sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48}
        for name, value in {**sizes, "vocab_size": 64, "twin": "", **kwargs}.items():
            setattr(self, name, kwargs.pop(name, value))
        super().__init__(**{"tie_word_embeddings": False, **kwargs})


class Core(nn.Module):
    """Attention after its projections, with a scale of its own for each head."""

    def __init__(self, config: OwnConfig) -> None:
        super().__init__()
        self.count, self.twin = config.num_attention_heads, config.twin
        self.size = config.hidden_size // self.count
        self.binds = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.scale = nn.Parameter(torch.linspace(0.5, 2.0, self.count))
        self.blend = nn.Parameter(torch.eye(self.count) + 0.1) if self.twin == "mix across heads" else None
        if "temperature" in self.twin:
            self.temperature = nn.Parameter(torch.ones(1))
            self.gain = nn.Parameter(torch.ones(config.hidden_size)) if self.twin != "temperature alone" else None
        self.bias = nn.Parameter(torch.ones(1)) if self.twin == "bias of queries" else None

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if "temperature" in self.twin:
            queries = queries * self.temperature
        queries = queries if self.bias is None else queries + self.bias
        batch, length, _ = queries.shape
        queries = queries.view(batch, length, self.count, self.size).transpose(1, 2)
        values = values.view(batch, length, self.count, self.size).transpose(1, 2)
        scores = queries @ keys[:, None].transpose(2, 3) * self.scale[:, None, None]
        mask = torch.ones(length, length, dtype=torch.bool, device=queries.device).tril()
        mixed = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ values
        if self.blend is not None:
            mixed = torch.einsum("bhtd,hg->bgtd", mixed, self.blend)
        result: Tensor = self.binds(mixed.transpose(1, 2).flatten(2))
        if "temperature" in self.twin and self.gain is not None:
            # One parameter is used on the heads, and the other one on the result.
            result = result * self.gain
        return result * self.temperature if self.twin == "temperature twice" else result

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return self.attend(queries, keys, values)


class SoftmaxMixer(Core):
    """Attention with keys that all heads share."""

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.asks = nn.Linear(config.hidden_size, config.hidden_size)
        self.offers = nn.Linear(config.hidden_size, self.size, bias=False)
        self.gives = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = nn.LayerNorm(self.size) if config.twin == "norm twice" else nn.Identity()
        has_extra = config.twin == "key in the result"
        self.extra = nn.Linear(config.hidden_size, config.hidden_size) if has_extra else None
        if "core" in config.twin:
            # What it has as a core moves into a module inside.
            self.core = Core(config)
            for name in [*dict(self.named_parameters(recurse=False)), "binds"]:
                delattr(self, name)

    def forward(self, hidden: Tensor) -> Tensor:
        attend = self.core if "core" in self.twin else self.attend
        keys = self.norm(self.offers(hidden))
        mixed = attend(self.asks(hidden), keys, self.gives(hidden))
        mixed = self.norm(mixed.unflatten(-1, (-1, self.size))).flatten(2)
        if self.extra is not None:
            mixed = mixed + self.extra(hidden + keys.repeat(1, 1, hidden.shape[-1] // self.size))
        return mixed + 0.1 * hidden.cumsum(1) if self.twin == "input in the result" else mixed


class SumMixer(nn.Module):
    """Linear attention: sums of outer products, without a softmax. One projection holds three."""

    def __init__(self, config: OwnConfig) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.all = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.out = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        keys, values, queries = (
            x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in self.all(hidden).chunk(3, -1)
        )
        states = (F.elu(keys)[..., None] * values[..., None, :]).cumsum(2)
        return self.out((queries[..., None, :] @ states).squeeze(-2).transpose(1, 2).flatten(2))


class OddMLP(nn.Module):
    """A gated MLP that names and orders its parts in its own way."""

    def __init__(self, config: OwnConfig) -> None:
        super().__init__()
        self.both = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.norm = nn.LayerNorm(config.intermediate_size) if config.twin == "norm over the width" else nn.Identity()
        self.back = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        linear, gate = self.both(hidden).chunk(2, -1)
        return self.back(self.norm(linear * torch.sigmoid(gate)))


class OwnLayer(nn.Module):
    def __init__(self, config: OwnConfig, index: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(config.hidden_size), nn.LayerNorm(config.hidden_size)
        self.mixer = SumMixer(config) if index % 2 else SoftmaxMixer(config)
        self.wide = OddMLP(config)
        self.by_name = config.twin == "by name"

    def forward(self, hidden_states: Tensor) -> Tensor:
        normed = self.before(hidden_states)
        hidden_states = hidden_states + (self.mixer(hidden=normed) if self.by_name else self.mixer(normed))
        return hidden_states + self.wide(self.between(hidden_states))


class OwnForCausalLM(PreTrainedModel):
    config_class = OwnConfig
    base_model_prefix = "own"

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.table = nn.Embedding(config.vocab_size, config.hidden_size)
        self.stack = nn.ModuleList(OwnLayer(config, index) for index in range(config.num_hidden_layers))
        self.last = nn.LayerNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> CausalLMOutput:
        hidden = self.table(input_ids)
        for layer in self.stack:
            hidden = layer(hidden)
        logits = self.head(self.last(hidden))
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutput(loss=loss, logits=logits)


def make_own(twin: str = "") -> OwnForCausalLM:
    """Return a model in float64 with the same values in every process."""
    torch.manual_seed(3)
    model = OwnForCausalLM(OwnConfig(twin=twin)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model
