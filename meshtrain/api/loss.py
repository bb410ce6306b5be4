"""The loss of the stock forward pass, turned into the mean over all data ranks."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from meshtrain.api.own_loss import loss_shifts_labels
from meshtrain.compat.transformers import has_loss_of_program
from meshtrain.config.data import IGNORE_INDEX
from meshtrain.config.mesh import DATA_AXES
from meshtrain.errors import ModelError
from meshtrain.parallel.tensor.collectives import reduce_from_shards
from meshtrain.runtime.mesh import all_reduce_over, axis_size


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
        self._axes = [axis for axis in DATA_AXES if axis_size(mesh, axis) > 1]
        self._own_shifts: bool | None = None

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
                else self._share(output, count_labels(given, shifts=self.shifts(given["labels"])))
            )
            for axis in self._axes:
                loss = reduce_from_shards(loss, self._mesh.get_group(axis))
            output.loss = loss

    def _share(self, output: Any, counted: Tensor) -> Tensor:
        total = all_reduce_over(counted.clone(), self._mesh, self._axes)
        # The mean over no labels is NaN, which would spread to the other ranks. In chunks, without
        # logits, it is 0.
        has_loss = bool(counted) or output.get("logits") is None
        loss = output.loss * (counted / total.clamp(min=1)) if has_loss else (output.logits * 0.0).sum()
        return loss.to(output.loss.dtype)

    def shifts(self, labels: Tensor) -> bool:
        """Return whether the stock loss leaves out the first label of each row."""
        if labels.dim() < 2 or labels.is_floating_point():
            # One label for each row, not for each token.
            return False
        if self._own_shifts is None:
            self._own_shifts = loss_shifts_labels(self._model)
        return self._own_shifts

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
