"""The run file: everything that is not the plan."""

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from meshtrain.config.batch_ramp import NO_RAMP, BatchRampConfig
from meshtrain.config.combinations import check_combinations
from meshtrain.config.data import DataConfig
from meshtrain.config.distillation import NO_DISTILLATION, DistillationConfig
from meshtrain.config.ema import NO_EMA, EmaConfig
from meshtrain.config.evaluation import GenerateConfig, TasksConfig
from meshtrain.config.lora import NO_LORA, LoraConfig
from meshtrain.config.objective import ObjectiveConfig
from meshtrain.config.optimizer import LearningRateConfig, OptimizerConfig
from meshtrain.config.path_rules import PathText
from meshtrain.config.plan import ParallelPlan
from meshtrain.config.preference import NO_PREFERENCE, PreferenceConfig
from meshtrain.config.settings import LARGEST, Count, NotNegative, Positive, Seconds, Settings
from meshtrain.errors import ConfigError

MOST_PROFILED_STEPS = 20
TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]
_DURATION = re.compile(r"(?:([0-9]{1,9})h)?(?:([0-9]{1,9})m)?(?:([0-9]{1,9})s)?")


def duration_seconds(text: str) -> int:
    """Read a duration such as `3h30m`, `90m` or `45s`.

    Raises:
        ConfigError: if it is none.
    """
    match = _DURATION.fullmatch(text)
    if match is None or not text:
        raise ConfigError(f'expected a duration such as "3h30m", "90m" or "45s", found {text[:60]!r}')
    hours, minutes, seconds = (int(number or 0) for number in match.groups())
    return hours * 3600 + minutes * 60 + seconds


def _checked_duration(text: str) -> str:
    duration_seconds(text)
    return text


class ModelConfig(Settings):
    """The model: an existing one (`path`), or a new one (`type` and `config`)."""

    path: PathText | None = None
    """A local Hugging Face directory, a checkpoint (a `step-N` directory), or a hub id. A local
    path is relative to the run file."""
    type: str | None = None
    """A Hugging Face model type, such as `gpt2` or `llama`, for a new model."""
    config: dict[str, Any] = {}
    """Values of the Hugging Face configuration that differ from the defaults of `type`, or from
    those of `path`."""
    weights: Literal["random", "pretrained"] = "random"
    """`pretrained` starts from the weights at `path`. `random` draws new ones from `seed`, the
    same bits on every mesh."""
    enlarge_vocabulary: bool = False
    """Add rows to embedding and head for tokens that the tokenizer has but the pretrained model
    lacks, for example after `data.tokenizer.special_tokens`. A new row is the mean of the other
    rows."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Attention implementation of transformers."""
    trust_remote_code: bool = False
    """Allow Python code that comes with the model to run."""
    prove_unknown_class: bool = True
    """Prove the plan on a tiny copy of the model before the first run of a class that no
    shipped family is written for. The result is kept, so each plan and class is proven once."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.path is None) == (self.type is None):
            found = "neither `path` nor `type` is set" if self.path is None else "`path` and `type` are both set"
            raise ConfigError(found, "set one: where the model is, or its type")
        if self.weights == "pretrained" and self.path is None:
            raise ConfigError('`weights` = "pretrained" needs `path`, the directory or hub id that holds them')
        if self.enlarge_vocabulary and self.weights != "pretrained":
            raise ConfigError(
                "`enlarge_vocabulary` = true adds rows to pretrained weights",
                'set `weights` = "pretrained", or for a new model `config` = { vocab_size = ... }',
            )
        if self.path is not None and "://" in self.path:
            raise ConfigError(
                f"`path` = {self.path!r} is a URL", "copy the model to a directory, and set `path` to that"
            )
        return self


class RouterConfig(Settings):
    """How the routers of a mixture of experts are trained, besides the auxiliary loss for which the
    Hugging Face configuration asks (`output_router_logits`)."""

    z_loss: Annotated[float, Field(ge=0.0, le=10.0, allow_inf_nan=False)] = 0.0
    """Factor of the z-loss, which keeps the logits of routers small: the mean of the square of the
    logarithm of the sum of their exponentials. 0: none."""
    bias_update_rate: Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)] = 0.0
    """After each step, the bias with which a router selects an expert rises by this number if the
    expert got fewer tokens than the mean, and falls if it got more. So the use of the experts is
    balanced without a loss. It is for classes with such a bias, for example DeepSeek-V3. 0: the
    biases stay."""


STOCK_ROUTER = RouterConfig()


class EvaluationConfig(Settings):
    """The loss on the validation data during training."""

    every: Count | None = None
    """Number of steps between evaluations. Left out: only at the end."""
    max_batches: Count | None = None
    """Number of global batches per evaluation, and per source if there are several. Left out:
    all of them."""


class CheckpointConfig(Settings):
    """Checkpoints, from which a run resumes."""

    directory: PathText | None = None
    """Where checkpoints are written: a directory (relative to the run file), or a URL that
    fsspec knows, such as `s3://bucket/run`. Left out: `checkpoints` in the run directory. Every
    machine must see the same directory."""
    every: Count | None = None
    """Number of steps between checkpoints. Left out: only at the end."""
    keep: NotNegative = 3
    """Number of the newest checkpoints that are kept. 0: none is written, also not at the end, and
    the run cannot be resumed."""
    keep_every: Count | None = None
    """Checkpoints whose step is a multiple of this number of steps are kept as well, forever."""
    keep_best: NotNegative = 0
    """Number of checkpoints with the lowest evaluation loss that are kept as well."""
    in_background: bool = False
    """Continue training while a copy of the state in host memory is written. The copy needs
    host memory."""

    @model_validator(mode="after")
    def _writes_what_it_keeps(self) -> Self:
        asked = [name for name in ("every", "keep_every", "keep_best", "in_background") if getattr(self, name)]
        if self.keep == 0 and asked:
            raise ConfigError(f"`keep` = 0 writes no checkpoint, but `{asked[0]}` is set", "leave one of them out")
        return self


class LoggingConfig(Settings):
    """What is shown on the screen, and which trackers get the metrics."""

    every: Count = 1
    """Number of steps between lines where no progress bar can be drawn, such as in a log file."""
    trackers: list[TrackerName] = ["tensorboard"]
    """Trackers that get the metrics, besides `metrics.jsonl`: `tensorboard` (events in the run
    directory), `wandb`, `mlflow` and `trackio`. All but the first need a package, which the extra
    of the same name installs. []: none."""

    layer_norms: bool = False
    """Also write the gradient norm of each layer, and of each module outside of layers, as
    `grad_norm/NAME`."""
    expert_tokens: bool = False
    """Also write the tokens of each expert, as `expert_tokens/NAME`."""
    noise_scale_every: Count | None = None
    """Number of steps between measurements of the noise scale of the gradients, which says how many
    sequences a batch needs. Each one computes a part of the batch once more. Left out: none."""

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        if repeated := [name for name in dict.fromkeys(self.trackers) if self.trackers.count(name) > 1]:
            raise ConfigError(f"`trackers` names {', '.join(repeated)} more than once", "name each once")
        return self


class WatchdogConfig(Settings):
    """When the watchdog reports a hang. The run then ends, and reports which process hangs and
    what the others were doing."""

    first_step_seconds: Seconds = 1800.0
    """Longest time in seconds for the start, for each of the first three steps, for an
    evaluation and for a checkpoint."""
    minimum_seconds: Seconds = 60.0
    """Longest time in seconds for any other step, unless `factor` allows more."""
    factor: Annotated[float, Field(ge=2.0, le=LARGEST, allow_inf_nan=False)] = 10.0
    """A step may also take this many times the median of the latest steps, if that is longer
    than `minimum_seconds`."""


class BadStepsConfig(Settings):
    """What happens after a bad step: its loss or gradient norm is not finite, or is a spike."""

    policy: Literal["stop", "skip", "rewind"] = "stop"
    """`stop` ends the run. `skip` leaves the parameters as they are and continues with the next
    batch. `rewind` goes back to the newest checkpoint, and continues from there without the
    batch of that step."""
    spike_z_score: Positive | None = None
    """A loss or norm this many robust standard deviations above the median is a spike. Left
    out: nothing is a spike."""
    window: Annotated[int, Field(ge=10, le=LARGEST)] = 100
    """Number of good steps over which the median is taken. Before the run has that many good
    steps, nothing is a spike."""
    max_skips: Count = 10
    """`skip` ends the run when more steps than this are bad in a row."""
    max_rewinds: Count = 3
    """`rewind` ends the run when it would go back more often than this number of times,
    restarts included."""


class ProfileConfig(Settings):
    """A few steps that are measured: their timeline, a trace, memory and messages of each process.
    The files are in `profile` of the run directory."""

    steps: list[Count] | None = None
    """First and last step of the profile, counted from 1, such as [20, 22]. The last one is traced,
    the others are timed. Left out: nothing is measured."""

    @model_validator(mode="after")
    def _few_later_steps(self) -> Self:
        if self.steps is None:
            return self
        if len(self.steps) != 2:
            raise ConfigError(
                f"`steps` = {self.steps}, but a profile has a first and a last step", "write them as [20, 22]"
            )
        first, last = self.steps
        if first < 2:
            raise ConfigError(
                f"`steps` = {self.steps}, but the first step builds and compiles, so its times say nothing about the "
                "others",
                "begin with step 2 or later",
            )
        if not first < last < first + MOST_PROFILED_STEPS:
            raise ConfigError(
                f"`steps` = {self.steps} must be 2 to {MOST_PROFILED_STEPS} steps: the last one is traced, which "
                "takes time, and those before it are timed",
                f"write [{first}, {first + 2}]",
            )
        return self


class RunConfig(Settings):
    """A training run, in one TOML file."""

    run_directory: PathText
    """Directory for checkpoints, metrics and the resolved configuration (relative to the run
    file)."""
    seed: int = 0
    """Seed of the initial weights, of the order of the samples and of dropout. Weights and order
    are the same on every mesh."""
    steps: Count | None = None
    """Length of the run in optimizer steps. Set this or `epochs`."""
    epochs: Count | None = None
    """Length of the run in passes over the training data. Set this or `steps`."""
    machine: PathText | None = None
    """Machine for which memory and time of a step are predicted: the name of a shipped description,
    such as "h100-80gb", a machine file (relative to the run file), or "cpu". The prediction is
    shown at the start, and compared at the end with what was measured. Left out: the GPU of the
    run, if its description is shipped. "none": nothing is predicted."""
    stop_after: Annotated[str, AfterValidator(_checked_duration)] | None = None
    """Save and stop at the first step that ends this long after the start, such as "3h30m",
    "90m" or "45s". Use it in queues with a time limit. Left out: never."""
    global_batch_size: Count
    """Number of sequences per optimizer step, over all processes. A pair of `preference.loss`
    counts once."""
    micro_batch_size: Count = 1
    """Number of sequences that pass through the model at once. Gradient accumulation follows
    from it and is printed. A pair of `preference.loss` counts once, although it has two rows."""
    batch_ramp: BatchRampConfig = NO_RAMP
    model: ModelConfig
    data: DataConfig = DataConfig()
    lora: LoraConfig = NO_LORA
    optimizer: OptimizerConfig = OptimizerConfig()
    learning_rate: LearningRateConfig = LearningRateConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    preference: PreferenceConfig = NO_PREFERENCE
    distillation: DistillationConfig = NO_DISTILLATION
    ema: EmaConfig = NO_EMA
    router: RouterConfig = STOCK_ROUTER
    evaluation: EvaluationConfig = EvaluationConfig()
    tasks: TasksConfig = TasksConfig()
    generate: GenerateConfig = GenerateConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    bad_steps: BadStepsConfig = BadStepsConfig()
    profile: ProfileConfig = ProfileConfig()
    self_checks: bool = True
    """Check at the start and after a resume that all processes hold the parameters, inputs and
    gradients that they must. A checksum of the parameters is written down; it is the same on
    every mesh."""
    plan: ParallelPlan = ParallelPlan()
    """How the model is parallelized: `plan = "name"`, or a table with `extends = "name"` and
    the keys that differ."""

    def kept_bytes(self, width: int, shape: Sequence[int], full: Sequence[int], *, of_matrix: bool) -> int:
        """Return the bytes that are kept between steps for a part of a parameter, besides it.

        Args:
            width: bytes of a number of the parameter.
            shape: of the part.
            full: shape of the parameter.
            of_matrix: whether it belongs to a matrix of the layers.
        """
        of_average = self.ema.bytes_per_number(width) * math.prod(shape)
        return self.optimizer.state_bytes(width, shape, full, of_matrix=of_matrix) + of_average

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            found = "neither `steps` nor `epochs` is set" if self.steps is None else "`steps` and `epochs` are both set"
            raise ConfigError(found, "set one")
        return self

    @model_validator(mode="after")
    def _tables_that_go_together(self) -> Self:
        check_combinations(self)
        return self

    @model_validator(mode="after")
    def _profile_within_run(self) -> Self:
        profiled = self.profile.steps
        if profiled is not None and self.steps is not None and profiled[1] > self.steps:
            raise ConfigError(
                f"`profile.steps` = {profiled}, but the run ends after step {self.steps}",
                "choose earlier steps, or leave the key out",
            )
        return self

    @model_validator(mode="after")
    def _local_run_directory(self) -> Self:
        if "://" in self.run_directory:
            raise ConfigError(
                f"`run_directory` = {self.run_directory!r} is a URL, but metrics are added to it line by line",
                "set it to a local directory, and `checkpoint.directory` to the URL",
            )
        return self

    @model_validator(mode="after")
    def _tokens_to_enlarge_by(self) -> Self:
        if self.model.enlarge_vocabulary and self.data.tokenizer.path is None:
            raise ConfigError(
                "`model.enlarge_vocabulary` = true, but `data.tokenizer.path`, which defines the number of "
                "tokens, is not set",
                "name the tokenizer of the model",
            )
        return self

    @model_validator(mode="after")
    def _rewind_to_something(self) -> Self:
        if self.bad_steps.policy == "rewind" and self.checkpoint.every is None:
            raise ConfigError(
                '`bad_steps.policy` = "rewind" goes back to a checkpoint, and without `checkpoint.every` none is '
                "saved before the end",
                "set it",
            )
        return self

    @model_validator(mode="after")
    def _best_of_evaluated(self) -> Self:
        saved, evaluated = self.checkpoint.every, self.evaluation.every
        if self.checkpoint.keep_best and (saved is None or evaluated is None or saved % evaluated):
            raise ConfigError(
                f"`checkpoint.keep_best` = {self.checkpoint.keep_best} needs an evaluation at every checkpoint, but "
                f"`checkpoint.every` is {saved or 'not set'} and `evaluation.every` {evaluated or 'not set'}",
                "set both, the first to a multiple of the second",
            )
        return self
