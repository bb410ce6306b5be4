"""The data of a run."""

from os.path import expanduser
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from meshtrain.config.path_rules import PathText
from meshtrain.config.preference import RecordName
from meshtrain.config.settings import LARGEST, Count, Fraction, Positive, Settings
from meshtrain.errors import ConfigError

IGNORE_INDEX = -100
"""The label of a position that is not trained on: the `ignore_index` of torch."""

KEYS = {
    "text": (),
    "chat": ("messages_key",),
    "completion": ("prompt_key", "completion_key"),
    "preference": ("prompt_key", "chosen_key", "rejected_key"),
    "unpaired_preference": ("prompt_key", "completion_key", "label_key"),
}
"""Format of records -> the settings that name their keys."""


class TokenizerConfig(Settings):
    """The tokenizer: an existing one (`path`), or a byte-level BPE that is trained on the data
    (`vocab_size`)."""

    path: PathText | None = None
    """A local Hugging Face directory or `tokenizer.json` (relative to the run file), or a hub
    id."""
    vocab_size: Annotated[int, Field(ge=258, le=LARGEST)] | None = None
    """Train a byte-level BPE on the training data, once. Number of tokens: 256 bytes, 2 special
    tokens, and merges."""
    special_tokens: list[Annotated[str, Field(min_length=1)]] = []
    """Tokens that are added to the tokenizer at `path`, such as `<|im_start|>` of a chat
    template. Tokens that it has already stay as they are. `model.enlarge_vocabulary` gives new
    tokens rows in a pretrained model."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if self.path is not None and self.vocab_size is not None:
            raise ConfigError(
                "both `path` and `vocab_size` are set", "set one: an existing tokenizer, or the size of a new one"
            )
        if self.special_tokens and self.path is None:
            raise ConfigError("`special_tokens` are added to an existing tokenizer", "set its `path`")
        return self


class SourceConfig(Settings):
    """Where the text comes from, and what its files hold."""

    train: list[PathText] = Field(default=["python-stdlib"], min_length=1)
    """Sources: `python-stdlib`, or files, directories and globs of `.jsonl`, `.parquet` and
    `.txt`, also compressed (`.gz`, `.zst`), or a token file (relative to the run file)."""
    validation: Fraction | list[PathText] = 0.0
    """Sources for evaluation, or the fraction of the training documents that is kept aside for
    it. The documents kept aside are the same for every seed."""
    format: Literal["text", "chat", "completion", "preference", "unpaired_preference"] = "text"
    """What a record holds. `text`: plain text. `chat`: a list of messages, each with `role` and
    `content`, joined by the tokenizer's chat template; only what the assistant says is trained
    on. `completion`: a prompt and what follows it; only what follows is trained on.
    `preference`: a prompt, a chosen and a rejected answer. `unpaired_preference`: a prompt, an
    answer, and whether it is desirable. The last two are for `preference.loss`; prompt and answers
    are texts, or lists of messages."""
    text_key: str = "text"
    """Key of a record that holds the text."""
    messages_key: str = "messages"
    """Key of a `chat` record that holds the messages."""
    prompt_key: str = "prompt"
    """Key of a record that holds the prompt, in every format that has one."""
    completion_key: str = "completion"
    """Key of a `completion` or `unpaired_preference` record that holds what follows the prompt."""
    chosen_key: str = "chosen"
    """Key of a `preference` record that holds the better answer."""
    rejected_key: str = "rejected"
    """Key of a `preference` record that holds the worse answer."""
    label_key: str = "label"
    """Key of an `unpaired_preference` record that holds true for a desirable answer, else
    false."""
    weight_key: str | None = None
    """Key of a record that holds a number: how much each of its tokens counts in the training loss.
    Left out: all tokens count the same."""
    streaming: bool = False
    """Read and tokenize during training, for data that is too large to tokenize first. Sources
    may then be URLs."""

    @property
    def keys(self) -> dict[str, str]:
        """Return setting -> key, for the keys that a record of the format must have."""
        return {name: getattr(self, name) for name in KEYS[self.format]}

    @model_validator(mode="after")
    def _different_keys(self) -> Self:
        settings: dict[str, str] = {}
        for setting, key in self.keys.items():
            other = settings.setdefault(key, setting)
            if other != setting:
                raise ConfigError(f'`{other}` and `{setting}` are both "{key}"', "name the different keys of a record")
        return self

    @property
    def is_of_answers(self) -> bool:
        """Whether the records are those of a `preference.loss`."""
        return self.format in ("preference", "unpaired_preference")

    @property
    def keys_with_text(self) -> dict[str, str]:
        """Return setting -> key, as `keys`, and for a `text` that of the text."""
        return self.keys or {"text_key": self.text_key}

    @model_validator(mode="after")
    def _weight_of_its_own(self) -> Self:
        if self.weight_key is None:
            return self
        if self.is_of_answers:
            raise ConfigError("`weight_key` is for texts, chats and completions, and not for answers", "leave it out")
        for name, key in self.keys_with_text.items():
            if key == self.weight_key:
                raise ConfigError(f'`{name}` and `weight_key` are both "{self.weight_key}"', "name two keys")
        return self


class MixedSourceConfig(SourceConfig):
    """One of several sources."""

    train: list[PathText] = Field(min_length=1)
    """Sources: `python-stdlib`, or files, directories and globs of `.jsonl`, `.parquet` and
    `.txt`, also compressed (`.gz`, `.zst`), or a token file (relative to the run file)."""
    weight: Positive = 1.0
    """Share of this source in every batch, counted in samples, relative to the weights of the
    other sources."""
    repeat: bool = True
    """Start this source again when it ends. Otherwise training continues with the others."""


class DataConfig(SourceConfig):
    """The training data: one source, described in this table, or several, as
    `data.sources.NAME`."""

    sources: dict[str, MixedSourceConfig] = {}
    """Sources of a mixture, each a table under its name."""
    form: Literal["packed", "padded"] = "packed"
    """`packed` joins documents and cuts them into full sequences. `padded` makes one sample of
    each document; pads are not trained on."""
    documents: Literal["joined", "separate"] = "joined"
    """For packed documents. `joined`: a token sees the documents before its own. `separate`:
    positions start again with each document, and attention does not cross documents."""
    sequence_length: Count = 1024
    """Number of tokens per sample."""
    pad_to_multiple_of: Count | None = None
    """Padded batches are as wide as their longest sample, rounded up to a multiple of this
    number of tokens. Left out: as wide as `sequence_length`."""
    group_by_length: Count | None = None
    """Number of steps whose samples are sorted by length among each other, so that fewer pads
    are computed. Needs `pad_to_multiple_of`."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """The tokenizer of all sources."""
    on_bad_record: Literal["fail", "skip"] = "fail"
    """What happens to a record that is broken or lacks a key, or to a `.txt` file that is not
    UTF-8. `skip` leaves it out and counts it."""
    shuffle: bool = True
    """Visit the samples of an epoch in a random order that depends on the seed."""
    shuffle_buffer: Count = 1024
    """Number of samples of a streaming source that are shuffled among each other. They are held
    in memory."""
    drop_last: bool = True
    """Leave out the samples of an epoch that do not fill a global batch. Otherwise untrained
    rows fill it, which a run with losses or biases of routers refuses."""
    cache_directory: Annotated[PathText, AfterValidator(expanduser), Field(validate_default=True)] = (
        "~/.cache/meshtrain"
    )
    """Directory for token files and trained tokenizers."""

    @field_validator("cache_directory")
    @classmethod
    def _local_cache(cls, path: str) -> str:
        if "://" in path:
            raise ConfigError(
                f"{path!r} is a URL, but token files are mapped into memory", "set it to a local directory"
            )
        return path

    @property
    def named_sources(self) -> dict[str, MixedSourceConfig]:
        """Return every source under its name; a single one is `data`."""
        if self.sources:
            return self.sources
        settings = {name: getattr(self, name) for name in SourceConfig.model_fields}
        return {"data": MixedSourceConfig(**settings)}

    @property
    def has_weights(self) -> bool:
        """Return whether any source has weights of its records."""
        return any(source.weight_key is not None for source in self.named_sources.values())

    @property
    def answers(self) -> RecordName | None:
        """Return the format of judged answers; None if the sources hold texts."""
        (first, *_) = self.named_sources.values()
        return first.format if first.format in ("preference", "unpaired_preference") else None

    def key_of(self, source: str, key: str) -> str:
        """Return how a key of a source is written in a run file."""
        return f"data.sources.{source}.{key}" if self.sources else f"data.{key}"

    @model_validator(mode="after")
    def _one_place_for_sources(self) -> Self:
        fields = SourceConfig.model_fields
        both = [name for name in fields if getattr(self, name) != fields[name].get_default(call_default_factory=True)]
        if self.sources and both:
            raise ConfigError(
                f"both `sources` and `{both[0]}` are set",
                f"with several sources each has its own: `sources.{next(iter(self.sources))}.{both[0]}`",
            )
        return self

    @model_validator(mode="after")
    def _keys_of_the_form(self) -> Self:
        if self.form == "padded" and self.documents == "separate":
            raise ConfigError(
                '`documents` = "separate" is for `form` = "packed"; a padded sample is one document anyway'
            )
        for key in ("pad_to_multiple_of", "group_by_length"):
            if self.form == "packed" and getattr(self, key) is not None:
                raise ConfigError(f'`{key}` is for `form` = "padded"; packed samples are all of one length')
        if self.group_by_length is not None and self.pad_to_multiple_of is None:
            raise ConfigError(
                "`group_by_length` has no effect without `pad_to_multiple_of`: all batches are as wide as "
                "`sequence_length`",
                "set it, to 64 for instance",
            )
        return self

    @model_validator(mode="after")
    def _epochs_to_fill(self) -> Self:
        has_epochs = len(self.named_sources) == 1 and all(
            source.repeat and not source.streaming for source in self.named_sources.values()
        )
        if not self.drop_last and not has_epochs:
            raise ConfigError(
                "`drop_last` = false fills up the last batch of an epoch, and several sources, or one that is streamed "
                "or does not repeat, have no epochs",
                "leave it out",
            )
        return self

    @model_validator(mode="after")
    def _what_streams(self) -> Self:
        for name, source in self.named_sources.items():
            if not source.streaming:
                continue
            if self.has_weights:
                raise ConfigError(
                    "`weight_key` is set, and samples of a source with `streaming` have no weights",
                    "leave out one of them",
                )
            key = self.key_of(name, "streaming").removeprefix("data.")
            if self.tokenizer.path is None:
                raise ConfigError(
                    f"`{key}` needs `tokenizer.path`: a tokenizer cannot be trained on what is only read once"
                )
            if isinstance(source.validation, float) and source.validation:
                raise ConfigError(f"`{key}` cannot keep documents aside", "set `validation` to files of its own")
            if not source.repeat:
                raise ConfigError(
                    f"`{key}` and `repeat` = false: the end of a stream is not known in advance",
                    "leave `repeat` out, `steps` ends the run",
                )
            if self.group_by_length is not None:
                raise ConfigError(f"`group_by_length` needs the lengths of all samples, which `{key}` does not have")
        return self
