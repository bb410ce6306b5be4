"""The frozen model beside which adapters train: a checkpoint has its checksum, not its weights."""

from meshtrain.checkpoint.manifest import Manifest, SavedBase
from meshtrain.checkpoint.storage.location import shown_location
from meshtrain.config.run import RunConfig
from meshtrain.errors import CheckpointError
from meshtrain.models.build import local_directory
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.parallel.pretrained import load_pretrained
from meshtrain.runtime.location import Location
from meshtrain.training.self_check import frozen_checksum


class FrozenBase:
    """Knows the frozen model of a run with adapters; a run without them has none.

    Args:
        config: of the run.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._checksum = ""

    @property
    def exists(self) -> bool:
        """Return whether only adapters train."""
        return self._config.lora.rank is not None

    def read(self, pipeline: Pipeline) -> None:
        """Remember the parameters of the model, once they have their values. Collective."""
        if self.exists:
            self._checksum = frozen_checksum(pipeline)

    def saved(self) -> SavedBase | None:
        """Return what a checkpoint says about the model."""
        if not self.exists:
            return None
        assert self._config.model.path is not None
        return SavedBase(lora=self._config.lora, path=self._config.model.path, checksum=self._checksum)

    def check(self, checkpoint: Location, manifest: Manifest) -> None:
        """Check that the adapters of a checkpoint were trained on this model.

        Raises:
            CheckpointError: if they were trained on another one.
        """
        if manifest.base is not None:
            _check(checkpoint, manifest.base, self._checksum, str(self._config.model.path))


def load_base(checkpoint: Location, base: SavedBase, pipeline: Pipeline) -> None:
    """Fill the frozen parameters of a pipeline for the adapters of a checkpoint. Collective.

    Raises:
        ModelError: if the model is gone.
        CheckpointError: if its weights have changed.
    """
    load_pretrained(pipeline, local_directory(base.path, asked="the base of the adapters"))
    _check(checkpoint, base, frozen_checksum(pipeline), base.path)


def _check(checkpoint: Location, base: SavedBase, found: str, path: str) -> None:
    if base.checksum != found:
        raise CheckpointError(
            f"{shown_location(checkpoint)}: its adapters were trained on other weights than those in {path} (their "
            f"checksum was {base.checksum}, and is {found})",
            f"put back the model that was in {base.path} then",
        )
