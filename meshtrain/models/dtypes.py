"""Number formats and their names."""

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
"""Name in a plan -> number format of parameters."""


def dtype_name(dtype: torch.dtype | str) -> str:
    """Return the name of a number format, as a configuration has it; torch's own name is longer."""
    return str(dtype).removeprefix("torch.")
