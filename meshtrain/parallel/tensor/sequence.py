"""Sequence parallelism: hidden states are split along the sequence between the decoder layers.

They are split before the first decoder layer and joined after the last. A pass without gradients
does not split them; see `sequence_is_split`.
"""

from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from transformers.utils import ModelOutput

from meshtrain.errors import DataError
from meshtrain.parallel.cut.stage import Stage
from meshtrain.parallel.tensor.collectives import SEQUENCE_DIM, join_sequence, split_sequence
from meshtrain.parallel.tensor.region import sequence_is_split


def shard_hidden_states(stage: Stage, group: ProcessGroup) -> None:
    """Split the sequence before the first decoder layer, and join it after the last, by hooks.

    A stage without the first layer does not split, and one without the last layer does not join.

    Raises:
        DataError: in a pass with gradients, if tp does not divide the length of the sequence.
    """

    def split(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not sequence_is_split():
            return args, kwargs
        hidden = args[0] if args else kwargs["hidden_states"]
        assert hidden.dim() == 3, f"the stream is {tuple(hidden.shape)} and not (batch, seq, hidden)"
        check_divisible(hidden.shape[SEQUENCE_DIM], group.size())
        if args:
            return (split_sequence(args[0], group), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": split_sequence(kwargs["hidden_states"], group)}

    def join(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not sequence_is_split():
            return output
        return (
            (join_sequence(output[0], group), *output[1:])
            if isinstance(output, tuple)
            else join_sequence(output, group)
        )

    if stage.is_first:
        stage.layers[0].register_forward_pre_hook(split, with_kwargs=True)
    if stage.is_last and stage.own_layers():
        stage.own_layers()[-1].register_forward_hook(join)
    elif stage.is_last:
        follow = stage.received_follow_sequence()
        stage.channel.arrive = lambda index, x: join_sequence(x, group) if follow[index] and sequence_is_split() else x


def join_hidden_states(output: ModelOutput, length: int, group: ProcessGroup) -> None:
    """Join the hidden states that a forward pass returns with its logits, in place.

    Args:
        output: of the model; each of its hidden states is (batch, seq, hidden) or (batch, seq/tp,
            hidden).
        length: of the sequence, in tokens.
        group: the processes that share the sequence.
    """
    for name, states in output.items():
        if name.endswith("hidden_states") and isinstance(states, tuple):
            output[name] = tuple(
                state if state.shape[SEQUENCE_DIM] == length else join_sequence(state, group) for state in states
            )


def check_divisible(length: int, tp: int) -> None:
    """Check that every process can have an equal part of a sequence.

    Args:
        length: in tokens.
        tp: number of processes that share it.

    Raises:
        DataError: if tp does not divide the length.
    """
    if length % tp:
        raise DataError(
            f"tensor.sequence_parallel splits the sequence over tp = {tp}, which does not divide its {length} tokens",
            f"pad the batch (pad_to_multiple_of = {tp} of a tokenizer), or set tensor.sequence_parallel = false",
        )
