"""LoRA: small adapters that train beside a frozen model."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from meshtrain.config.settings import Count, Positive, Settings
from meshtrain.errors import ConfigError


class LoraConfig(Settings):
    """Low-rank adapters (LoRA): the model is frozen, and only small matrices beside its projections
    train. Needs `pip install meshtrain[lora]`."""

    rank: Count | None = None
    """Number of rows of A and of columns of B: an adapter adds B A to the weight of a projection.
    Left out: no adapters, and the full model trains."""
    alpha: Positive | None = None
    """The product is multiplied by alpha / rank. Left out: the rank, so that this factor is 1."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Probability that an element of the input of a projection's adapter is dropped."""
    target_modules: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = "all-linear"
    """Projections and embeddings that have an adapter: the ends of their names, such as
    ["q_proj", "v_proj"]. "all-linear": all projections but the head."""
    rank_stabilized: bool = False
    """Multiply by alpha / sqrt(rank) instead (rsLoRA), so that large ranks learn as fast. Without
    `alpha` the factor is then sqrt(rank)."""
    base: Literal["parameters", "nf4"] = "parameters"
    """Number format of the frozen model: that of `plan.precision.parameters`, or `nf4`, in which
    the projections of the layers have four bits for each number (QLoRA). Their inputs, and the part
    of them that a process of tp has, are multiples of 64."""
    dora: bool = False
    """Also learn the length of each row of a projection's weight (DoRA)."""
    modules_to_save: list[str] = Field(default_factory=list)
    """Modules that train in full beside the adapters: the ends of their names, such as
    ["lm_head", "embed_tokens", "norm"]. Embedding and head of a model that ties them train
    together. Left out: none."""

    @model_validator(mode="after")
    def _needs_rank(self) -> Self:
        # A resolved run file has every key, with its default.
        fields = type(self).model_fields.items()
        changed = [
            f"`{name}`" for name, field in fields if getattr(self, name) != field.get_default(call_default_factory=True)
        ]
        if self.rank is None and changed:
            raise ConfigError(
                f"`lora` sets {', '.join(changed)}, but without `lora.rank` there are no adapters",
                "set it, for example `rank` = 16",
            )
        return self

    @model_validator(mode="after")
    def _dora_sees_all(self) -> Self:
        if self.dora and self.dropout:
            raise ConfigError(
                f"`dora` = true rescales the output of a projection, and `dropout` = {self.dropout} would need a "
                "second output",
                "leave out one of them",
            )
        return self

    @model_validator(mode="after")
    def _dora_of_parameters(self) -> Self:
        if self.dora and self.base == "nf4":
            raise ConfigError(
                "`dora` = true needs the lengths of full weights, and `base` = 'nf4' packs them",
                "leave out one of them",
            )
        return self

    @model_validator(mode="after")
    def _names_once(self) -> Self:
        for key in ("target_modules", "modules_to_save"):
            names = getattr(self, key)
            if isinstance(names, list) and (twice := sorted({name for name in names if names.count(name) > 1})):
                raise ConfigError(f"`{key}` names {twice[0]!r} twice", "leave one out")
        return self


NO_LORA = LoraConfig()
