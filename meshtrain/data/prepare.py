"""Preparing data: the sources of a run are found, tokenized and summarized.

Nothing here imports torch, so that a mistake in the data is reported at once.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from meshtrain import console
from meshtrain.config.data import DataConfig, MixedSourceConfig
from meshtrain.console import BYTES_PER_MB
from meshtrain.data.cache import Cache, compute_identity
from meshtrain.data.run_sources import FoundSource, find_sources
from meshtrain.data.text.chat_template import template_for
from meshtrain.data.text.content_hashes import content_hashes
from meshtrain.data.text.corpus import Corpus, RecordForm, SettingNames
from meshtrain.data.text.sources import SourceFile
from meshtrain.data.tokens.encoding import Task, build_task
from meshtrain.data.tokens.token_file import TRAIN, VALIDATION, TokenFile, smallest_token_type
from meshtrain.data.tokens.tokenized_source import open_token_file
from meshtrain.data.tokens.tokenizer import TokenizerFiles, open_tokenizer
from meshtrain.data.tokens.tokenizer_training import train_tokenizer
from meshtrain.data.tokens.tokenizing import prepare_token_files
from meshtrain.errors import DataError


@dataclass(frozen=True)
class Stream:
    """Text that is tokenized while training."""

    corpus: Corpus
    task: Task

    @property
    def identity(self) -> str:
        """A hash of the names and sizes of the files, and of how they are read.

        It ignores `on_bad_record`, so that a run that failed at a bad record can resume without it.
        """
        files = [(file.path.name, file.num_bytes) for file in self.corpus.files]
        template = self.task.template.identity if self.task.template else None
        return compute_identity(files, replace(self.corpus, on_bad_record="skip").identity, template)


@dataclass(frozen=True)
class PreparedSource:
    """One source of a run, tokenized, or ready to be streamed.

    Attributes:
        identity: a hash of its text; for a stream, of the names and sizes of its files.
    """

    name: str
    config: MixedSourceConfig
    train: TokenFile | Stream
    validation: TokenFile | None
    identity: str


@dataclass(frozen=True)
class PreparedData:
    """The data of a run, ready to be read."""

    config: DataConfig
    tokenizer: TokenizerFiles
    sources: tuple[PreparedSource, ...]
    identity: str
    """A hash of everything that decides the tokens of a sample id.

    It does not depend on any path.
    """

    @property
    def unigram_entropy_nats(self) -> float:
        """The unigram entropy per token of the validation text, or else of the train text.

        A model with a lower loss knows more than the frequencies of tokens. NaN if all sources are
        streamed.
        """
        files = [source.validation for source in self.sources if source.validation]
        trained = [source.train for source in self.sources if isinstance(source.train, TokenFile)]
        counts = [file.counts for file in files or trained]
        if not counts:
            return math.nan
        return sum(each.unigram_entropy_nats * each.tokens for each in counts) / sum(each.tokens for each in counts)


def prepare_data(config: DataConfig, *, leads: bool = True) -> PreparedData:
    """Find, tokenize and open everything that `config` names. What the cache holds is only opened.

    All processes of a run call this at once. One on each machine works, and the others wait for it.

    Args:
        config: with absolute paths.
        leads: whether this process should do the work; True on the one that shows the progress bar.

    Raises:
        DataError: if a source or the tokenizer is missing, broken or empty, or the cache cannot be
            written.
    """
    cache = Cache(Path(config.cache_directory), leads=leads)
    found = find_sources(config)
    corpora = {
        source.name: _corpus(source.name, source.train, source.config, config, cache, held_out=True)
        for source in found
        if not isinstance(source.train, str)
    }
    tokenizer = _prepare_tokenizer(config, corpora, cache)
    preparation = _SourcePreparation(config, tokenizer, cache)
    sources = tuple(preparation.prepare(source, corpora.get(source.name)) for source in found)
    identity = compute_identity([source.identity for source in sources], tokenizer.identity, _sampling_settings(config))
    prepared = PreparedData(config, tokenizer, sources, identity)
    console.line(_summary(prepared, built=preparation.has_built))
    return prepared


def _sampling_settings(config: DataConfig) -> object:
    """Return the settings that decide how samples are cut and mixed."""
    mixing = [(name, source.weight, source.repeat) for name, source in config.sources.items()]
    is_streamed = any(source.streaming for source in config.named_sources.values())
    buffer = config.shuffle_buffer if is_streamed else None
    return config.form, config.sequence_length, config.documents, config.group_by_length, mixing, buffer


def _corpus(
    name: str, files: list[SourceFile], source: MixedSourceConfig, config: DataConfig, cache: Cache, *, held_out: bool
) -> Corpus:
    # A stream is identified by the names and sizes of its files, because reading it first is what
    # streaming avoids.
    is_streamed = source.streaming and held_out
    return Corpus(
        tuple(files),
        ("",) * len(files) if is_streamed else tuple(content_hashes(files, cache)),
        text_key=source.text_key,
        form=_record_form(name, source, config, has_weights=held_out),
        on_bad_record=config.on_bad_record,
        held_out=source.validation if held_out and isinstance(source.validation, float) else 0.0,
        settings=_setting_names(name, config),
    )


def _setting_names(name: str, config: DataConfig) -> SettingNames:
    validation = config.key_of(name, "validation")
    return SettingNames(
        text_key=config.key_of(name, "text_key"),
        validation=f"{validation} =",
        other_validation=f"set {validation} to files of its own, or to 0",
    )


def _record_form(name: str, source: MixedSourceConfig, config: DataConfig, *, has_weights: bool) -> RecordForm | None:
    # Validation data of its own needs no weights, because evaluations do not use them.
    weight_key = source.weight_key if has_weights else None
    if source.format == "text" and weight_key is None:
        return None
    keys = {key: config.key_of(name, setting) for setting, key in source.keys_with_text.items()}
    if weight_key is not None:
        keys[weight_key] = config.key_of(name, "weight_key")
    return RecordForm(source.format, keys, weight_key)


def _as_texts(corpus: Corpus) -> Corpus:
    """Return a corpus of texts without their weights; another corpus is returned itself."""
    return replace(corpus, form=None) if corpus.form is not None and corpus.form.kind == "text" else corpus


def _prepare_tokenizer(config: DataConfig, corpora: dict[str, Corpus], cache: Cache) -> TokenizerFiles:
    if config.tokenizer.path is not None:
        return open_tokenizer(config.tokenizer, cache)
    if config.tokenizer.vocab_size is not None:
        texts = {name: _as_texts(corpus) for name, corpus in corpora.items()}
        if others := [name for name, corpus in texts.items() if corpus.form is not None]:
            raise DataError(
                "data.tokenizer.vocab_size: a tokenizer is trained on texts, and "
                f"{config.key_of(others[0], 'format')} is not text",
                "train one on text first (meshtrain tokenizer train), and name it as data.tokenizer.path",
            )
        if not corpora:
            raise DataError(
                "data.tokenizer.vocab_size: a tokenizer is trained on texts, and all sources are tokenized already",
                "name the one that they were made with as data.tokenizer.path",
            )
        return train_tokenizer(list(texts.values()), config.tokenizer.vocab_size, cache)
    raise DataError(
        "data.tokenizer: neither `path` nor `vocab_size` is set",
        "name an existing tokenizer, or the vocabulary size of one to be trained on data.train",
    )


@dataclass
class _SourcePreparation:
    """Tokenizes the sources of a run, or opens those that are tokenized already."""

    config: DataConfig
    tokenizer: TokenizerFiles
    cache: Cache
    has_built: bool = False

    def prepare(self, source: FoundSource, corpus: Corpus | None) -> PreparedSource:
        """Tokenize a source, unless the cache has it.

        Args:
            corpus: the text to train on; None: the source is tokenized already.
        """
        suffix = f" of {source.name}" if self.config.sources else ""
        parts: dict[str, TokenFile] = {}
        stream = None
        if corpus is None:
            assert isinstance(source.train, str)
            parts[TRAIN] = open_token_file(source.train, self.tokenizer, self.cache)
        elif source.config.streaming:
            stream = self._stream(corpus)
        else:
            parts |= self._tokenize(corpus, f"Tokenizing the training data{suffix}")
        if isinstance(source.validation, str):
            parts[VALIDATION] = open_token_file(source.validation, self.tokenizer, self.cache)
        elif source.validation:
            validation = _corpus(source.name, source.validation, source.config, self.config, self.cache, held_out=False)
            parts[VALIDATION] = self._tokenize(validation, f"Tokenizing the validation data{suffix}")[TRAIN]
        identity = compute_identity({part: file.identity for part, file in parts.items()}, stream and stream.identity)
        train = stream or parts[TRAIN]
        return PreparedSource(source.name, source.config, train, parts.get(VALIDATION), identity)

    def _stream(self, corpus: Corpus) -> Stream:
        template = template_for(corpus, self.tokenizer)
        if template is not None and "strftime_now" in template.source:
            raise DataError(
                f"the chat template of {self.tokenizer.directory} writes the current date (strftime_now), so a stream "
                "that resumes tomorrow would differ",
                "write a date into the template, or tokenize first",
            )
        token_type = np.dtype(smallest_token_type(self.tokenizer.vocab_size))
        return Stream(corpus, build_task(corpus, self.tokenizer.load(), token_type, template))

    def _tokenize(self, corpus: Corpus, description: str) -> dict[str, TokenFile]:
        parts, is_new = prepare_token_files(corpus, self.tokenizer, self.cache, description=description)
        self.has_built |= is_new
        return parts


def _summary(prepared: PreparedData, *, built: bool) -> str:
    descriptions, skipped, cut = [], 0, 0
    for source in prepared.sources:
        parts = {"validation": source.validation and source.validation.counts}
        if isinstance(source.train, TokenFile):
            parts = {"train": source.train.counts, **parts}
        sizes = [
            f"{name} {counts.documents:,} documents, {counts.tokens:,} tokens"
            for name, counts in parts.items()
            if counts
        ]
        if isinstance(source.train, Stream):
            corpus = source.train.corpus
            size = f"{len(corpus.files):,} files, {corpus.num_bytes / BYTES_PER_MB:,.1f} MB"
            sizes = [f"train {size}, streamed", *sizes]
        if prepared.config.form == "padded":
            files = [file for file in (source.train, source.validation) if isinstance(file, TokenFile)]
            cut += sum(int((np.diff(file.offsets) > prepared.config.sequence_length).sum()) for file in files)
        skipped += sum(counts.skipped_records for counts in parts.values() if counts)
        descriptions.append(f"{f'{source.name}: ' if prepared.config.sources else ''}{'; '.join(sizes)}")
    return (
        f"Data: {'; '.join(descriptions)}; vocabulary {prepared.tokenizer.vocab_size:,}"
        f"{f'; {skipped:,} bad records skipped' if skipped else ''}"
        f"{f'; {cut:,} documents longer than a sample are cut off' if cut else ''}; "
        f"{'tokenized into' if built else 'from'} {prepared.config.cache_directory}"
    )
