"""From the words of a run file to tokens: find the sources, tokenise them, say what there is.

Nothing here imports torch, so that a mistake in the data is reported at once.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from meshtrain import console
from meshtrain.config.data import DataConfig, MixedSourceConfig
from meshtrain.data.cache import Cache, identity_of
from meshtrain.data.contents import content_hashes
from meshtrain.data.corpus_files import Corpus, RecordForm
from meshtrain.data.sources import SourceFile, find_files
from meshtrain.data.token_file import TRAIN, VALIDATION, TokenFile
from meshtrain.data.tokenising import prepare_token_files
from meshtrain.data.tokenizer import TokenizerFiles, find_tokenizer, train_tokenizer
from meshtrain.errors import DataError


@dataclass(frozen=True)
class PreparedSource:
    """One source of a run, tokenised.

    Attributes:
        identity: a hash of the text that it stands for.
    """

    name: str
    config: MixedSourceConfig
    train: TokenFile
    validation: TokenFile | None
    identity: str


@dataclass(frozen=True)
class PreparedData:
    """The data of a run, ready to be read."""

    config: DataConfig
    tokenizer: TokenizerFiles
    sources: tuple[PreparedSource, ...]
    identity: str
    """A hash of all that decides what a sample id stands for: text, tokenizer, form and length; not of any path."""

    @property
    def unigram_entropy_nats(self) -> float:
        """Per token of the validation text (else of the train text): a model below it knows more than frequencies."""
        files = [source.validation for source in self.sources if source.validation]
        counts = [file.counts for file in files or [source.train for source in self.sources]]
        return sum(each.unigram_entropy_nats * each.tokens for each in counts) / sum(each.tokens for each in counts)


@dataclass(frozen=True)
class _Found:
    """The files of a source."""

    name: str
    config: MixedSourceConfig
    train: list[SourceFile]
    validation: list[SourceFile]


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
    found = _find_sources(config)
    corpora = {source.name: _corpus(source.name, source.train, source.config, config, cache) for source in found}
    tokenizer = _prepare_tokenizer(config, corpora, cache)
    built: list[bool] = []
    sources = tuple(_tokenise(source, corpora[source.name], tokenizer, config, cache, built) for source in found)
    identity = identity_of([source.identity for source in sources], tokenizer.identity, _reading(config))
    prepared = PreparedData(config, tokenizer, sources, identity)
    console.line(_summary(prepared, built=any(built)))
    return prepared


def _reading(config: DataConfig) -> object:
    """Return what decides how samples are cut and mixed."""
    mixing = [(name, source.weight, source.repeat) for name, source in config.sources.items()]
    return config.form, config.sequence_length, config.documents, config.group_by_length, mixing


def _find_sources(config: DataConfig) -> list[_Found]:
    problems: list[str] = []
    found = []
    for name, source in config.named_sources.items():
        validation = source.validation if isinstance(source.validation, list) else []
        files = {}
        for part, names in (("train", source.train), ("validation", validation)):
            try:
                files[part] = find_files(names, key=config.key_of(name, part))
            except DataError as error:
                problems += error.problems
        found.append(_Found(name, source, files.get("train", []), files.get("validation", [])))
    if problems:
        raise DataError(problems)
    _check_apart(config, found)
    return found


def _check_apart(config: DataConfig, found: Iterable[_Found]) -> None:
    trained_on = {file.path: source.name for source in found for file in source.train}
    for source in found:
        if shared := {file.path for file in source.validation} & trained_on.keys():
            file = min(shared)
            raise DataError(
                f"{config.key_of(source.name, 'validation')}: {file} is also in "
                f"{config.key_of(trained_on[file], 'train')}, where a low loss on it means nothing; leave it out of "
                f"one of them, or keep documents aside with {config.key_of(source.name, 'validation')} = 0.05"
            )


def _corpus(name: str, files: list[SourceFile], source: MixedSourceConfig, config: DataConfig, cache: Cache) -> Corpus:
    return Corpus(
        tuple(files),
        tuple(content_hashes(files, cache)),
        text_key=source.text_key,
        form=_record_form(name, source, config),
        on_bad_record=config.on_bad_record,
        held_out=0.0 if isinstance(source.validation, list) else source.validation,
    )


def _record_form(name: str, source: MixedSourceConfig, config: DataConfig) -> RecordForm | None:
    keys = {"chat": ["messages_key"], "completion": ["prompt_key", "completion_key"], "text": []}[source.format]
    if source.format == "text":
        return None
    return RecordForm(source.format, {getattr(source, key): config.key_of(name, key) for key in keys})


def _prepare_tokenizer(config: DataConfig, corpora: dict[str, Corpus], cache: Cache) -> TokenizerFiles:
    if config.tokenizer.path is not None:
        return find_tokenizer(config.tokenizer.path, cache)
    if config.tokenizer.vocab_size is not None:
        if others := [name for name, corpus in corpora.items() if corpus.form is not None]:
            raise DataError(
                f"data.tokenizer.vocab_size: a tokenizer is trained on texts, and {config.key_of(others[0], 'format')} "
                "is another; train one on text first (meshtrain tokenizer train), and name it as data.tokenizer.path"
            )
        return train_tokenizer(list(corpora.values()), config.tokenizer.vocab_size, cache)
    raise DataError(
        "data.tokenizer: neither `path` nor `vocab_size` is set; "
        "name an existing tokenizer, or the vocabulary size of one to be trained on data.train"
    )


def _tokenise(
    source: _Found, corpus: Corpus, tokenizer: TokenizerFiles, config: DataConfig, cache: Cache, built: list[bool]
) -> PreparedSource:
    """Tokenise a source, unless the cache has it; whether it has is added to `built`."""
    of = f" of {source.name}" if config.sources else ""
    parts, is_new = prepare_token_files(corpus, tokenizer, cache, description=f"Tokenising the training data{of}")
    built.append(is_new)
    identities = [corpus.identity]
    if source.validation:
        validation = _corpus(
            source.name, source.validation, source.config.model_copy(update={"validation": []}), config, cache
        )
        identities.append(validation.identity)
        found, is_new = prepare_token_files(
            validation, tokenizer, cache, description=f"Tokenising the validation data{of}"
        )
        built.append(is_new)
        parts[VALIDATION] = found[TRAIN]
    return PreparedSource(source.name, source.config, parts[TRAIN], parts.get(VALIDATION), identity_of(identities))


def _summary(prepared: PreparedData, *, built: bool) -> str:
    told, skipped = [], 0
    for source in prepared.sources:
        parts = {"train": source.train.counts, "validation": source.validation and source.validation.counts}
        sizes = [
            f"{name} {counts.documents:,} documents, {counts.tokens:,} tokens"
            for name, counts in parts.items()
            if counts
        ]
        skipped += sum(counts.skipped_records for counts in parts.values() if counts)
        told.append(f"{f'{source.name}: ' if prepared.config.sources else ''}{'; '.join(sizes)}")
    return (
        f"Data: {'; '.join(told)}; vocabulary {prepared.tokenizer.vocab_size:,}"
        f"{f'; {skipped:,} broken records skipped' if skipped else ''}; "
        f"{'tokenised into' if built else 'from'} {prepared.config.cache_directory}"
    )
