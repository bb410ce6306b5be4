"""Classes that compute their own loss from unshifted labels train as the stock ones do."""

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PretrainedConfig, PreTrainedModel

import meshtrain
from meshtrain.api.handle import pipeline_of
from meshtrain.api.own_loss import shifts_before_cross_entropy
from meshtrain.compat.transformers import has_loss_of_program
from meshtrain.errors import ModelError
from meshtrain.parallel.pipeline import full_tensor
from tests.api.programs import Batch, own_part
from tests.casts import lift_float32_casts
from tests.ranks import run_on_ranks
from tests.tiny import tiny_config

MODEL_TYPES = ("cpmant", "mvp", "prophetnet", "trocr", "xlm", "xlnet")
NUM_LAYERS = 2
LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def tiny(model_type: str) -> PretrainedConfig:
    config = tiny_config(model_type, NUM_LAYERS)
    if model_type == "prophetnet":
        # The layers of its decoder are found if its encoder has as many.
        config.num_encoder_layers = NUM_LAYERS
    return config


def build(model_type: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny(model_type)).double().train()
    # What parallelize finds out about the class must not depend on the seed of the rank.
    # Only casts of modules that are imported are lifted.
    lift_float32_casts()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    torch.manual_seed(100 + int(os.environ.get("RANK", "0")))
    return model


def uneven_batch() -> Batch:
    """Return a batch whose halves have different numbers of labels, also in the first column."""
    ids = torch.randint(3, 64, (4, 8), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    labels[:2, 0] = labels[0, 3:] = labels[2, 1] = -100
    return {"input_ids": ids, "labels": labels}


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-4)).item()


def errors_of(mesh: dict[str, int], model_type: str) -> dict[str, float]:
    """Return the errors of the loss and of every gradient: name -> error."""
    stock, batch = build(model_type), uneven_batch()
    wanted = stock(**batch).loss
    wanted.backward()
    model = meshtrain.parallelize(build(model_type), {"mesh": mesh}, prove_unknown_class=False)
    if isinstance(model, PreTrainedModel):
        found = model(**own_part(model, batch)).loss
        found.backward()
    else:
        found = model.forward_backward(batch)
    errors = {"loss": relative_error(found.detach(), wanted.detach())}
    gradients = {name: parameter.grad for name, parameter in stock.named_parameters()}
    for name, parameter in pipeline_of(model).owned_parameters().items():
        if parameter.grad is None:
            assert gradients[name] is None, name
            continue
        expected = gradients[name]
        # FSDP2 fills a gradient that no rank has.
        expected = torch.zeros(parameter.shape, dtype=torch.float64) if expected is None else expected
        errors[name] = relative_error(full_tensor(parameter.grad), expected)
    return errors


@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"dp_replicate": 2}], ids=str)
def test_losses_over_unshifted_labels_are_the_mean_over_all_data_ranks(mesh: dict[str, int]) -> None:
    for model_type in MODEL_TYPES:
        for errors in run_on_ranks(2, errors_of, mesh, model_type):
            wrong = {name: error for name, error in errors.items() if not error <= 1e-12}
            assert not wrong, (model_type, wrong)
            assert len(errors) > 20


def test_pipeline_takes_labels_as_the_class_does() -> None:
    for model_type in MODEL_TYPES:
        if model_type == "prophetnet":
            continue
        for errors in run_on_ranks(2, errors_of, {"pp": 2}, model_type):
            wrong = {name: error for name, error in errors.items() if not error <= 1e-12}
            assert not wrong, (model_type, wrong)
            assert len(errors) > 5


class Unshifted(LlamaForCausalLM):
    """Its loss takes labels that are shifted already."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **inputs: Any) -> Any:
        output = super().forward(input_ids, **inputs)
        if labels is not None:
            output.loss = F.cross_entropy(output.logits.flatten(0, 1).float(), labels.flatten())
        return output


class WithoutLabels(LlamaForCausalLM):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, use_cache: bool = False) -> Any:
        return super().forward(input_ids, attention_mask=attention_mask, use_cache=use_cache)


class OneForEachToken(LlamaForCausalLM):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **inputs: Any) -> Any:
        output = super().forward(input_ids, **inputs)
        if labels is not None:
            output.loss = F.cross_entropy(output.logits.flatten(0, 1).float(), labels.flatten(), reduction="none")
        return output


def llama(kind: type[LlamaForCausalLM], **changes: Any) -> LlamaForCausalLM:
    return kind(LlamaConfig(**{"vocab_size": 64, **LLAMA, **changes}))


@pytest.mark.parametrize(("kind", "shifts"), [(LlamaForCausalLM, True), (Unshifted, False), (WithoutLabels, True)])
@pytest.mark.parametrize("spread", [0.0, 0.02])
def test_any_seed_tells_which_labels_a_class_takes(kind: type[LlamaForCausalLM], shifts: bool, spread: float) -> None:
    model = llama(kind, initializer_range=spread)
    for seed in range(5):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        assert shifts_before_cross_entropy(model) is shifts
        assert torch.equal(torch.get_rng_state(), before)


def test_vocabulary_may_be_smaller_than_the_tokens_of_the_trial() -> None:
    assert shifts_before_cross_entropy(llama(LlamaForCausalLM, vocab_size=5, pad_token_id=None))


class WithManyTokens(LlamaConfig):
    """A configuration whose vocabulary has a name that nothing knows."""

    tokens_known = 1_000_000


class Large(LlamaForCausalLM):
    config_class = WithManyTokens

    def __init__(self, config: WithManyTokens) -> None:
        super().__init__(config)
        self.table = torch.nn.Embedding(config.tokens_known, config.hidden_size)


class LargeAndUnshifted(Unshifted, Large):
    pass


def test_class_that_cannot_be_shrunk_must_have_the_loss_of_transformers() -> None:
    with torch.device("meta"):
        model, other = (kind(WithManyTokens(vocab_size=64, **LLAMA)) for kind in (Large, LargeAndUnshifted))
    assert shifts_before_cross_entropy(model)
    assert not has_loss_of_program(model)
    with pytest.raises(ModelError, match=r"a copy has 16\d,\d+ parameters|cannot be shrunk"):
        shifts_before_cross_entropy(other)


@pytest.mark.parametrize("kind", ["another reduction", "another type"])
def test_other_losses_are_refused_over_a_pipeline(kind: str) -> None:
    model = llama(OneForEachToken if kind == "another reduction" else LlamaForCausalLM)
    if kind == "another type":
        model.loss_type = "ForMaskedLM"
    expected = (
        "is not the mean cross-entropy" if kind == "another reduction" else r"model\.loss_type = 'ForMaskedLM' was"
    )
    with pytest.raises(ModelError, match=expected):
        shifts_before_cross_entropy(model)


def refuse_over_a_pipeline() -> str:
    with pytest.raises(ModelError) as caught:
        meshtrain.parallelize(build("prophetnet"), {"mesh": {"pp": 2}}, prove_unknown_class=False)
    return str(caught.value)


def test_loss_of_several_next_tokens_is_refused_over_a_pipeline() -> None:
    assert run_on_ranks(2, refuse_over_a_pipeline) == 2 * [
        "the loss of a ProphetNetForCausalLM is not the mean cross-entropy of its logits, which the last stage of a "
        "pipeline computes; use a mesh with pp = 1, which uses the model's own loss"
    ]
