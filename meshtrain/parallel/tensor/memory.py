"""Remember what was found out about the classes of transformers, from one command to the next."""

import hashlib
import json
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from transformers import PreTrainedModel

import meshtrain
from meshtrain.compat.transformers import attention_implementation
from meshtrain.config.data import DataConfig


def remembered(what: str, model: PreTrainedModel, details: object, make: Callable[[], Any]) -> Any:
    """Return what `make` returned for this class and configuration, or call it.

    Only classes of transformers are remembered, because the code of others may change. Files are in
    the default cache directory. Where it cannot be written, nothing is remembered.

    Args:
        what: name of what is found out.
        model: for its class and its configuration.
        details: what else it depends on, as JSON can hold it.
        make: finds it out, as JSON can hold it. It is called again if it raises an error.
    """
    kind = type(model)
    if not kind.__module__.startswith("transformers."):
        return make()
    identity = (what, _versions(), kind.__module__, kind.__qualname__, model.config.to_json_string(use_diff=False))
    key = hashlib.sha256(json.dumps([*identity, attention_implementation(model.config), details]).encode()).hexdigest()
    path = Path(DataConfig().cache_directory) / "rules" / f"{key}.json"
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        # It was never written, or is damaged.
        value = make()
    _write(path, json.dumps(value))
    return value


@cache
def _versions() -> list[str]:
    root = Path(meshtrain.__file__).parent
    code = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        code.update(file.read_bytes())
    return [version("torch"), version("transformers"), code.hexdigest()]


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Others, also on other machines, may write the same file, and none may read a part of it.
        with NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as part:
            part.write(text)
        Path(part.name).replace(path)
    except OSError:
        # A directory that cannot be written, or a full disk: the next command finds it out again.
        return
