"""What a run does with its model between steps: downstream tasks, and texts that it writes."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from meshtrain.config.path_rules import PathText
from meshtrain.config.settings import Count, NotNegative, Settings
from meshtrain.errors import ConfigError


class TasksConfig(Settings):
    """Tasks of lm-evaluation-harness during training, on the mesh of the run. Needs
    `pip install meshtrain[evaluate]`."""

    names: list[str] = []
    """Names of tasks, or of groups of them. Left out: none."""
    every: Count | None = None
    """Number of steps between two evaluations. Left out: only at the end."""
    folder: PathText | None = None
    """A folder with YAML files of further tasks (relative to the run file)."""
    num_fewshot: NotNegative | None = None
    """Number of examples in a prompt. Left out: as the task says."""
    limit: Count | None = None
    """Number of documents of each task. Left out: all."""
    batch_size: Count = 8
    """Number of requests that each data-parallel rank answers at once."""

    @model_validator(mode="after")
    def _needs_names(self) -> Self:
        _check_needed(self, "names")
        return self


class GenerateConfig(Settings):
    """Texts that the model writes during training, always from the same prompts. They are on the
    screen and in `metrics.jsonl`."""

    prompts: list[Annotated[str, Field(min_length=1)]] = []
    """Beginnings of the texts. Left out: none."""
    every: Count | None = None
    """Number of steps between two times. Left out: only at the end."""
    max_new_tokens: Count = 32
    """Largest number of tokens that are added to a prompt."""
    temperature: Annotated[float, Field(ge=0.0, le=10.0, allow_inf_nan=False)] = 0.0
    """Factor by which the logits are divided before tokens are drawn. 0: always the most likely
    token."""

    @model_validator(mode="after")
    def _needs_prompts(self) -> Self:
        _check_needed(self, "prompts")
        return self


def _check_needed(table: Settings, key: str) -> None:
    """Check that no other key is set if a list is empty, because nothing would read it."""
    changed = [f"`{name}`" for name, field in type(table).model_fields.items() if getattr(table, name) != field.default]
    if changed and not getattr(table, key):
        raise ConfigError(f"{', '.join(changed)}: nothing reads this without `{key}`", f"set `{key}`, or leave it out")
