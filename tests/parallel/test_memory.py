"""What was found out about a class is remembered, and found out again where it may have changed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from meshtrain.config.data import DataConfig
from meshtrain.models.build import build_meta_model
from meshtrain.parallel.tensor import memory
from meshtrain.parallel.tensor.memory import remembered


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(memory, "DataConfig", lambda: DataConfig(cache_directory=str(tmp_path / "cache")))
    return tmp_path / "cache"


def tiny(**changes: Any) -> PreTrainedModel:
    config = AutoConfig.for_model("llama", hidden_size=32, num_attention_heads=4, num_hidden_layers=1, **changes)
    return build_meta_model(config, dtype=torch.float32, attention="eager")


class Finder:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> dict[str, int]:
        self.calls += 1
        return {"calls": self.calls}


def test_the_same_question_is_answered_once(directory: Path) -> None:
    find = Finder()
    assert [remembered("rules", tiny(), [2], find) for _ in range(2)] == [{"calls": 1}] * 2
    assert [path.suffix for path in (directory / "rules").iterdir()] == [".json"]


def test_another_configuration_or_question_is_another_answer(directory: Path) -> None:
    find = Finder()
    for what, model, details in (
        ("rules", tiny(), [2]),
        ("rules", tiny(attention_bias=True), [2]),
        ("rules", tiny(), [4]),
        ("plan", tiny(), [2]),
    ):
        remembered(what, model, details, find)
    assert find.calls == 4


def test_a_class_of_others_is_not_remembered(directory: Path) -> None:
    find, model = Finder(), tiny()
    model.__class__ = type("Own", (type(model),), {"__module__": "own_file"})
    for _ in range(2):
        remembered("rules", model, [2], find)
    assert find.calls == 2
    assert not directory.exists()


def test_a_damaged_answer_is_found_out_again(directory: Path) -> None:
    find = Finder()
    remembered("rules", tiny(), [2], find)
    (path,) = (directory / "rules").iterdir()
    path.write_text('{"calls"')
    assert [remembered("rules", tiny(), [2], find) for _ in range(2)] == [{"calls": 2}] * 2


def test_without_a_directory_nothing_is_remembered(directory: Path) -> None:
    find = Finder()
    directory.mkdir()
    (directory / "rules").write_text("a file")
    assert [remembered("rules", tiny(), [2], find) for _ in range(2)] == [{"calls": 1}, {"calls": 2}]


def test_an_error_is_not_remembered(directory: Path) -> None:
    def fail() -> None:
        raise ValueError("no copy")

    with pytest.raises(ValueError, match="no copy"):
        remembered("rules", tiny(), [2], fail)
    assert remembered("rules", tiny(), [2], Finder()) == {"calls": 1}
