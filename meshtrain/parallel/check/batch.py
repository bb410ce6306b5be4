"""Check that batch sizes and sequence lengths fit the plan and the positions of the model."""

from dataclasses import dataclass

from transformers import PreTrainedModel

from meshtrain.config.plan import ParallelPlan
from meshtrain.errors import Problem
from meshtrain.models.rotary import most_positions
from meshtrain.parallel.tensor.rules import Problems


@dataclass(frozen=True)
class BatchShape:
    """The shape of the batches of a run.

    Attributes:
        global_batch_size: in rows.
        micro_batch_size: in rows.
        sequence_length: in tokens.
        width_multiple: in tokens; batches may be narrower, and their width is a multiple of this
            number. None if all batches have the same width.
        smaller: sizes of smaller global batches at the start of a run, in sequences.
        separates: whether rows are made of documents that do not see each other.
        rows: number of rows of a sequence in the words of a user: a pair has two.
        takes_chunks: whether the loss may be computed in chunks of tokens.
    """

    global_batch_size: int
    micro_batch_size: int
    sequence_length: int
    width_multiple: int | None = None
    smaller: tuple[int, ...] = ()
    separates: bool = False
    rows: int = 1
    takes_chunks: bool = True

    @property
    def counted_in(self) -> str:
        """Return what a user counts in a batch."""
        return "sequences" if self.rows == 1 else "pairs"


def num_microbatches(plan: ParallelPlan, batch: BatchShape) -> int:
    """Return the number of microbatches that each process runs per step; the mesh is resolved."""
    return batch.global_batch_size // (plan.mesh.data_degree * batch.micro_batch_size)


def check_batch(plan: ParallelPlan, model: PreTrainedModel, batch: BatchShape) -> Problems:
    size, micro_batch_size = batch.global_batch_size // batch.rows, batch.micro_batch_size // batch.rows
    data_degree = plan.mesh.data_degree
    unit = data_degree * micro_batch_size
    if size % unit:
        yield Problem(
            f"global_batch_size = {size} is not a multiple of dp {data_degree} x micro_batch_size "
            f"{micro_batch_size} = {unit}",
            nearest_multiples(size, unit),
        )
    if wrong := [size for size in batch.smaller if size % unit]:
        yield Problem(
            f"batch_ramp has a batch of {wrong[0]} {batch.counted_in}, which is not a multiple of dp {data_degree} x "
            f"micro_batch_size {micro_batch_size} = {unit}",
            "set first and increment of batch_ramp to multiples of it",
        )


def check_sequence(plan: ParallelPlan, model: PreTrainedModel, batch: BatchShape) -> Problems:
    positions = most_positions(model.config)
    if positions is not None and positions < batch.sequence_length:
        # The name of the key in this configuration: GPT-2 has `n_positions`.
        name = "max_position_embeddings"
        key = model.config.get_text_config().attribute_map.get(name, name)
        yield Problem(
            f"data.sequence_length = {batch.sequence_length} is longer than the {positions} positions of the model",
            f"shorten it, or raise {key} of a new model",
        )
    tp = plan.mesh.tp
    if plan.tensor.sequence_parallel and batch.sequence_length % tp:
        yield Problem(
            f"tensor.sequence_parallel splits the sequence over tp = {tp}, which does not divide data.sequence_length "
            f"= {batch.sequence_length}",
            nearest_multiples(batch.sequence_length, tp),
        )
    multiple = batch.width_multiple
    if plan.tensor.sequence_parallel and multiple is not None and multiple % tp:
        yield Problem(
            f"tensor.sequence_parallel splits every batch over tp = {tp}, which does not divide "
            f"data.pad_to_multiple_of = {multiple}",
            nearest_multiples(multiple, tp),
        )


def nearest_multiples(number: int, unit: int) -> str:
    """Return the advice to set a number to a multiple of `unit`."""
    below = number // unit * unit
    return f"set it to {below} or {below + unit}" if below else f"set it to {unit}"
