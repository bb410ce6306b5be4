"""What a checkpoint says of itself: what its tensors belong to, and what each of its files must be."""

import json
from typing import Literal

import xxhash
from pydantic import Field, ValidationError

from meshtrain.checkpoint.storage.directory import MANIFEST_NAME, USE_ANOTHER, step_named
from meshtrain.checkpoint.storage.location import Location, SavedFile, errors_of, reason_of, write_hashed
from meshtrain.config.settings import Settings
from meshtrain.errors import CheckpointError, Problem
from meshtrain.models.fused import FusedParameter

FORMAT_VERSION = 2
Dtype = Literal["float64", "float32", "bfloat16", "float16"]


class FormatError(CheckpointError):
    """A checkpoint of another version of meshtrain: whole perhaps, but not for this one."""


class SavedLossScale(Settings):
    """Where dynamic loss scaling stood."""

    value: float
    """The scale of the next step."""
    growth_steps: int
    """Steps without an overflow since the last overflow or growth."""
    hysteresis_left: int
    """Overflows until one lowers the scale."""


class SavedHistory(Settings):
    """What a run remembers of its steps."""

    bad_steps: int = 0
    """Bad steps that were skipped."""
    bad_in_a_row: int = 0
    """Bad steps since the last good one."""
    left_out: tuple[int, ...] = ()
    """Places in the data, in batches from 0, that rewinds have left out."""
    losses: tuple[float, ...] = ()
    """Of the latest good steps, to tell a spike by."""
    norms: tuple[float, ...] = ()
    """Gradient norms of the same steps."""


class SavedGroup(Settings):
    """A group of parameters of an optimizer."""

    options: str
    """JSON: what the group has beside its parameters, such as the learning rate."""
    parameters: tuple[str, ...]
    """Their FQNs, sorted."""


class SavedOptimizer(Settings):
    """The optimizer of a program of its own; a run's is known from its configuration."""

    name: str
    """The class, such as `AdamW`."""
    groups: tuple[SavedGroup, ...]
    """As they were given to it."""
    scalars: tuple[str, ...] = ("step",)
    """The states that are one number for each parameter; all others are laid out as the parameter."""
    numbers: tuple[str, ...] = ()
    """Those of the scalars that are numbers of Python and no tensors."""


class Manifest(Settings):
    """What the tensors of a checkpoint belong to."""

    format_version: int = FORMAT_VERSION
    """Of the directory; a newer one is refused."""
    step: int
    """Optimizer steps done."""
    skipped_steps: int = 0
    """How many of them changed nothing, bad or overflowed: AdamW and the learning rate do not count them."""
    loss_scale: SavedLossScale | None = None
    """Of a run in float16."""
    history: SavedHistory | None = None
    """Of a run that met bad steps, or watches for spikes."""
    seed: int
    """Of the run: with the step, the order of the data and every random draw."""
    global_batch_size: int
    """Sequences per optimizer step: with the step, the place in the data."""
    mesh: dict[str, int]
    """Axis -> degree of the mesh that saved it; any other can load it."""
    plan_hash: str
    """Of the resolved plan."""
    model_type: str
    """Hugging Face's `model_type`."""
    architecture: str
    """The stock class, such as `GPT2LMHeadModel`."""
    data_identity: str
    """Hash of what makes the data this one."""
    streams: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    """Source -> where it is to be read on from, of those that are streamed."""
    dtype: Dtype = "float32"
    """The number format of the parameters in training."""
    dtypes: dict[str, Dtype] = Field(default_factory=dict)
    """Stock FQN -> number format in which it is exported, whatever that of the others."""
    fused: tuple[FusedParameter, ...] = ()
    """The stock parameters that are kept in parts."""
    tied: dict[str, str] = Field(default_factory=dict)
    """Stock FQN of a tied head -> the FQN under which the weight is kept."""
    evaluation_loss: float | None = None
    """Mean loss on the validation data after this step, in nats, if there was an evaluation."""
    order: dict[str, bool] = Field(default_factory=dict)
    """What decides the order of the samples beside seed and batch: the keys of the run's data and their values."""
    optimizer: SavedOptimizer | None = None
    """What its tensors do not say, of a program that is no run."""
    forward_passes: int = 0
    """In training, of a program that is no run: what its dropout is a function of, as that of a run is of the step."""
    rotary_length: int = 0
    """Tokens of the sequence that dynamic rotary frequencies have grown for; 0: they are as in the beginning."""
    values: str = "{}"
    """JSON: what a person's own program, or own hook, wants back."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Library -> version that saved it."""
    files: dict[str, SavedFile] = Field(default_factory=dict)
    """Name -> what the file must be, for every file but this one."""
    checksum: str = ""
    """Of this manifest."""


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
        raise CheckpointError(f"{checkpoint} is no checkpoint: cannot read {path}: {reason_of(error)}") from error
    try:
        version = json.loads(text)["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(Problem(f"{path} is broken ({error})", USE_ANOTHER)) from error
    if version != FORMAT_VERSION:
        raise FormatError(
            f"{path} has format version {version}, this meshtrain reads {FORMAT_VERSION}; "
            "use the meshtrain that saved it"
        )
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()]
        raise CheckpointError(Problem(f"{path} is broken ({'; '.join(wrong)})", USE_ANOTHER)) from error
    # A field that the writer did not know was not part of its checksum.
    if manifest.checksum != _checksum(manifest, is_read=True):
        raise CheckpointError(Problem(f"{path} is broken (its checksum is that of another content)", USE_ANOTHER))
    if step_named(checkpoint) not in (None, manifest.step):
        raise CheckpointError(Problem(f"{path} is that of step {manifest.step}", USE_ANOTHER))
    return manifest


def write_manifest(checkpoint: Location, manifest: Manifest) -> None:
    """Write the manifest of a checkpoint, last of all its files."""
    checked = manifest.model_copy(update={"checksum": _checksum(manifest)})
    with write_hashed(checkpoint / MANIFEST_NAME, lambda _: None) as file:
        file.write((checked.model_dump_json(indent=2) + "\n").encode())


def _checksum(manifest: Manifest, *, is_read: bool = False) -> str:
    return xxhash.xxh3_128_hexdigest(manifest.model_dump_json(exclude={"checksum"}, exclude_unset=is_read).encode())
