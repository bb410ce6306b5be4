"""Identity of a run: the fields of its manifests, and whether it can resume from a checkpoint."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PretrainedConfig

from meshtrain.checkpoint.dcp.reading import read_metadata
from meshtrain.checkpoint.huggingface.export import list_saved_tensors
from meshtrain.checkpoint.huggingface.layout import saved_tensors_of
from meshtrain.checkpoint.manifest import Manifest, read_manifest
from meshtrain.checkpoint.storage.directory import HUGGINGFACE_NAME
from meshtrain.checkpoint.storage.location import errors_in_one_line, local_path, shown_location
from meshtrain.config.lora import NO_LORA
from meshtrain.config.plan import ParallelPlan
from meshtrain.config.reading import shown_path
from meshtrain.config.run import ModelConfig, RunConfig
from meshtrain.config.settings import Settings
from meshtrain.data.prepare import PreparedData
from meshtrain.errors import CheckpointError, Problem, name_some
from meshtrain.models.adapters import adapter_parameters
from meshtrain.models.build import load_hf_config
from meshtrain.runtime.location import Location
from meshtrain.training.directory import differences
from meshtrain.training.resolve import ResolvedRun
from meshtrain.training.same_model import config_values, kind_differences

PLACES = "in the checkpoint", "in this run"


@dataclass(frozen=True)
class Identity:
    """What a checkpoint must agree with, and what an export takes over.

    Attributes:
        hf_config: the Hugging Face configuration with the end token of the tokenizer, as the
            exported model has it.
    """

    resolved: ResolvedRun
    data: PreparedData
    hf_config: PretrainedConfig

    @property
    def config(self) -> RunConfig:
        """Return the configuration of the run."""
        return self.resolved.config

    @property
    def plan(self) -> ParallelPlan:
        """Return the resolved plan."""
        return self.resolved.plan

    @property
    def _order(self) -> dict[str, bool]:
        return {"data.shuffle": self.config.data.shuffle, "data.drop_last": self.config.data.drop_last}

    def manifest_fields(self) -> dict[str, Any]:
        """Return the fields of a manifest that distinguish this run from others."""
        return {
            "seed": self.config.seed,
            "global_batch_size": self.config.global_batch_size,
            "batch_ramp": self.config.batch_ramp,
            "optimizer_name": self.config.optimizer.name,
            "data_identity": self.data.identity,
            "order": self._order,
        }

    def write_huggingface(self, directory: Path) -> None:
        """Write the configuration and the tokenizer, which `export` takes over."""
        self.hf_config.architectures = [type(self.resolved.model).__name__]
        self.hf_config.save_pretrained(directory)
        self.generation_config().save_pretrained(directory)
        self.data.tokenizer.copy(directory)

    def generation_config(self) -> GenerationConfig:
        """Return the defaults of text generation: the tokens that end and pad a text."""
        tokenizer = self.data.tokenizer
        return GenerationConfig(eos_token_id=tokenizer.end_id, pad_token_id=tokenizer.pad_id)

    def check(self, checkpoint: Location) -> Manifest:
        """Check that this run can resume from a checkpoint.

        Returns:
            The manifest of the checkpoint.

        Raises:
            CheckpointError: with everything that differs.
        """
        manifest = read_manifest(checkpoint)
        there = {
            "seed": manifest.seed,
            "global_batch_size": manifest.global_batch_size,
            "optimizer.name": manifest.optimizer_name,
            "plan.precision.parameters": manifest.dtype,
            **manifest.order,
            **_values_of("batch_ramp", manifest.batch_ramp),
            **_values_of("lora", NO_LORA if manifest.base is None else manifest.base.lora),
            **self._model_values(checkpoint),
        }
        here = {
            "seed": self.config.seed,
            "global_batch_size": self.config.global_batch_size,
            "optimizer.name": self.config.optimizer.name,
            "plan.precision.parameters": self.plan.precision.parameters,
            **self._order,
            **_values_of("batch_ramp", self.config.batch_ramp),
            **_values_of("lora", self.config.lora),
            **_values(self.hf_config),
        }
        problems = kind_differences(manifest, self.hf_config, PLACES) or differences(there, here, PLACES)
        problems += self._tensor_differences(checkpoint, manifest)
        if manifest.data_identity != self.data.identity:
            problems.append("the data is not what it was trained on: text, tokenizer, form or length has changed")
        if problems:
            raise CheckpointError(
                [
                    *(Problem(problem, about=shown_location(checkpoint)) for problem in problems),
                    Problem(
                        f"{shown_path(Path(self.config.run_directory))} holds another run",
                        "choose another run_directory, or restore the settings that this one started with",
                    ),
                ]
            )
        return manifest

    def _model_values(self, checkpoint: Location) -> dict[str, Any]:
        with errors_in_one_line(checkpoint), local_path(checkpoint / HUGGINGFACE_NAME) as directory:
            saved = ModelConfig(path=str(directory), trust_remote_code=self.config.model.trust_remote_code)
            return _values(load_hf_config(saved))

    def _tensor_differences(self, checkpoint: Location, manifest: Manifest) -> list[str]:
        tensors = list_saved_tensors(checkpoint, read_metadata(checkpoint), manifest)
        there = {name: tensor.shape for name, tensor in tensors.items()}
        model, adapters = self.resolved.model, adapter_parameters(self.resolved.adapters)
        saved = saved_tensors_of(model)
        if adapters:
            trained = {name for name, it in model.named_parameters(remove_duplicate=False) if it.requires_grad}
            saved = adapters | {name: it for name, it in saved.items() if name in trained}
        here = {name: tuple(it.shape) for name, it in saved.items()}
        different = differences(there, here, PLACES)
        return [f"{len(different):,} of its tensors differ: {name_some(different, limit=3)}"] if different else []


def _values_of(table: str, config: Settings) -> dict[str, Any]:
    return {f"{table}.{name}": value for name, value in config.model_dump().items()}


def _values(config: PretrainedConfig) -> dict[str, Any]:
    return {f"model.config.{name}": value for name, value in config_values(config).items()}
