"""What every group of words in a file has in common."""

from pydantic import BaseModel, ConfigDict


class Words(BaseModel):
    """A table of a TOML file: frozen, no unknown keys, a docstring under each field.

    The docstrings become the JSON schema, so editors show them while a file is written.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, strict=True)
