"""Directories that are checkpoints, and replacing a checkpoint by another of the same name."""

import json
from pathlib import Path

import pytest

from meshtrain.checkpoint.manifest import Manifest, read_manifest, write_manifest
from meshtrain.checkpoint.storage.directory import find_checkpoint, list_checkpoints
from meshtrain.checkpoint.storage.location import hash_file
from meshtrain.checkpoint.storage.publishing import Retention, prune_checkpoints, publish_checkpoint
from meshtrain.config.settings import field_docstrings
from meshtrain.errors import CheckpointError
from meshtrain.models.fused import FusedParameter
from tests.checkpoint.stages import manifest_of


def make(root: Path, name: str, mark: str = "") -> Path:
    directory = root / name
    directory.mkdir(parents=True)
    (directory / "mark").write_text(mark)
    write_manifest(directory, manifest_of(1, files={"mark": hash_file(directory / "mark")}))
    return directory


def names(root: Path) -> list[str]:
    return [path.name for path in list_checkpoints(root)]


def test_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    fused = FusedParameter("h.0.attn.c_attn.weight", ("h.0.attn.c_attn.q.weight", "h.0.attn.c_attn.k.weight"), 1)
    manifest = manifest_of(7, fused=(fused,), tied={"lm_head.weight": "wte.weight"}, dtypes={"wte.weight": "bfloat16"})
    write_manifest(tmp_path, manifest)
    found = read_manifest(tmp_path)
    assert found.model_copy(update={"checksum": ""}) == manifest
    assert found.checksum


def test_only_complete_checkpoints_are_listed_newest_first(tmp_path: Path) -> None:
    for name in ("step-9", "step-10", "step-30.tmp", "step-x", "best"):
        make(tmp_path, name)
    (tmp_path / "step-20").mkdir()
    assert names(tmp_path) == ["step-10", "step-9"]
    assert names(tmp_path / "nowhere") == []


def test_renamed_checkpoint_is_listed_until_its_step_is_saved_again(tmp_path: Path) -> None:
    make(tmp_path, "step-10.old")
    assert names(tmp_path) == ["step-10.old"]
    make(tmp_path, "step-10")
    assert names(tmp_path) == ["step-10"]


def test_same_step_is_replaced_and_the_old_one_is_removed(tmp_path: Path) -> None:
    make(tmp_path, "step-10.old", "killed long ago")
    make(tmp_path, "step-10", "old")
    publish_checkpoint(make(tmp_path, "step-10.tmp", "new"), tmp_path / "step-10")
    assert (tmp_path / "step-10" / "mark").read_text() == "new"
    assert (tmp_path / "step-10.old" / "mark").read_text() == "old"
    prune_checkpoints(tmp_path, step=10, retention=Retention(newest=1))
    assert [path.name for path in tmp_path.iterdir()] == ["step-10"]


def test_pruning_keeps_the_newest_and_removes_leftovers_of_killed_saves(tmp_path: Path) -> None:
    for name in ("step-1", "step-2", "step-3", "step-9", "step-2.tmp", "step-3.old", "step-4.old.tmp", "best"):
        make(tmp_path, name)
    (tmp_path / "step-5").mkdir()
    prune_checkpoints(tmp_path, step=3, retention=Retention(newest=2))
    # step-9 is later than the step saved after a rewind; step-5 and best are not checkpoints.
    assert {path.name for path in tmp_path.iterdir()} == {"step-2", "step-3", "step-9", "step-5", "best"}


@pytest.mark.parametrize("inside", [".", "checkpoints"])
def test_run_directory_resolves_to_its_newest_checkpoint(tmp_path: Path, inside: str) -> None:
    newest = make(tmp_path / inside, "step-20")
    make(tmp_path / inside, "step-3")
    assert find_checkpoint(tmp_path) == newest
    assert find_checkpoint(newest) == newest


def test_directory_that_is_not_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no manifest.json and no step-N directory; use a step-N directory"):
        find_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"nowhere is not a checkpoint: it is not a directory"):
        find_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"step-3.tmp was never finished: the save was cut off; use another"):
        find_checkpoint(make(tmp_path, "step-3.tmp"))
    with pytest.raises(CheckpointError, match=r"is not a checkpoint: cannot read .*manifest.json: No such file"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"manifest.json is broken \(Expecting property name"),
        ("{}", r"manifest.json is broken \('format_version'\)"),
        ("[]", r"manifest.json is broken \(list indices"),
        (
            '{"format_version": 3, "later": 1}',
            r"has format version 3, but this meshtrain reads 2; use the meshtrain that saved",
        ),
    ],
)
def test_unreadable_manifest_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_manifest(tmp_path)


def test_every_wrong_field_of_a_manifest_is_named(tmp_path: Path) -> None:
    fields = json.loads(manifest_of(3).model_dump_json())
    del fields["seed"]
    (tmp_path / "manifest.json").write_text(json.dumps(fields | {"step": "three"}))
    with pytest.raises(CheckpointError, match=r"step: Input should be a valid integer; seed: Field required"):
        read_manifest(tmp_path)


def test_every_manifest_field_has_a_docstring() -> None:
    assert {*field_docstrings(Manifest)} == {*Manifest.model_fields}
