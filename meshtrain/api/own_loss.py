"""What the loss in the forward pass of a model class averages over."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from meshtrain.compat.transformers import build, loop_over_experts, set_attention_implementation
from meshtrain.data.samples.rows import IGNORE_INDEX
from meshtrain.errors import ModelError
from meshtrain.models.build import stock_class, stock_like
from meshtrain.models.rotary import probed
from meshtrain.models.tiny import shrink
from meshtrain.parallel.cut.probe import MISFITS

TINY_LAYERS = 4
CLOSE = 1e-4
"""Relative difference of two equal losses in float32."""


def loss_shifts_labels(model: PreTrainedModel) -> bool:
    """Return whether the loss leaves out the first label of each row: a token predicts the next.

    The decoders of BART and similar models expect labels that are shifted already. A tiny copy of
    the model is run to find out. Some classes cannot be shrunk; such a model is run on meta, where
    it must call the loss of transformers.

    Raises:
        ModelError: if it does not call that loss, or does not run either.
    """
    try:
        shifts = _shifts_alone(_tiny_copy(model))
    except (ModelError, *MISFITS) as error:
        if not _calls_loss_of_transformers(model):
            raise ModelError(
                f"the labels that the loss of a {stock_class(model).__name__} averages over are unknown: a tiny copy "
                f"of it does not run ({error})",
                "compute it from the logits, or use a mesh without dp axes",
            ) from error
        shifts = None
    if shifts is None:
        return LOSS_MAPPING.get(model.loss_type, ForCausalLMLoss) is ForCausalLMLoss
    return shifts


def _calls_loss_of_transformers(model: PreTrainedModel) -> bool:
    try:
        return _shifts_alone(stock_like(model).eval()) is None
    except MISFITS:
        return False


def _shifts_alone(copy: Any) -> bool | None:
    """Return whether the first label of a row has no effect; None if transformers' loss runs."""
    copy.loss_function = called = _Called()
    ids = _some_tokens(copy)
    labels, without_first = torch.zeros_like(ids), torch.zeros_like(ids)
    without_first[0, 0] = IGNORE_INDEX
    with torch.no_grad(), probed(copy, ids.shape[1]):
        full, part = (copy(input_ids=ids, labels=some, use_cache=False).loss for some in (labels, without_first))
    return None if called.times else bool(full == part)


class _Called:
    """Replaces the loss of transformers, and counts its calls."""

    times = 0

    def __call__(self, *_: object, **__: object) -> Tensor:
        self.times += 1
        return torch.zeros(())


def shifts_before_cross_entropy(model: PreTrainedModel) -> bool:
    """Return whether a class shifts the labels before the mean cross-entropy.

    The last stage of a pipeline computes this loss, not the class.

    Raises:
        ModelError: if the class computes another loss, such as that of several next tokens.
    """
    try:
        copy = _tiny_copy(model)
        found, logits, labels = _loss_of(copy)
    except (ModelError, *MISFITS):
        return loss_shifts_labels(model)
    for shifts in (True, False):
        wanted = F.cross_entropy(logits[:-1], labels[1:]) if shifts else F.cross_entropy(logits, labels)
        if torch.isclose(found, wanted, rtol=CLOSE, atol=0):
            return shifts
    raise ModelError(
        f"the loss of a {stock_class(model).__name__} is not the mean cross-entropy of its logits, which the last "
        "stage of a pipeline computes",
        "use a mesh with pp = 1, which uses the model's own loss",
    )


def _loss_of(copy: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of a copy without that of its routers, its logits, and the labels.

    Logits are (tokens, vocabulary), labels (tokens,).
    """
    ids = _some_tokens(copy)
    labels = ids.flip(1)
    if getattr(copy.config, "output_router_logits", False):
        copy.config.output_router_logits = False
    with torch.no_grad(), probed(copy, ids.shape[1]):
        output = copy(input_ids=ids, labels=labels, use_cache=False)
    return output.loss.double(), output.logits.double().flatten(0, 1), labels.flatten()


def _some_tokens(copy: Any) -> Tensor:
    return torch.tensor([[3, 4, 5, 6]], device=copy.device)


def _tiny_copy(model: PreTrainedModel) -> PreTrainedModel:
    layers = min(TINY_LAYERS, model.config.get_text_config().num_hidden_layers)
    config = shrink(model.config, layers)
    loop_over_experts(config)
    set_attention_implementation(config, "eager")
    with torch.random.fork_rng(devices=[]):
        return build(stock_class(model), config, torch.float32).eval()
