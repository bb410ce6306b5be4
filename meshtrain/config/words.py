"""What every group of words in a file has in common."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[float, Field(gt=0.0)]


class Words(BaseModel):
    """A table of a TOML file: frozen, no unknown keys, a docstring under each field.

    The docstrings become the JSON schema, so editors show them while a file is written.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, strict=True)
