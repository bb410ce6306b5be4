"""A folder that the user names appears complete, or is filled if it exists and is empty."""

import stat
from pathlib import Path

import pytest

from meshtrain.checkpoint.storage.named_folder import check_new, draft_of, publish_folder, written_completely
from meshtrain.errors import CheckpointError


def write(folder: Path) -> None:
    with written_completely(folder) as draft:
        (draft / "config.json").write_text("config")
        (draft / "parts").mkdir()
        (draft / "parts" / "one").write_text("weights")


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


WRITTEN = ["config.json", "parts", "parts/one"]


def test_new_folder_is_complete_and_its_neighbors_are_kept(tmp_path: Path) -> None:
    (tmp_path / "new.tmp").mkdir()
    write(tmp_path / "new")
    assert names(tmp_path) == sorted(["new", "new.tmp", *(f"new/{name}" for name in WRITTEN)])


def test_empty_folder_keeps_its_inode_and_mode(tmp_path: Path) -> None:
    folder = tmp_path / "private"
    folder.mkdir(mode=0o700)
    before = folder.stat()
    write(folder)
    assert names(folder) == WRITTEN
    assert folder.stat().st_ino == before.st_ino
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert names(tmp_path) == ["private", *(f"private/{name}" for name in WRITTEN)]


@pytest.mark.parametrize("exists", [True, False])
def test_link_is_followed(tmp_path: Path, *, exists: bool) -> None:
    target, link = tmp_path / "disk" / "target", tmp_path / "link"
    if exists:
        target.mkdir(parents=True)
    link.symlink_to(target)
    write(link)
    assert link.is_symlink()
    assert names(target) == WRITTEN


def test_working_directory_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path())
    assert names(Path.cwd()) == WRITTEN


def test_draft_of_a_killed_process_is_ignored(tmp_path: Path) -> None:
    draft_of(tmp_path).mkdir()
    (draft_of(tmp_path) / "half").touch()
    write(tmp_path)
    assert names(tmp_path) == WRITTEN


def test_empty_folder_created_during_the_write_is_no_obstacle(tmp_path: Path) -> None:
    """A program may create its folder on each rank, so on one while another begins to write."""
    draft = draft_of(tmp_path / "new")
    draft.mkdir()
    (draft / "config.json").touch()
    (tmp_path / "new").mkdir()
    publish_folder(draft, tmp_path / "new")
    assert names(tmp_path) == ["new", "new/config.json"]


@pytest.mark.parametrize("exists", [True, False])
def test_files_written_by_another_process_are_not_replaced(tmp_path: Path, *, exists: bool) -> None:
    folder = tmp_path / "new"
    draft = draft_of(folder)
    if exists:
        folder.mkdir()
        draft = draft_of(folder)
    draft.mkdir()
    (draft / "config.json").write_text("ours")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("theirs")
    with pytest.raises(CheckpointError, match=r"new exists and is not empty; write into a new folder"):
        publish_folder(draft, folder)
    assert (folder / "config.json").read_text() == "theirs"


def test_config_file_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    rename = Path.rename

    def note(path: Path, target: Path) -> Path:
        order.append(target.name)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", note)
    write(tmp_path)
    assert order == ["parts", "config.json"]


def write_half(folder: Path) -> None:
    with written_completely(folder) as draft:
        (draft / "config.json").touch()
        raise ValueError("half way")


def test_error_leaves_no_files(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for name in ("there", "new"):
        with pytest.raises(ValueError, match="half way"):
            write_half(tmp_path / name)
    assert names(tmp_path) == ["there"]


def test_folder_with_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes").touch()
    for folder in (tmp_path, tmp_path / "notes"):
        with pytest.raises(CheckpointError) as caught:
            check_new(folder)
        assert caught.value.lines == (f"{folder} exists and is not empty; write into a new folder",)
