"""The loss of the stock forward pass, turned into the mean over all data ranks."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.utils import ModelOutput

from meshtrain.compat.transformers import build, has_loss_of_program, loop_over_experts, set_attention_implementation
from meshtrain.config.mesh import TOKEN_AXES
from meshtrain.data.samples.rows import IGNORE_INDEX
from meshtrain.errors import ModelError
from meshtrain.models.build import stock_class, stock_like
from meshtrain.models.rotary import probed
from meshtrain.models.tiny import shrink
from meshtrain.parallel.cut.probe import MISFITS
from meshtrain.parallel.tensor.collectives import reduce_from_shards
from meshtrain.runtime.mesh import all_reduce_over, axis_size

TINY_LAYERS = 4


class LossOfAllRanks:
    """Weights the loss of each data rank by the number of labels it is the mean over.

    The loss is then the same on all ranks, and their gradients add up to that of one process with
    the global batch. Without dp axes nothing changes.

    Args:
        model: stock, or already parallel.
        mesh: all ranks.
    """

    def __init__(self, model: PreTrainedModel, mesh: DeviceMesh) -> None:
        self._model, self._mesh = model, mesh
        self._axes = [axis for axis in TOKEN_AXES if axis_size(mesh, axis) > 1]
        self._own_shifts: bool | None = None
        self._is_known = False

    def put_into(self, output: Any, given: Mapping[str, Any]) -> None:
        """Replace the loss in the output of a forward pass. Collective over the dp axes.

        Args:
            output: of the stock forward pass.
            given: arguments of the forward pass, by name.

        Raises:
            ModelError: if the loss cannot be found, or may not be a mean over labels.
        """
        if not self._axes:
            return
        self._check(output, given.get("labels"))
        if isinstance(given.get("labels"), Tensor) and getattr(output, "loss", None) is not None:
            is_share = given.get("num_items_in_batch") is not None
            loss = (
                output.loss
                if is_share
                else self._share(output, count_labels(given, shifts=self._shifts(given["labels"])))
            )
            for axis in self._axes:
                loss = reduce_from_shards(loss, self._mesh.get_group(axis))
            output.loss = loss

    def _share(self, output: Any, counted: Tensor) -> Tensor:
        total = all_reduce_over(counted.clone(), self._mesh, self._axes)
        # The mean over no labels is NaN, which would spread to the other ranks.
        loss = output.loss * (counted / total.clamp(min=1)) if bool(counted) else (output.logits * 0.0).sum()
        return loss.to(output.loss.dtype)

    def _shifts(self, labels: Tensor) -> bool:
        if labels.dim() < 2 or labels.is_floating_point():
            # One label for each row, not for each token.
            return False
        if not self._is_known:
            self._own_shifts, self._is_known = _own_loss_shifts(self._model), True
        if self._own_shifts is not None:
            return self._own_shifts
        return LOSS_MAPPING.get(self._model.loss_type, ForCausalLMLoss) is ForCausalLMLoss

    def _check(self, output: Any, labels: Any) -> None:
        if not isinstance(output, ModelOutput):
            if labels is not None:
                raise ModelError(
                    "return_dict = False: the loss is made the mean over all data ranks in the fields of the output, "
                    "and a tuple has none",
                    "leave it out",
                )
        elif getattr(output, "loss", None) is None:
            return
        elif not isinstance(labels, Tensor):
            raise ModelError(
                f"{type(output).__name__} has a loss, but no labels were passed: it is the mean over something else, "
                "which cannot be counted over the data ranks",
                "compute it from the logits, or use a mesh without dp axes",
            )
        elif has_loss_of_program(self._model):
            raise ModelError(
                "model.loss_function was set by the program: the number of labels that it averages over is unknown, "
                "so there is no mean over all data ranks",
                "compute it from the logits, divided by model.num_data_ranks if it is a mean, or use a mesh without "
                "dp axes",
            )


def count_labels(given: Mapping[str, Any], *, shifts: bool) -> Tensor:
    """Return the number of labels that a stock loss is the mean over, () float64.

    Args:
        given: arguments of the model: `labels`, and what transformers' losses take beside them:
            `shift_labels`, which replace them, and `ignore_index`.
        shifts: whether the loss leaves out the first label of each row, as that of most causal LMs
            does.
    """
    labels, shifted = given["labels"], given.get("shift_labels")
    if labels.is_floating_point():
        return torch.tensor(float(labels.numel()), dtype=torch.float64, device=labels.device)
    if shifts:
        labels = labels[..., 1:] if shifted is None else shifted
    return (labels != given.get("ignore_index", IGNORE_INDEX)).sum().double()


def _own_loss_shifts(model: PreTrainedModel) -> bool | None:
    """Return whether a loss that the forward pass computes itself shifts the labels.

    None means that the model calls the loss of transformers. The decoders of BART and similar
    models expect labels that are shifted already. A tiny copy of the model is run to find out. Some
    classes cannot be shrunk; such a model is run on meta, where it must call the loss of
    transformers.

    Raises:
        ModelError: if it does not call that loss, or does not run either.
    """
    try:
        return _shifts_alone(_tiny_copy(model))
    except (ModelError, *MISFITS) as error:
        try:
            shifts = _shifts_alone(stock_like(model).eval())
        except MISFITS:
            shifts = False
        if shifts is None:
            return None
        raise ModelError(
            f"the labels that the loss of a {stock_class(model).__name__} averages over are unknown: a tiny copy of "
            f"it does not run ({error})",
            "compute it from the logits, or use a mesh without dp axes",
        ) from error


def _shifts_alone(copy: Any) -> bool | None:
    """Return whether the first label of a row has no effect; None if transformers' loss runs."""
    copy.loss_function = called = _Called()
    ids = torch.tensor([[3, 4, 5, 6]], device=copy.device)
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


def _tiny_copy(model: PreTrainedModel) -> PreTrainedModel:
    layers = min(TINY_LAYERS, model.config.get_text_config().num_hidden_layers)
    config = shrink(model.config, layers)
    loop_over_experts(config)
    set_attention_implementation(config, "eager")
    with torch.random.fork_rng(devices=[]):
        return build(stock_class(model), config, torch.float32).eval()
