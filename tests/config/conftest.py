"""Real files to read: every test works in a directory of its own."""

from collections.abc import Callable
from pathlib import Path

import pytest

RUN = """
run_directory = "out"
steps = 10
global_batch_size = 8

[model]
type = "gpt2"
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return a function that writes a file, by default a complete run, and enter its directory."""
    monkeypatch.chdir(tmp_path)

    def write(name: str = "run.toml", text: str = "", *, whole: bool = True) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + (RUN if whole else ""))
        return path

    return write
