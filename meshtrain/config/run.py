"""The run file: everything that is not the plan."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from meshtrain.config.data import DataConfig
from meshtrain.config.path_rules import PathText
from meshtrain.config.plan import ParallelPlan
from meshtrain.config.words import LARGEST, Count, Fraction, NotNegative, Positive, Seconds, Words

ScheduleName = Literal[
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
]
_DURATION = re.compile(r"(?:([0-9]{1,9})h)?(?:([0-9]{1,9})m)?(?:([0-9]{1,9})s)?")


def duration_seconds(text: str) -> int:
    """Read a duration such as `3h30m`, `90m` or `45s`.

    Raises:
        ValueError: if it is none.
    """
    match = _DURATION.fullmatch(text)
    if match is None or not text:
        raise ValueError(f'expected a duration such as "3h30m", "90m" or "45s", found {text[:60]!r}')
    hours, minutes, seconds = (int(number or 0) for number in match.groups())
    return hours * 3600 + minutes * 60 + seconds


def _checked_duration(text: str) -> str:
    duration_seconds(text)
    return text


class ModelConfig(Words):
    """Which model: an existing one (`path`), or a new one (`type` and `config`)."""

    path: PathText | None = None
    """A local Hugging Face directory or a checkpoint, a `step-N` directory (relative to the run file), or a hub id."""
    type: str | None = None
    """A Hugging Face model type (`gpt2`, `llama`, ...) for a model described here."""
    config: dict[str, Any] = {}
    """Values of the Hugging Face configuration that differ from its defaults (or from `path`)."""
    weights: Literal["random", "pretrained"] = "random"
    """`pretrained`: start from the weights that `path` holds."""
    enlarge_vocabulary: bool = False
    """Where the tokenizer (`data.tokenizer.path`) has more tokens than the pretrained model, as after
    `data.tokenizer.special_tokens`: give the new ones rows in embedding and head, the mean of the others."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """The attention implementation of transformers."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    prove_unknown_class: bool = True
    """Prove the plan on a tiny copy before the first run of a class that no shipped family is written for; kept."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.path is None) == (self.type is None):
            found = "neither" if self.path is None else "both"
            raise ValueError(f"{found} of `path` and `type` given; give one: where the model is, or its type")
        if self.weights == "pretrained" and self.path is None:
            raise ValueError('`weights` = "pretrained" needs `path`, the directory or hub id that holds them')
        if self.enlarge_vocabulary and self.weights != "pretrained":
            raise ValueError(
                '`enlarge_vocabulary` = true adds rows to pretrained weights; set `weights` = "pretrained", or for a '
                "new model `config` = { vocab_size = ... }"
            )
        if self.path is not None and "://" in self.path:
            raise ValueError(f"`path` = {self.path!r} is a URL; copy the model to a directory, and give that")
        return self


class OptimizerConfig(Words):
    """AdamW."""

    learning_rate: Annotated[float, Field(gt=0.0, le=10.0, allow_inf_nan=False)] = 3e-4
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    epsilon: Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0.0, le=10.0, allow_inf_nan=False)] = 0.1
    """Applies to matrices only: norms and biases are left out."""
    max_gradient_norm: Annotated[float, Field(gt=0.0)] = 1.0
    """Gradients are scaled down to this norm; `inf`: never."""


class LearningRateConfig(Words):
    """How the learning rate changes over the run: a schedule of transformers.get_scheduler."""

    name: ScheduleName = "cosine"
    warmup_steps: NotNegative = 0
    arguments: dict[str, Any] = {}
    """Further arguments of the schedule, under transformers' own names (`num_cycles`, `min_lr_rate`, ...)."""


class EvaluationConfig(Words):
    """Loss on the validation data while training."""

    every: Count | None = None
    """Steps between evaluations; left out: only at the end."""
    max_batches: Count | None = None
    """Global batches per evaluation, and per source if there are several; left out: all of them."""


class CheckpointConfig(Words):
    """Saving, so that the run can go on after a stop."""

    directory: PathText | None = None
    """Where they go: a directory (relative to the run file) or a URL that fsspec knows (`s3://bucket/run`, `gs://...`);
    left out: `checkpoints` in the run directory. Every machine must see the same one."""
    every: Count | None = None
    """Steps between checkpoints; left out: only at the end."""
    keep: Count = 3
    """The newest so many are kept."""
    keep_every: Count | None = None
    """Also those whose step is a multiple of this are kept, for ever."""
    keep_best: NotNegative = 0
    """Also so many of those with the lowest evaluation loss are kept."""
    in_background: bool = False
    """Train on while a copy of the state in host memory is written; needs memory for that copy."""


class LoggingConfig(Words):
    """What is shown and written."""

    every: Count = 1
    """Steps between lines on a terminal that cannot draw a progress bar."""
    tensorboard: bool = True
    """Write TensorBoard events into the run directory."""


class WatchdogConfig(Words):
    """When somebody is called stuck: the run then ends, and says who it is and what all the others were doing."""

    first_step_seconds: Seconds = 1800.0
    """The longest that the start, each of the first three steps, an evaluation or a checkpoint may take."""
    minimum_seconds: Seconds = 60.0
    """The longest that any other step may take,"""
    factor: Annotated[float, Field(ge=2.0, le=LARGEST, allow_inf_nan=False)] = 10.0
    """or so many times the median of the latest steps, whichever is longer."""


class BadStepsConfig(Words):
    """What to do about a step whose loss or gradient norm is not finite, or a spike."""

    policy: Literal["stop", "skip", "rewind"] = "stop"
    """`stop` ends the run; `skip` leaves the parameters as they are; `rewind` goes back to the newest checkpoint, and
    on from there without the batch of that step."""
    spike_z_score: Positive | None = None
    """A loss or norm so many robust standard deviations above the median is a spike; left out: nothing is."""
    window: Annotated[int, Field(ge=10, le=LARGEST)] = 100
    """Good steps that the median is taken over; before there were so many, nothing is a spike."""
    max_skips: Count = 10
    """`skip` ends the run when more steps than these are bad in a row."""
    max_rewinds: Count = 3
    """`rewind` ends the run when it would go back more often than this, restarts included."""


class RunConfig(Words):
    """A training run. One TOML file."""

    run_directory: PathText
    """Where checkpoints, metrics and the resolved configuration go (relative to the run file)."""
    seed: int = 0
    steps: Count | None = None
    """The length of the run in optimizer steps; or `epochs`."""
    epochs: Count | None = None
    """The length of the run in passes over the training data; or `steps`."""
    stop_after: Annotated[str, AfterValidator(_checked_duration)] | None = None
    """Save and stop at the first step that ends so long after the start, such as "3h30m", for queues with a limit."""
    global_batch_size: Count
    """Sequences per optimizer step, over all processes."""
    micro_batch_size: Count = 1
    """Sequences that pass through the model at once."""
    model: ModelConfig
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    learning_rate: LearningRateConfig = LearningRateConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    bad_steps: BadStepsConfig = BadStepsConfig()
    self_checks: bool = True
    """At the start, and after a resume, check that all processes hold the parameters, inputs and gradients that they
    must, and write down a checksum of the parameters that is the same on every mesh."""
    plan: ParallelPlan = ParallelPlan()
    """How the model is parallelised: `plan = "name"` or `[plan] extends = "name"` and keys that differ."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            found = "neither" if self.steps is None else "both"
            raise ValueError(f"{found} of `steps` and `epochs` given; give one")
        return self

    @model_validator(mode="after")
    def _local_run_directory(self) -> Self:
        if "://" in self.run_directory:
            raise ValueError(
                f"`run_directory` = {self.run_directory!r} is a URL, but metrics are added to it line by line; give a "
                "local directory, and the URL as `checkpoint.directory`"
            )
        return self

    @model_validator(mode="after")
    def _tokens_to_enlarge_by(self) -> Self:
        if self.model.enlarge_vocabulary and self.data.tokenizer.path is None:
            raise ValueError(
                "`model.enlarge_vocabulary` = true, but there is no `data.tokenizer.path` that says how many tokens "
                "there are; name the tokenizer of the model"
            )
        return self

    @model_validator(mode="after")
    def _rewind_to_something(self) -> Self:
        if self.bad_steps.policy == "rewind" and self.checkpoint.every is None:
            raise ValueError(
                '`bad_steps.policy` = "rewind" goes back to a checkpoint, and without `checkpoint.every` there is none '
                "before the end; set it"
            )
        return self

    @model_validator(mode="after")
    def _best_of_evaluated(self) -> Self:
        saved, evaluated = self.checkpoint.every, self.evaluation.every
        if self.checkpoint.keep_best and (saved is None or evaluated is None or saved % evaluated):
            raise ValueError(
                f"`checkpoint.keep_best` = {self.checkpoint.keep_best} needs an evaluation at every checkpoint, but "
                f"`checkpoint.every` is {saved or 'not set'} and `evaluation.every` {evaluated or 'not set'}; set "
                "both, the first to a multiple of the second"
            )
        return self
