"""The table [distillation] of a run file."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from meshtrain.config.path_rules import PathText
from meshtrain.config.settings import Positive, Settings
from meshtrain.errors import ConfigError


class DistillationConfig(Settings):
    """Knowledge distillation: a second, frozen model, the teacher, says how likely each token is,
    and the model learns that beside the tokens of the data."""

    teacher: PathText | None = None
    """A local Hugging Face directory with the weights of a model of any class. Its vocabulary is
    that of the model. Left out: there is no teacher."""
    weight: Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)] = 0.5
    """Factor of what the teacher says, from above 0 to 1. The cross-entropy of the data has the
    rest: 1 - weight."""
    temperature: Positive = 2.0
    """Both models' logits are divided by it before they are compared. A larger one shows more of
    what the teacher says about unlikely tokens."""

    @model_validator(mode="after")
    def _has_teacher(self) -> Self:
        if self.teacher is None:
            for key in ("weight", "temperature"):
                if getattr(self, key) != type(self).model_fields[key].default:
                    raise ConfigError(f"`{key}` is not read without `teacher`", "set `teacher`, or leave it out")
        return self


NO_DISTILLATION = DistillationConfig()
