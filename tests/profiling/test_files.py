"""The prediction and the profile of a run as files."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshtrain.errors import UserError
from meshtrain.profiling.files import (
    Prediction,
    ProfileSummary,
    prediction_path,
    read_prediction,
    read_summary,
    summary_path,
)
from tests.profiling.directories import prediction, summary


@pytest.fixture(autouse=True)
def in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    summary_path(tmp_path).parent.mkdir()


def test_files_have_the_agreed_names_and_keys(tmp_path: Path) -> None:
    assert prediction_path(tmp_path) == tmp_path / "prediction.json"
    assert summary_path(tmp_path) == tmp_path / "profile" / "summary.json"
    predicted, measured = prediction().to_json(), summary().to_json()
    assert [*predicted] == [
        "machine",
        "measured",
        "is_cpu",
        "world_size",
        "limit_bytes",
        "peak_bytes",
        "fits",
        "verdict",
        "step_seconds",
        "tokens_per_second",
        "mfu",
        "peak_tflops",
        "bubble",
        "axes",
        "timeline",
    ]
    assert [*predicted["axes"]["pp"]] == ["bytes", "seconds", "exposed_seconds"]
    assert [*measured] == ["steps", "step_seconds", "ranks", "timeline"]
    assert [*measured["ranks"][0]] == ["rank", "peak_bytes", "messages"]
    assert [*measured["ranks"][0]["messages"][0]] == ["axis", "operator", "number", "bytes", "seconds"]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert read_prediction(tmp_path) is None
    assert read_summary(tmp_path) is None
    unknown = replace(prediction(), mfu=None, peak_tflops=None)
    for one in (prediction(), unknown):
        prediction_path(tmp_path).write_text(json.dumps(one.to_json()))
        assert read_prediction(tmp_path) == one
    summary_path(tmp_path).write_text(json.dumps(summary().to_json()))
    assert read_summary(tmp_path) == summary()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"machine": 3}, "machine: input should be a valid string"),
        ({"peak_bytes": ["a"]}, "peak_bytes.0: input should be a valid integer, unable to parse string as an integer"),
        ({"axes": {"tp": {"bytes": 1, "seconds": 2}}}, "axes.tp.exposed_seconds: field required"),
        ({"timeline": [{"name": "a", "spans": [[]]}]}, "timeline: value error, not the lanes of a timeline"),
        ({"timeline": 3}, "timeline: value error, not the lanes of a timeline"),
    ],
)
def test_wrong_values_are_named(changes: dict, message: str, tmp_path: Path) -> None:
    prediction_path(tmp_path).write_text(json.dumps(prediction().to_json() | changes))
    with pytest.raises(UserError) as raised:
        read_prediction(tmp_path)
    assert str(raised.value) == f"prediction.json: {message}; remove the file, or write it again"


def test_damaged_files_are_named_with_the_line(tmp_path: Path) -> None:
    summary_path(tmp_path).write_text('{"steps": [1, 2],\n"ranks": [}')
    with pytest.raises(UserError, match=r"^profile/summary.json: line 2: not JSON; remove the file"):
        read_summary(tmp_path)
    summary_path(tmp_path).write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"^profile/summary.json: cannot be read: 'utf-8' codec"):
        read_summary(tmp_path)
    summary_path(tmp_path).write_text("[]")
    with pytest.raises(UserError, match=r"^profile/summary.json: input should be a dictionary or an instance"):
        read_summary(tmp_path)


def test_values_keep_their_types() -> None:
    assert isinstance(Prediction.from_json(prediction().to_json()).peak_bytes, tuple)
    assert isinstance(ProfileSummary.from_json(summary().to_json()).ranks[0].messages, tuple)
