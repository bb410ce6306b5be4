"""transformers: a causal LM class for a text model that has none."""

from typing import Any, cast

from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


def add_causal_class(text_class: type[PreTrainedModel], config_class: type[PretrainedConfig]) -> type[PreTrainedModel]:
    """Return a causal LM class of a text model and a head without a bias, and register it.

    Its parameters have the names of other causal LM classes: `model.*` and `lm_head.weight`.
    `AutoModelForCausalLM` builds it from then on, in this process.

    Why: ties, rules and flags of a class are private attributes, which the Auto classes read.
    Holds: transformers 5.17 to 5.23.

    Args:
        text_class: the text model, from embedding to final norm, such as `Qwen3VLTextModel`.
        config_class: of the text model.
    """
    # The class above the text model has the rules by which its weights are initialized.
    parent = next(kind for kind in text_class.__mro__[1:] if issubclass(kind, PreTrainedModel))

    def build(self: Any, config: PretrainedConfig) -> None:
        parent.__init__(self, config)
        self.model = text_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    members = {
        "__init__": build,
        "__doc__": f"{text_class.__name__} with a head for the next token.",
        # The helpers of a class, such as its attention, are found in the module of its text model.
        "__module__": text_class.__module__,
        "forward": _forward,
        "config_class": config_class,
        "base_model_prefix": "model",
        "_tied_weights_keys": {"lm_head.weight": "model.embed_tokens.weight"},
        "_tp_plan": {"lm_head": "colwise_gather_output"},
    }
    name = f"{text_class.__name__.removesuffix('Model')}ForCausalLM"
    kind = cast(type[PreTrainedModel], type(name, (parent, GenerationMixin), members))
    # Without `exist_ok`, a class for a configuration of transformers is silently left out.
    AutoModelForCausalLM.register(config_class, kind, exist_ok=True)
    return kind


def _forward(
    self: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    inputs_embeds: Tensor | None = None,
    labels: Tensor | None = None,
    use_cache: bool | None = None,
    logits_to_keep: int | Tensor = 0,
    **kwargs: Any,
) -> CausalLMOutputWithPast:
    """Return logits and, with labels, the loss, as any causal LM class of transformers does."""
    kwargs.pop("return_dict", None)
    outputs = self.model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        inputs_embeds=inputs_embeds,
        use_cache=use_cache,
        **kwargs,
    )
    kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
    logits = self.lm_head(outputs.last_hidden_state[:, kept, :])
    loss = None
    if labels is not None:
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size, **kwargs)
    return CausalLMOutputWithPast(
        loss=loss,
        logits=logits,
        past_key_values=outputs.past_key_values,
        hidden_states=outputs.hidden_states,
        attentions=outputs.attentions,
    )
