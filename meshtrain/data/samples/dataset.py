"""The dataset of a run: the samples of all sources, and the order that assigns them to steps."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from meshtrain.config.batch_ramp import NO_RAMP, BatchRampConfig
from meshtrain.data.prepare import PreparedData, PreparedSource
from meshtrain.data.samples.answers import JudgedSamples, PairSamples, count_without_answer
from meshtrain.data.samples.mixture import MixedSource, MixtureOrder
from meshtrain.data.samples.order import GroupedOrder, Order, SampleOrder
from meshtrain.data.samples.ramp import RampedOrder
from meshtrain.data.samples.rows import MixedSamples, PackedSamples, PaddedSamples, Samples
from meshtrain.data.samples.stream import StreamForm, StreamSamples
from meshtrain.data.samples.stream_rows import StreamReader
from meshtrain.data.tokens.token_file import TokenFile
from meshtrain.errors import DataError


@dataclass(frozen=True)
class Dataset:
    """Everything that a run reads.

    Attributes:
        samples: the samples to train on.
        order: assigns samples to steps.
        validation: source -> the samples to evaluate on, with an order that visits each once, as
            stored. Sources without a validation part are left out.
        streams: source -> its samples, for the sources that are streamed.
    """

    samples: Samples
    order: Order
    validation: dict[str, tuple[Samples, SampleOrder]]
    streams: dict[str, StreamSamples]

    def stream_state(self, data_step: int) -> dict[str, tuple[int, ...]]:
        """Return source -> the position of its stream before a batch, for a checkpoint."""
        counts = self.order.samples_before(data_step)
        # The order of a single source does not count samples.
        return {
            name: stream.cursor(counts.get(name, self.order.num_samples_before(data_step)))
            for name, stream in self.streams.items()
        }

    def restore_streams(self, state: Mapping[str, tuple[int, ...]]) -> None:
        """Continue the streams from what `stream_state` returned."""
        for name, saved in state.items():
            self.streams[name].restore(saved)

    def check_steps(self, num_steps: int, num_left_out: int = 0) -> None:
        """Check that the data last for a number of steps.

        Args:
            num_left_out: batches that no step reads.

        Raises:
            DataError: if all sources end before.
        """
        if self.order.num_steps is None or self.order.num_steps - num_left_out >= num_steps:
            return
        found = self.order.num_steps - num_left_out
        without = f" without the batches that rewinds leave out ({num_left_out:,})" if num_left_out else ""
        raise DataError(
            f"data.sources: all sources end after {found:,} steps{without}, but the run has {num_steps:,}",
            f"set steps to {found:,} or less, or let one of them repeat with repeat = true",
        )


def build_dataset(
    prepared: PreparedData, *, global_batch_size: int, seed: int, ramp: BatchRampConfig = NO_RAMP
) -> Dataset:
    """Build the dataset of a run.

    Args:
        prepared: the data.
        global_batch_size: samples in one step, over all processes.
        seed: decides the order.
        ramp: smaller batches of the first steps.

    Raises:
        DataError: if there is too little of it, or the share of a source is too small.
    """
    check_enough(prepared, global_batch_size)
    parts = {source.name: _train_samples(prepared, source, seed) for source in prepared.sources}
    samples = _join_samples(list(parts.values()))
    order = _order(prepared, parts, global_batch_size=ramp.unit(global_batch_size), seed=seed)
    if ramp.first is not None:
        order = RampedOrder(order, ramp.batches(global_batch_size), global_batch_size)
    if prepared.config.group_by_length is not None:
        order = GroupedOrder(order, samples.lengths, group=prepared.config.group_by_length, seed=seed)
    validation = {}
    for source in prepared.sources:
        if source.validation:
            held_out = _cut_samples(prepared, source.validation)
            in_order = SampleOrder(len(held_out), global_batch_size=global_batch_size, shuffle=False, drop_last=False)
            validation[source.name] = held_out, in_order
    streams = {name: part for name, part in parts.items() if isinstance(part, StreamSamples)}
    return Dataset(samples, order, validation, streams)


def train_samples(prepared: PreparedData, *, seed: int = 0) -> Samples:
    """Return the samples to train on.

    Args:
        seed: decides the order within a stream.
    """
    return _join_samples([_train_samples(prepared, source, seed) for source in prepared.sources])


def validation_samples(prepared: PreparedData) -> Samples | None:
    """Return the samples to evaluate on; None if the run has none."""
    parts = [_cut_samples(prepared, source.validation) for source in prepared.sources if source.validation]
    return _join_samples(parts) if parts else None


def check_enough(prepared: PreparedData, global_batch_size: int) -> None:
    """Check that there are enough samples for one step, and for one evaluation if there is any.

    Raises:
        DataError: with what was found, and what would help.
    """
    # With several sources, each needs only one sample, because a batch mixes all of them.
    needed = global_batch_size if prepared.config.drop_last and len(prepared.sources) == 1 else 1
    problems = []
    for source in prepared.sources:
        if isinstance(source.train, TokenFile):
            problems.append(_describe_shortage("train", prepared, source, source.train, needed))
        if source.validation:
            problems.append(_describe_shortage("validation", prepared, source, source.validation, 1))
    if prepared.config.answers is not None:
        problems += [_describe_cut(prepared, source, key, file) for source, key, file in _files(prepared)]
    if found := [problem for problem in problems if problem]:
        raise DataError(found)


def _files(prepared: PreparedData) -> Iterator[tuple[PreparedSource, str, TokenFile]]:
    for source in prepared.sources:
        for key, file in (("train", source.train), ("validation", source.validation)):
            if isinstance(file, TokenFile):
                yield source, key, file


def _describe_cut(prepared: PreparedData, source: PreparedSource, key: str, tokens: TokenFile) -> str | None:
    length = prepared.config.sequence_length
    number = count_without_answer(tokens, length)
    if not number:
        return None
    return (
        f"{prepared.config.key_of(source.name, key)}: {number:,} of {tokens.counts.documents:,} prompts fill "
        f"data.sequence_length = {length:,} tokens, so nothing is left of their answers: raise it, or leave such "
        "records out"
    )


def _order(prepared: PreparedData, parts: dict[str, Samples], *, global_batch_size: int, seed: int) -> Order:
    config, (first, *others) = prepared.config, prepared.sources
    if not others and first.config.repeat:
        return SampleOrder(
            len(parts[first.name]),
            global_batch_size=global_batch_size,
            seed=seed,
            # A stream shuffles within its buffer.
            shuffle=config.shuffle and not first.config.streaming,
            drop_last=config.drop_last,
        )
    mixed = [
        MixedSource(
            source.name,
            len(parts[source.name]),
            weight=source.config.weight,
            repeats=source.config.repeat,
            shuffle=config.shuffle and not source.config.streaming,
        )
        for source in prepared.sources
    ]
    return MixtureOrder(mixed, global_batch_size=global_batch_size, seed=seed)


def _train_samples(prepared: PreparedData, source: PreparedSource, seed: int) -> Samples:
    if isinstance(source.train, TokenFile):
        return _cut_samples(prepared, source.train, has_weights=prepared.config.has_weights)
    config, tokenizer = prepared.config, prepared.tokenizer
    stream_seed = f"{seed}/{source.name}"
    reader = StreamReader(source.train.corpus, source.train.task, tokenizer.end_id, config.shuffle, stream_seed)
    form = StreamForm(
        sequence_length=config.sequence_length,
        pad_id=tokenizer.pad_id,
        is_padded=config.form == "padded",
        separate_documents=config.documents == "separate",
        pad_to_multiple_of=config.pad_to_multiple_of,
        num_buffered=config.shuffle_buffer,
        shuffle=config.shuffle,
    )
    return StreamSamples(reader, form)


def _join_samples(parts: list[Samples]) -> Samples:
    return parts[0] if len(parts) == 1 else MixedSamples(parts)


def _cut_samples(prepared: PreparedData, tokens: TokenFile, *, has_weights: bool = False) -> Samples:
    config, pad_id = prepared.config, prepared.tokenizer.pad_id
    if config.answers == "unpaired_preference":
        multiple = config.pad_to_multiple_of
        return JudgedSamples(tokens, config.sequence_length, pad_id=pad_id, pad_to_multiple_of=multiple)
    if config.form == "padded":
        multiple = config.pad_to_multiple_of
        padded = PaddedSamples(
            tokens, config.sequence_length, pad_id=pad_id, pad_to_multiple_of=multiple, has_weights=has_weights
        )
        return PairSamples(padded) if config.answers == "preference" else padded
    separate = config.documents == "separate"
    return PackedSamples(
        tokens, config.sequence_length, pad_id=pad_id, separate_documents=separate, has_weights=has_weights
    )


def _describe_shortage(
    key: str, prepared: PreparedData, source: PreparedSource, tokens: TokenFile, needed: int
) -> str | None:
    length, num_samples = prepared.config.sequence_length, len(_cut_samples(prepared, tokens))
    if num_samples >= needed:
        return None
    found = (
        f"{prepared.config.key_of(source.name, key)}: {tokens.counts.documents:,} documents with "
        f"{tokens.counts.tokens:,} tokens make {num_samples:,} {prepared.config.form} samples of {length:,} tokens, "
        f"and one batch needs {needed:,}"
    )
    advice = ["provide more text"]
    if needed > 1 and num_samples:
        advice += [f"lower global_batch_size to {num_samples:,} or less", "set data.drop_last to false"]
    longest = (tokens.counts.tokens - 1) // needed
    if prepared.config.form == "packed" and longest:
        advice.append(f"lower data.sequence_length to {longest:,} or less")
    return f"{found}: {', '.join(advice[:-1])}{' or ' if advice[1:] else ''}{advice[-1]}"
