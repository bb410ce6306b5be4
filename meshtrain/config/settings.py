"""The base class and types of all settings."""

import ast
import inspect
from functools import cache
from itertools import pairwise
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

# A larger number is a mistake, such as a lost minus in an exponent.
LARGEST = 10**12
Count = Annotated[int, Field(ge=1, le=LARGEST)]
NotNegative = Annotated[int, Field(ge=0, le=LARGEST)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0.0, le=LARGEST, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0.0, le=1e8, allow_inf_nan=False)]

REMEDY = "remedy"
"""Key in the schema of a setting: what to do if it is missing."""


class Settings(BaseModel):
    """A table of a TOML file: frozen, no unknown keys, a docstring under each field.

    The docstrings become the JSON schema, so editors show them while a file is written.
    """

    # Without `use_attribute_docstrings`: it would read the sources of all settings at every start.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


@cache
def field_docstrings(settings_type: type[Settings]) -> dict[str, str]:
    """Return field -> the docstring under it, for a settings class and its base classes."""
    found = {}
    for kind in reversed(settings_type.__mro__):
        if issubclass(kind, Settings):
            (definition,) = ast.parse(inspect.getsource(kind)).body
            assert isinstance(definition, ast.ClassDef)
            for field, below in pairwise(definition.body):
                match field, below:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        found[name] = inspect.cleandoc(text)
    return found
