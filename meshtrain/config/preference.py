"""The table [preference] of a run file."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from meshtrain.config.settings import Positive, Settings
from meshtrain.errors import ConfigError

PreferenceLossName = Literal["dpo", "orpo", "kto"]
RecordName = Literal["preference", "unpaired_preference"]


class PreferenceConfig(Settings):
    """Training on what people prefer: a loss of whole answers in place of the cross-entropy of
    tokens."""

    loss: PreferenceLossName | None = None
    """`dpo`: the sigmoid loss of pairs against a reference, the model that the run starts from.
    `orpo`: the cross-entropy of the chosen answer and the odds ratio of a pair, without a
    reference. `kto`: single answers that are desirable or not, against the same reference. Left
    out: the cross-entropy of tokens."""
    beta: Positive = 0.1
    """Factor of the rewards. `dpo` and `kto`: a larger one keeps the model closer to the
    reference. `orpo`: the weight of the odds ratio beside the cross-entropy."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5, allow_inf_nan=False)] = 0.0
    """`dpo`: probability that the two answers of a pair were interchanged by mistake."""
    desirable_weight: Positive = 1.0
    """`kto`: factor of the loss of a desirable answer."""
    undesirable_weight: Positive = 1.0
    """`kto`: factor of the loss of an undesirable answer."""

    @model_validator(mode="after")
    def _keys_of_the_loss(self) -> Self:
        fields = type(self).model_fields
        needs = {"beta": None, "label_smoothing": "dpo", "desirable_weight": "kto", "undesirable_weight": "kto"}
        for name, loss in needs.items():
            if getattr(self, name) == fields[name].default:
                continue
            if self.loss is None:
                raise ConfigError(f"`{name}` is set, but `preference.loss` is not", 'set it, for example to "dpo"')
            if loss not in (None, self.loss):
                raise ConfigError(f'`{name}` is for `loss` = "{loss}", found "{self.loss}"', "leave one of them out")
        return self

    @property
    def records(self) -> RecordName | None:
        """Return the `data.format` that the loss needs; None: it needs texts."""
        if self.loss is None:
            return None
        return "unpaired_preference" if self.loss == "kto" else "preference"

    @property
    def rows(self) -> int:
        """Return the number of rows of a sample that are trained on: a pair has two."""
        return 2 if self.records == "preference" else 1

    @property
    def has_reference(self) -> bool:
        """Return whether the loss compares with the model that the run starts from."""
        return self.loss in ("dpo", "kto")


NO_PREFERENCE = PreferenceConfig()
