"""Damage to the files of a checkpoint is detected and named, and the previous one is used."""

import json
import os
import pickle
import random
import shutil
from enum import Enum
from pathlib import Path

import pytest
import torch

from meshtrain.checkpoint.dcp.reading import read_metadata
from meshtrain.checkpoint.manifest import read_manifest, write_manifest
from meshtrain.checkpoint.show import verify_checkpoints
from meshtrain.checkpoint.storage.integrity import find_damage, newest_intact_checkpoint
from meshtrain.errors import CheckpointError
from tests.chaos.damage import DAMAGES, damage_at_random
from tests.checkpoint.stages import build_stage, manifest_of
from tests.checkpoint.test_store import save
from tests.ranks import run_on_ranks


def save_two(root: Path) -> None:
    for step in (10, 20):
        save(root, step, build_stage(1, 1, 2, 1, filled=True, scale=step))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    run_on_ranks(2, save_two, root)
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    """Return a copy of two checkpoints that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "root"))


def test_saved_checkpoint_is_intact(root: Path) -> None:
    assert find_damage(root / "step-20") == []
    assert newest_intact_checkpoint(root) == root / "step-20"
    assert newest_intact_checkpoint(root / "nowhere") is None


@pytest.mark.parametrize("kind", DAMAGES)
def test_every_damage_is_named_and_the_previous_checkpoint_is_used(
    root: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = random.Random(kind)
    damaged = damage_at_random(root / "step-20", kind, stream, other=root / "step-10")
    assert newest_intact_checkpoint(root) == root / "step-10"
    message = capsys.readouterr().out
    assert f"Damaged: {root / 'step-20' / damaged}" in message
    assert f"{root / 'step-20'} is skipped; the checkpoint before it is tried" in message


def find_on_both_ranks(root: Path) -> tuple[list[str], Path | None]:
    return [str(problem) for problem in find_damage(root / "step-20")], newest_intact_checkpoint(root)


def test_ranks_check_the_files_together_and_agree(root: Path) -> None:
    for name in ("__0_0.distcp", "__1_0.distcp", ".metadata"):
        os.truncate(root / "step-20" / name, 10)
    found, again = run_on_ranks(2, find_on_both_ranks, root)
    assert found == again
    problems, chosen = found
    assert len(problems) == 3
    assert all("has 10 bytes and should have" in problem for problem in problems)
    assert chosen == root / "step-10"


def test_no_intact_checkpoint_is_an_error_and_changes_nothing(root: Path) -> None:
    for step in (10, 20):
        (root / f"step-{step}" / "manifest.json").write_text("{")
    before = sorted(root.rglob("*"))
    with pytest.raises(CheckpointError, match=r"none of its 2 checkpoints is intact, see above; nothing was changed"):
        newest_intact_checkpoint(root)
    assert sorted(root.rglob("*")) == before


def test_changed_manifest_is_detected(root: Path) -> None:
    path = root / "step-20" / "manifest.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {"seed": 1}))
    with pytest.raises(CheckpointError, match=r"manifest.json is broken \(its checksum does not match its content\)"):
        read_manifest(root / "step-20")


def test_newer_format_is_not_damage_and_is_not_removed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = root / "step-20" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 9}))
    with pytest.raises(CheckpointError, match=r"has format version 9, but this meshtrain reads 2"):
        newest_intact_checkpoint(root)
    save(root, 30, {"model.a": torch.ones(2)}, keep=1)
    assert sorted(path.name for path in root.iterdir()) == ["step-20", "step-30"]
    assert "step-20 stays, because its manifest cannot be read: " in capsys.readouterr().out


class Command:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> tuple:
        return os.system, (self._command,)


def test_checkpoint_with_a_pickled_command_is_refused(root: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    attack = pickle.dumps(Command(f"touch {mark}"))
    pickle.loads(attack)
    assert mark.exists(), "the attack does not work"
    mark.unlink()
    (root / "step-20" / ".metadata").write_bytes(attack)
    with pytest.raises(CheckpointError, match=r"it asks for posix.system, which no checkpoint needs"):
        read_metadata(root / "step-20")
    assert not mark.exists()


class Attribute:
    """Is an attribute of something when it is unpickled."""

    def __init__(self, owner: object, name: str) -> None:
        self._owner, self._name = owner, name

    def __reduce__(self) -> tuple:
        return getattr, (self._owner, self._name)


class OlderPickler(pickle.Pickler):
    """Writes the members of enumerations as their attributes."""

    def reducer_override(self, value: object) -> object:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def test_metadata_of_an_older_python_is_read_and_other_attributes_are_refused(root: Path) -> None:
    """Python 3.11.0 to 3.11.3 pickles the members of enumerations this way."""
    table = root / "step-20" / ".metadata"
    wanted = read_metadata(root / "step-20")
    with table.open("wb") as file:
        OlderPickler(file).dump(wanted)
    assert b"getattr" in table.read_bytes()
    assert read_metadata(root / "step-20").state_dict_metadata == wanted.state_dict_metadata
    table.write_bytes(pickle.dumps(Attribute(torch.Size, "numel")))
    with pytest.raises(CheckpointError, match=r"it asks for numel of <class 'torch.Size'>, which no checkpoint needs"):
        read_metadata(root / "step-20")


@pytest.mark.parametrize("value", [None, torch.Size([1])])
def test_metadata_of_another_type_is_refused(root: Path, value: object) -> None:
    (root / "step-20" / ".metadata").write_bytes(pickle.dumps(value))
    with pytest.raises(CheckpointError, match=r".metadata is broken \(it holds no table\)"):
        read_metadata(root / "step-20")


def test_verify_lists_intact_and_damaged_checkpoints(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verify_checkpoints(root)
    message = capsys.readouterr().out.splitlines()
    assert [line.split(" is intact: ")[0] for line in message] == [str(root / "step-20"), str(root / "step-10")]
    (root / "step-10" / "notes.txt").write_text("mine")
    os.truncate(root / "step-20" / ".metadata", 3)
    with pytest.raises(CheckpointError) as caught:
        verify_checkpoints(root)
    first, second = caught.value.lines
    assert first.startswith(f"{root}/step-20/.metadata has 3 bytes and should have ")
    assert second == f"{root}/step-10 holds files that are not its own: notes.txt; move them away"


def test_checkpoint_with_foreign_files_is_not_removed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "step-10" / "notes.txt").write_text("mine")
    save(root, 30, {"model.a": torch.ones(2)}, keep=1)
    assert sorted(path.name for path in root.iterdir()) == ["step-10", "step-30"]
    assert "step-10 stays, because it holds files that are not its own: notes.txt" in capsys.readouterr().out


def test_manifest_is_written_with_its_checksum(tmp_path: Path) -> None:
    write_manifest(tmp_path, manifest_of(3))
    assert len(read_manifest(tmp_path).checksum) == 32
