"""What a run says about its data."""

from os.path import expanduser
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from meshtrain.config.path_rules import PathText
from meshtrain.config.words import LARGEST, Count, Fraction, Positive, Words


class TokenizerConfig(Words):
    """Which tokenizer: an existing one (`path`), or a byte-level BPE trained on the data (`vocab_size`)."""

    path: PathText | None = None
    """A local Hugging Face directory or tokenizer.json (relative to the run file), or a hub id."""
    vocab_size: Annotated[int, Field(ge=258, le=LARGEST)] | None = None
    """Train a byte-level BPE of this size (256 bytes, 2 special tokens, merges) on the training data, once."""
    special_tokens: list[Annotated[str, Field(min_length=1)]] = []
    """Tokens to add to the tokenizer at `path`, such as those of a chat template (`<|im_start|>`, ...); what it has
    already is left as it is. `model.enlarge_vocabulary` gives them rows in a pretrained model."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if self.path is not None and self.vocab_size is not None:
            raise ValueError(
                "both `path` and `vocab_size` given; give one: an existing tokenizer, or the size of a new one"
            )
        if self.special_tokens and self.path is None:
            raise ValueError("`special_tokens` are added to an existing tokenizer; give its `path`")
        return self


class SourceConfig(Words):
    """Where text comes from, and what its files hold."""

    train: list[PathText] = Field(default=["python-stdlib"], min_length=1)
    """Sources: `python-stdlib`, or files, directories and globs of `.jsonl`, `.parquet` and `.txt`, also compressed
    (`.gz`, `.zst`), or a token file (relative to the run file)."""
    validation: Fraction | list[PathText] = 0.0
    """Sources for evaluation, or the fraction of the training documents kept aside for it, the same for every seed."""
    format: Literal["text", "chat", "completion"] = "text"
    """What a record holds: `text`; `chat`: a list of messages, each with `role` and `content`, which the tokenizer's
    chat template puts together, trained on what the assistant says; `completion`: a prompt and what follows it, trained
    on what follows."""
    text_key: str = "text"
    """The key of a record that holds the text."""
    messages_key: str = "messages"
    """The key of a `chat` record that holds the messages."""
    prompt_key: str = "prompt"
    """The key of a `completion` record that holds what is given."""
    completion_key: str = "completion"
    """The key of a `completion` record that holds what is to be learnt."""
    streaming: bool = False
    """Read and tokenise while training, for what is too large to do it before; sources may then be URLs."""

    @model_validator(mode="after")
    def _two_keys(self) -> Self:
        if self.format == "completion" and self.prompt_key == self.completion_key:
            raise ValueError(
                f'`prompt_key` and `completion_key` are both "{self.prompt_key}"; name the two keys of a record'
            )
        return self


class MixedSourceConfig(SourceConfig):
    """One of several sources."""

    train: list[PathText] = Field(min_length=1)
    """Sources: `python-stdlib`, or files, directories and globs of `.jsonl`, `.parquet` and `.txt`, also compressed
    (`.gz`, `.zst`), or a token file (relative to the run file)."""
    weight: Positive = 1.0
    """How much of it is in every batch, in samples, relative to the weights of the others."""
    repeat: bool = True
    """Begin again where it ends; otherwise the others go on without it."""


class DataConfig(SourceConfig):
    """What to train on: one source, described right here, or several, as `data.sources.NAME`."""

    sources: dict[str, MixedSourceConfig] = {}
    """The sources of a mixture, each a table under its name."""
    form: Literal["packed", "padded"] = "packed"
    """`packed`: documents one after another, cut into full sequences; `padded`: one document per sample."""
    documents: Literal["joined", "separate"] = "joined"
    """Whether a token of packed documents sees those before its own (`joined`), or positions begin anew with each
    document and attention does not cross them (`separate`)."""
    sequence_length: Count = 1024
    """Tokens per sample."""
    pad_to_multiple_of: Count | None = None
    """Padded batches are as wide as their longest sample, rounded up to this; left out: as `sequence_length`."""
    group_by_length: Count | None = None
    """The samples of so many steps are sorted by length among each other, so that fewer pads are computed; with
    `pad_to_multiple_of`."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    on_bad_record: Literal["fail", "skip"] = "fail"
    """What to do with a record that is broken or lacks a key, or a `.txt` that is not UTF-8; `skip` counts them."""
    shuffle: bool = True
    """Visit the samples of an epoch in a seeded random order."""
    shuffle_buffer: Count = 1024
    """So many samples of a streaming source are shuffled among each other; held in memory."""
    drop_last: bool = True
    """Leave out the samples of an epoch that do not fill a global batch; otherwise untrained rows fill it."""
    cache_directory: Annotated[PathText, AfterValidator(expanduser), Field(validate_default=True)] = (
        "~/.cache/meshtrain"
    )
    """Where token files and trained tokenizers are kept."""

    @property
    def named_sources(self) -> dict[str, MixedSourceConfig]:
        """Return every source under its name; a single one is `data`."""
        if self.sources:
            return self.sources
        said = {name: getattr(self, name) for name in SourceConfig.model_fields}
        return {"data": MixedSourceConfig(**said)}

    def key_of(self, source: str, key: str) -> str:
        """Return how a key of a source is written in a run file."""
        return f"data.sources.{source}.{key}" if self.sources else f"data.{key}"

    @model_validator(mode="after")
    def _one_place_for_sources(self) -> Self:
        fields = SourceConfig.model_fields
        both = [name for name in fields if getattr(self, name) != fields[name].get_default(call_default_factory=True)]
        if self.sources and both:
            raise ValueError(
                f"both `sources` and `{both[0]}` given; with several sources each has its own: "
                f"`sources.{next(iter(self.sources))}.{both[0]}`"
            )
        return self

    @model_validator(mode="after")
    def _keys_of_the_form(self) -> Self:
        if self.form == "padded" and self.documents == "separate":
            raise ValueError(
                '`documents` = "separate" is for `form` = "packed"; a padded sample is one document anyway'
            )
        for key in ("pad_to_multiple_of", "group_by_length"):
            if self.form == "packed" and getattr(self, key) is not None:
                raise ValueError(f'`{key}` is for `form` = "padded"; packed samples are all of one length')
        if self.group_by_length is not None and self.pad_to_multiple_of is None:
            raise ValueError(
                "`group_by_length` spares nothing without `pad_to_multiple_of`: all batches are as wide as "
                "`sequence_length`; set it, to 64 for instance"
            )
        return self

    @model_validator(mode="after")
    def _epochs_to_fill(self) -> Self:
        has_epochs = len(self.named_sources) == 1 and all(
            source.repeat and not source.streaming for source in self.named_sources.values()
        )
        if not self.drop_last and not has_epochs:
            raise ValueError(
                "`drop_last` = false fills up the last batch of an epoch, and several sources, or one that is streamed "
                "or does not repeat, have no epochs; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _what_streams(self) -> Self:
        for name, source in self.named_sources.items():
            if not source.streaming:
                continue
            key = self.key_of(name, "streaming").removeprefix("data.")
            if self.tokenizer.path is None:
                raise ValueError(
                    f"`{key}` needs `tokenizer.path`: a tokenizer cannot be trained on what is only read once"
                )
            if isinstance(source.validation, float) and source.validation:
                raise ValueError(f"`{key}` has no documents to keep aside; give `validation` files of its own")
            if not source.repeat:
                raise ValueError(
                    f"`{key}` and `repeat` = false: where a stream ends is not known before; leave `repeat` out, "
                    "`steps` ends the run"
                )
            if self.group_by_length is not None:
                raise ValueError(f"`group_by_length` needs the lengths of all samples, which `{key}` does not have")
        return self
