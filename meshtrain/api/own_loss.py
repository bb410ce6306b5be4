"""What the loss in the forward pass of a model class averages over."""

from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from meshtrain.compat.transformers import build, forget_loss, loop_over_experts, set_attention_implementation
from meshtrain.config.data import IGNORE_INDEX
from meshtrain.errors import ModelError
from meshtrain.models.build import stock_class, stock_like
from meshtrain.models.probe_inputs import PROBE_LENGTH
from meshtrain.models.rotary import probed
from meshtrain.models.tiles import seeded_by
from meshtrain.models.tiny import shrink
from meshtrain.parallel.cut.probe import MISFITS, meta_inputs, no_router_logits, probe_structure

TINY_LAYERS = 4
MOST_PARAMETERS = 10_000_000
TRIALS = 3
NOISE = 0.1
"""Standard deviation of what is added to the parameters of a copy, whose logits would otherwise be
so close to zero that any mean over them is the same."""
FAR = 1e-4
"""Relative difference that tells two losses apart in float32."""
CLOSE = 1e-2
"""Distance of a loss to the one that it equals, as a fraction of that difference."""


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
    return _loss_of_transformers_shifts(model) if shifts is None else shifts


def _loss_of_transformers_shifts(model: PreTrainedModel) -> bool:
    return LOSS_MAPPING.get(model.loss_type, ForCausalLMLoss) is ForCausalLMLoss


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

    The last stage of a pipeline computes this loss, not the class. The answer is the same on every
    rank, because tiny copies are seeded. If none runs, it is that of the loss of transformers, if
    the class takes no labels or calls that loss.

    Args:
        model: on meta, not cut yet.

    Raises:
        ModelError: if the class computes another loss, such as that of several next tokens, or one
            that is not known, or if the program has chosen one.
    """
    for trial in range(TRIALS):
        try:
            copy = _tiny_copy(model, trial)
            found, logits, labels = _loss_of(copy)
        except (ModelError, *MISFITS) as error:
            if "labels" in signature(model.forward).parameters and not _calls_loss_on_meta(model):
                raise ModelError(
                    f"the labels that the loss of a {stock_class(model).__name__} takes are unknown: a tiny copy of "
                    f"it does not run ({error})",
                    "use a mesh with pp = 1, which uses the model's own loss",
                ) from error
            return _loss_of_transformers_shifts(model)
        if copy.loss_type != model.loss_type:
            raise ModelError(
                f"model.loss_type = {model.loss_type!r} was set by the program, but the last stage of a pipeline "
                "computes the mean cross-entropy",
                "use a mesh with pp = 1, which uses the model's own loss",
            )
        shifted, unshifted = F.cross_entropy(logits[:-1], labels[1:]), F.cross_entropy(logits, labels)
        difference = (shifted - unshifted).abs()
        if difference < FAR * unshifted:
            # By chance. Other values will tell.
            continue
        for shifts, wanted in ((True, shifted), (False, unshifted)):
            if found.dim() == 0 and (found - wanted).abs() < CLOSE * difference:
                return shifts
        break
    else:
        return loss_shifts_labels(model)
    raise ModelError(
        f"the loss of a {stock_class(model).__name__} is not the mean cross-entropy of its logits, which the last "
        "stage of a pipeline computes",
        "use a mesh with pp = 1, which uses the model's own loss",
    )


def _calls_loss_on_meta(model: Any) -> bool:
    """Return whether a model calls the loss of transformers, which no program has replaced."""
    model.loss_function = called = _Called()
    try:
        options = probe_structure(model).options
        labels = torch.zeros(1, PROBE_LENGTH, dtype=torch.long, device="meta")
        with torch.no_grad(), options.default_device():
            model(**meta_inputs(1, PROBE_LENGTH, options), labels=labels, use_cache=False, **no_router_logits(model))
    except (ModelError, *MISFITS):
        return False
    finally:
        forget_loss(model)
    return called.times > 0


def _loss_of(copy: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of a copy without that of its routers, its logits, and the labels.

    Logits are (tokens, vocabulary), labels (tokens,).

    Raises:
        ModelError: if there is not one row of logits for each token.
    """
    ids = _some_tokens(copy)
    labels = ids.flip(1)
    # Some classes draw random numbers in their forward pass.
    with torch.no_grad(), probed(copy, ids.shape[1]), seeded_by("forward"):
        output = copy(input_ids=ids, labels=labels, use_cache=False, **no_router_logits(copy))
    if output.logits.shape[:-1] != labels.shape:
        raise ModelError(f"the logits of a {type(copy).__name__} are {tuple(output.logits.shape)}")
    return output.loss.double(), output.logits.double().flatten(0, 1), labels.flatten()


def _some_tokens(copy: Any) -> Tensor:
    tokens = torch.tensor([[3, 4, 5, 6]], device=copy.device)
    return tokens % copy.config.get_text_config().vocab_size


def _tiny_copy(model: PreTrainedModel, trial: int = 0) -> PreTrainedModel:
    """Return a tiny copy with random values, which are the same on every rank.

    Raises:
        ModelError: if the class cannot be shrunk.
    """
    layers = min(TINY_LAYERS, model.config.get_text_config().num_hidden_layers)
    config = shrink(model.config, layers)
    loop_over_experts(config)
    set_attention_implementation(config, "eager")
    kind = stock_class(model)
    with torch.device("meta"):
        num_parameters = build(kind, config, torch.float32).num_parameters()
    if num_parameters > MOST_PARAMETERS:
        # The configuration has other names for its sizes.
        raise ModelError(f"a {kind.__name__} cannot be shrunk: a copy has {num_parameters:,} parameters")
    with seeded_by(f"copy {trial}"), torch.no_grad():
        copy = build(kind, config, torch.float32).eval()
        for parameter in copy.parameters():
            parameter += NOISE * torch.randn_like(parameter)
    return copy
