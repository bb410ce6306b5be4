"""The manifest of a checkpoint: what its tensors belong to, and what each of its files must be."""

import json
from typing import Literal

import xxhash
from pydantic import Field, ValidationError

from meshtrain.checkpoint.storage.directory import MANIFEST_NAME, USE_ANOTHER, step_named
from meshtrain.checkpoint.storage.location import SavedFile, write_hashed
from meshtrain.config.batch_ramp import NO_RAMP, BatchRampConfig
from meshtrain.config.lora import LoraConfig
from meshtrain.config.optimizer import OptimizerName
from meshtrain.config.settings import Settings
from meshtrain.errors import CheckpointError, Problem, reason_of
from meshtrain.models.fused import FusedParameter
from meshtrain.runtime.location import Location, errors_of

FORMAT_VERSION = 2
SavedDtype = Literal["float64", "float32", "bfloat16", "float16"]


class FormatError(CheckpointError):
    """A checkpoint of another version of meshtrain: possibly intact, but not readable here."""


class SavedLossScale(Settings):
    """State of dynamic loss scaling."""

    value: float
    """Scale of the next step."""
    growth_steps: int
    """Steps without an overflow since the last overflow or growth."""
    hysteresis_left: int
    """Overflows that are left until one lowers the scale."""


class SavedHistory(Settings):
    """What a run remembers about its steps."""

    bad_steps: int = 0
    """Number of bad steps that were skipped."""
    bad_in_a_row: int = 0
    """Number of bad steps since the last good one."""
    left_out: tuple[int, ...] = ()
    """Positions in the data, in batches from 0, that rewinds have left out."""
    losses: tuple[float, ...] = ()
    """Losses of the latest good steps. The run recognizes a spike by them."""
    norms: tuple[float, ...] = ()
    """Gradient norms of the same steps."""


class SavedNoise(Settings):
    """Averages of what is measured of the noise of gradients."""

    variance: float = 0.0
    """Variance of the gradient of one sequence, summed over all numbers."""
    squared_norm: float = 0.0
    """Squared norm of the true gradient."""


class SavedGroup(Settings):
    """A group of parameters of an optimizer."""

    options: str
    """JSON: what the group holds beside its parameters, such as the learning rate."""
    parameters: tuple[str, ...]
    """FQNs of the parameters, sorted."""


class SavedOptimizer(Settings):
    """The optimizer of a user's own program."""

    name: str
    """Name of the class, such as `AdamW`."""
    groups: tuple[SavedGroup, ...]
    """Parameter groups, in the order in which the optimizer received them."""
    scalars: tuple[str, ...] = ("step",)
    """States that are one number for each parameter. All others are laid out like the parameter."""
    numbers: tuple[str, ...] = ()
    """Those of the scalars that are Python numbers instead of tensors."""


class SavedBase(Settings):
    """The frozen model that adapters were trained on. A checkpoint does not hold it."""

    lora: LoraConfig
    """The adapters."""
    path: str
    """The Hugging Face directory, or hub id, that it was loaded from."""
    checksum: str
    """Checksum of its parameters, as the run has them; it is the same on every mesh."""


class SavedReference(Settings):
    """The reference that a run compares answers with."""

    model: str
    """Hash of the weights and the configuration that the run started from, the same on every
    mesh."""
    name: str
    """Name of the file in the cache with the log-probabilities of all answers."""


class SavedTeacher(Settings):
    """The teacher that a run learns from. A checkpoint does not hold it."""

    path: str
    """The Hugging Face directory that it was loaded from."""
    dtype: SavedDtype
    """Number format of its parameters in the run."""
    checksum: str
    """Checksum of these parameters; it is the same on every mesh."""


class Manifest(Settings):
    """What the tensors of a checkpoint belong to."""

    format_version: int = FORMAT_VERSION
    """Format version of the directory. A checkpoint of another version is refused."""
    step: int
    """Number of optimizer steps done."""
    skipped_steps: int = 0
    """Number of these steps that changed nothing, because they were bad or overflowed.

    AdamW and the learning rate do not count them.
    """
    optimizer_name: OptimizerName = "adamw"
    """Name of the optimizer of a run, as its configuration has it."""
    loss_scale: SavedLossScale | None = None
    """Loss scale of a run in float16."""
    history: SavedHistory | None = None
    """History of a run that met bad steps or watches for spikes."""
    noise: SavedNoise | None = None
    """Noise of the gradients, of a run that measures it."""
    seed: int
    """Seed of the run. With the step, it determines the order of the data and every random draw."""
    global_batch_size: int
    """Sequences per optimizer step. With the step, it determines the position in the data."""
    batch_ramp: BatchRampConfig = NO_RAMP
    """Smaller batches of the first steps."""
    mesh: dict[str, int]
    """Axis -> degree of the mesh that saved the checkpoint. Any other mesh can load it."""
    plan_hash: str
    """Hash of the resolved plan."""
    model_type: str
    """Hugging Face's `model_type`."""
    architecture: str
    """Name of the stock class, such as `GPT2LMHeadModel`."""
    data_identity: str
    """Hash that identifies the data."""
    streams: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    """Streamed source -> position from which it is read next."""
    dtype: SavedDtype = "float32"
    """Number format of the parameters in training."""
    dtypes: dict[str, SavedDtype] = Field(default_factory=dict)
    """Stock FQN -> number format in which it is exported, whatever that of the others."""
    fused: tuple[FusedParameter, ...] = ()
    """Stock parameters that are kept in parts."""
    base: SavedBase | None = None
    """What the adapters were trained on, for a checkpoint that holds adapters alone."""
    reference: SavedReference | None = None
    """The reference of a run on judged answers whose loss needs one."""
    teacher: SavedTeacher | None = None
    """The teacher of a run with distillation."""
    tied: dict[str, str] = Field(default_factory=dict)
    """Stock FQN of a tied head -> FQN under which the weight is kept."""
    evaluation_loss: float | None = None
    """Mean loss on the validation data after this step, in nats, if there was an evaluation."""
    order: dict[str, bool] = Field(default_factory=dict)
    """Keys and values of the run's data that decide the order of samples, beside seed and batch."""
    optimizer: SavedOptimizer | None = None
    """What the optimizer's tensors do not hold, of a program that is not a run."""
    forward_passes: int = 0
    """Forward passes in training, of a program that is not a run.

    Its dropout is a function of this number, as the dropout of a run is a function of the step.
    """
    rotary_length: int = 0
    """Tokens of the sequence that dynamic rotary frequencies have grown for; 0: initial ones."""
    values: str = "{}"
    """JSON: what a user's own program or hook restores from the checkpoint."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Library -> version that saved the checkpoint."""
    files: dict[str, SavedFile] = Field(default_factory=dict)
    """Name -> what the file must be, for every file except the manifest."""
    checksum: str = ""
    """Checksum of this manifest."""


def read_manifest(checkpoint: Location) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        FormatError: if another version of meshtrain wrote it.
        CheckpointError: if it is missing or broken.
    """
    path = checkpoint / MANIFEST_NAME
    try:
        text = path.read_bytes()
    except errors_of(path) as error:
        raise CheckpointError(f"{checkpoint} is not a checkpoint: cannot read {path}: {reason_of(error)}") from error
    try:
        version = json.loads(text)["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(Problem(f"{path} is broken ({error})", USE_ANOTHER)) from error
    if version != FORMAT_VERSION:
        raise FormatError(
            Problem(
                f"{path} has format version {version}, but this meshtrain reads {FORMAT_VERSION}",
                "use the meshtrain that saved it",
            )
        )
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()]
        raise CheckpointError(Problem(f"{path} is broken ({'; '.join(wrong)})", USE_ANOTHER)) from error
    # A field that the writer did not know was not part of its checksum.
    if manifest.checksum != _checksum(manifest, is_read=True):
        raise CheckpointError(Problem(f"{path} is broken (its checksum does not match its content)", USE_ANOTHER))
    if step_named(checkpoint) not in (None, manifest.step):
        raise CheckpointError(Problem(f"{path} is that of step {manifest.step}", USE_ANOTHER))
    return manifest


def write_manifest(checkpoint: Location, manifest: Manifest) -> None:
    """Write the manifest of a checkpoint. It must be the last of its files."""
    checked = manifest.model_copy(update={"checksum": _checksum(manifest)})
    with write_hashed(checkpoint / MANIFEST_NAME, lambda _: None) as file:
        file.write((checked.model_dump_json(indent=2) + "\n").encode())


def _checksum(manifest: Manifest, *, is_read: bool = False) -> str:
    return xxhash.xxh3_128_hexdigest(manifest.model_dump_json(exclude={"checksum"}, exclude_unset=is_read).encode())
