"""From the words of a run file to samples: find the sources, tokenise them, say what there is.

Nothing here imports torch, so that a mistake in the data is reported at once.
"""

from dataclasses import dataclass
from pathlib import Path

from meshtrain import console
from meshtrain.config.run import DataConfig
from meshtrain.data.cache import Cache, identity_of
from meshtrain.data.contents import content_hashes
from meshtrain.data.corpus_files import Corpus
from meshtrain.data.order import SampleOrder
from meshtrain.data.samples import PackedSamples, PaddedSamples, Samples
from meshtrain.data.sources import SourceFile, find_files
from meshtrain.data.token_file import TRAIN, VALIDATION, TokenFile
from meshtrain.data.tokenising import prepare_token_files
from meshtrain.data.tokenizer import TokenizerFiles, find_tokenizer, train_tokenizer
from meshtrain.errors import DataError


@dataclass(frozen=True)
class PreparedData:
    """The data of a run, ready to be read."""

    config: DataConfig
    tokenizer: TokenizerFiles
    train: TokenFile
    validation: TokenFile | None
    identity: str
    """A hash of all that decides what a sample id stands for: text, tokenizer, form and length; not of any path."""

    @property
    def unigram_entropy_nats(self) -> float:
        """Per token of the validation text (else of the train text): a model below it knows more than frequencies."""
        return (self.validation or self.train).counts.unigram_entropy_nats


def prepare_data(config: DataConfig, *, leads: bool = True) -> PreparedData:
    """Find, tokenise and open everything that `config` names; what the cache has is only opened.

    All processes of a run call this at once: one of them on each machine works and the others wait for it.

    Args:
        config: with absolute paths.
        leads: whether this process goes first; True on the one whose progress bar is seen.

    Raises:
        DataError: if a source or the tokenizer is missing, broken or empty, or the cache cannot be written.
    """
    cache = Cache(Path(config.cache_directory), leads=leads)
    train_files, validation_files = _find_sources(config)
    train = _corpus(train_files, config, cache, held_out=0.0 if validation_files else _held_out(config))
    tokenizer = _prepare_tokenizer(config, train, cache)
    parts, built = prepare_token_files(train, tokenizer, cache, description="Tokenising the training data")
    identities = [train.identity]
    if validation_files:
        validation = _corpus(validation_files, config, cache, held_out=0.0)
        identities.append(validation.identity)
        found, also_built = prepare_token_files(
            validation, tokenizer, cache, description="Tokenising the validation data"
        )
        parts[VALIDATION] = found[TRAIN]
        built |= also_built
    identity = identity_of(identities, tokenizer.identity, config.form, config.sequence_length)
    prepared = PreparedData(config, tokenizer, parts[TRAIN], parts.get(VALIDATION), identity)
    console.line(_summary(prepared, built))
    return prepared


def train_samples(prepared: PreparedData) -> Samples:
    """Return the samples to train on."""
    return _samples(prepared, prepared.train)


def validation_samples(prepared: PreparedData) -> Samples | None:
    """Return the samples to evaluate on, if the run has any."""
    return _samples(prepared, prepared.validation) if prepared.validation else None


def train_order(prepared: PreparedData, *, global_batch_size: int, seed: int) -> SampleOrder:
    """Return which training samples make up which step."""
    return SampleOrder(
        len(train_samples(prepared)),
        global_batch_size=global_batch_size,
        seed=seed,
        shuffle=prepared.config.shuffle,
        drop_last=prepared.config.drop_last,
    )


def validation_order(prepared: PreparedData, *, global_batch_size: int) -> SampleOrder | None:
    """Return the order of an evaluation, if the run has any: every sample once, as stored."""
    samples = validation_samples(prepared)
    if samples is None:
        return None
    return SampleOrder(len(samples), global_batch_size=global_batch_size, shuffle=False, drop_last=False)


def check_enough(prepared: PreparedData, global_batch_size: int) -> None:
    """Check that there is at least one step to train, and one to evaluate if there is a validation text.

    Raises:
        DataError: with what there is and what would do.
    """
    needed = global_batch_size if prepared.config.drop_last else 1
    problems = [_too_small("data.train", prepared, prepared.train, needed)]
    if prepared.validation:
        problems.append(_too_small("data.validation", prepared, prepared.validation, 1))
    if found := [problem for problem in problems if problem]:
        raise DataError(found)


def _too_small(key: str, prepared: PreparedData, tokens: TokenFile, needed: int) -> str | None:
    length, num_samples = prepared.config.sequence_length, len(_samples(prepared, tokens))
    if num_samples >= needed:
        return None
    found = (
        f"{key}: {tokens.counts.documents:,} documents with {tokens.counts.tokens:,} tokens make {num_samples:,} "
        f"{prepared.config.form} samples of {length:,} tokens, and one batch needs {needed:,}"
    )
    ways = ["give it more text"]
    if needed > 1 and num_samples:
        ways += [f"lower global_batch_size to {num_samples:,} or less", "set data.drop_last to false"]
    longest = (tokens.counts.tokens - 1) // needed
    if prepared.config.form == "packed" and longest:
        ways.append(f"lower data.sequence_length to {longest:,} or less")
    return f"{found}: {', '.join(ways[:-1])}{' or ' if ways[1:] else ''}{ways[-1]}"


def _samples(prepared: PreparedData, tokens: TokenFile) -> Samples:
    form = PackedSamples if prepared.config.form == "packed" else PaddedSamples
    return form(tokens, prepared.config.sequence_length, pad_id=prepared.tokenizer.pad_id)


def _find_sources(config: DataConfig) -> tuple[list[SourceFile], list[SourceFile]]:
    problems: list[str] = []
    found: list[list[SourceFile]] = []
    validation = config.validation if isinstance(config.validation, list) else []
    for key, sources in (("data.train", config.train), ("data.validation", validation)):
        try:
            found.append(find_files(sources, key=key))
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(problems)
    train, validation_files = found
    if shared := {file.path for file in train} & {file.path for file in validation_files}:
        raise DataError(
            f"data.validation: {min(shared)} is also in data.train, where a low loss on it means nothing; "
            "leave it out of one of them, or keep documents aside with data.validation = 0.05"
        )
    return train, validation_files


def _held_out(config: DataConfig) -> float:
    return 0.0 if isinstance(config.validation, list) else config.validation


def _corpus(files: list[SourceFile], config: DataConfig, cache: Cache, *, held_out: float) -> Corpus:
    return Corpus(
        tuple(files),
        tuple(content_hashes(files, cache)),
        text_key=config.text_key,
        on_bad_record=config.on_bad_record,
        held_out=held_out,
    )


def _prepare_tokenizer(config: DataConfig, train: Corpus, cache: Cache) -> TokenizerFiles:
    if config.tokenizer.path is not None:
        return find_tokenizer(config.tokenizer.path, cache)
    if config.tokenizer.vocab_size is not None:
        return train_tokenizer(train, config.tokenizer.vocab_size, cache)
    raise DataError(
        "data.tokenizer: neither `path` nor `vocab_size` is set; "
        "name an existing tokenizer, or the vocabulary size of one to be trained on data.train"
    )


def _summary(prepared: PreparedData, built: bool) -> str:
    parts = {"train": prepared.train.counts, "validation": prepared.validation and prepared.validation.counts}
    sizes = [
        f"{name} {counts.documents:,} documents, {counts.tokens:,} tokens" for name, counts in parts.items() if counts
    ]
    skipped = sum(counts.skipped_records for counts in parts.values() if counts)
    return (
        f"Data: {'; '.join(sizes)}; vocabulary {prepared.tokenizer.vocab_size:,}"
        f"{f'; {skipped:,} broken records skipped' if skipped else ''}; "
        f"{'tokenised into' if built else 'from'} {prepared.config.cache_directory}"
    )
