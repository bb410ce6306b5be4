"""Classes whose code came with their model."""

import inspect
from pathlib import Path

from transformers import PreTrainedModel


def is_stock(model_class: type[PreTrainedModel]) -> bool:
    """Return whether a class belongs to transformers."""
    return model_class.__module__.startswith("transformers.")


def own_code(model_class: type[PreTrainedModel]) -> list[tuple[str, str]]:
    """Return the code that came with a class: names and texts of its own file and those beside it.

    A class of transformers has none.
    """
    if is_stock(model_class):
        return []
    # transformers keeps the files of each model in a directory of their own.
    files = sorted(Path(inspect.getfile(model_class)).parent.glob("*.py"))
    return [(file.name, file.read_text()) for file in files]
