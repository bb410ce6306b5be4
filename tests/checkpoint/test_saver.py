"""Saving in the foreground and the background, to directories and URLs, and retention."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFileSystem

from meshtrain.checkpoint import saver as saver_module
from meshtrain.checkpoint.dcp.planner import BlockSavePlanner
from meshtrain.checkpoint.dcp.store import restore_checkpoint, write_checkpoint
from meshtrain.checkpoint.manifest import read_manifest
from meshtrain.checkpoint.saver import Saver
from meshtrain.checkpoint.show import show_checkpoints
from meshtrain.checkpoint.storage.directory import find_checkpoint, list_checkpoints
from meshtrain.checkpoint.storage.integrity import find_damage, newest_intact_checkpoint
from meshtrain.checkpoint.storage.location import open_location
from meshtrain.checkpoint.storage.publishing import Retention
from meshtrain.errors import CheckpointError
from meshtrain.models.layout import local_tensor
from meshtrain.runtime.location import Location
from tests.checkpoint.stages import build_plain, build_stage, manifest_of
from tests.ranks import RankError, run_on_ranks

KEEP_3 = Retention(newest=3)


def holds(directory: Location, scale: int) -> bool:
    """Return whether this rank's part of a checkpoint has the values of a stage at a scale."""
    tensors = build_stage(1, 1, 2, 1, filled=False)
    restore_checkpoint(directory, tensors)
    wanted = build_stage(1, 1, 2, 1, filled=True, scale=scale)
    return all(torch.equal(local_tensor(tensors[key]), local_tensor(wanted[key])) for key in wanted)


class Slow(BlockSavePlanner):
    """Saves slowly, so that training can continue meanwhile."""

    def resolve_data(self, write_item):
        time.sleep(0.02)
        return super().resolve_data(write_item)


def save_during_training(root: Path) -> tuple[bool, list[int], list[bool]]:
    from meshtrain.checkpoint.dcp import store

    store.BlockSavePlanner = Slow  # type: ignore[misc]
    saver = Saver(root, KEEP_3, in_background=True)
    tensors = build_stage(1, 1, 2, 1, filled=True, scale=1)
    went_on = False
    for step in (1, 2):
        saver.save(tensors, manifest_of(step), None)
        begin = time.perf_counter()
        is_over = torch.zeros(1)
        while not is_over.item() and time.perf_counter() - begin < 60:
            went_on = went_on or not (root / f"step-{step}").exists()
            # These are the training's own collectives, at the same time as the save.
            is_over = torch.tensor([float((root / f"step-{step}").exists())])
            dist.all_reduce(is_over, op=dist.ReduceOp.MIN)
        with torch.no_grad():
            for tensor in tensors.values():
                local_tensor(tensor).mul_(3.0)
    saver.finish()
    dist.barrier()
    steps = [int(path.name.removeprefix("step-")) for path in list_checkpoints(root)]
    return went_on, steps, [holds(root / "step-1", 1), holds(root / "step-2", 3)]


def test_training_continues_during_a_save_of_the_state_at_the_call(tmp_path: Path) -> None:
    for went_on, steps, held in run_on_ranks(2, save_during_training, tmp_path):
        assert went_on
        assert steps == [2, 1]
        assert held == [True, True]


def fail_in_background(root: Path) -> tuple[str, bool, list[str]]:
    saver = Saver(root, KEEP_3, in_background=True)
    tensors = build_stage(1, 1, 2, 1, filled=True)
    saver.save(tensors, manifest_of(1), None)
    saver.finish()
    if dist.get_rank() == 0:
        (root / "step-2.tmp").write_text("a file where a directory should be")
    dist.barrier()
    saver.save(tensors, manifest_of(2), None)
    while not saver.has_failed:
        time.sleep(0.01)
    try:
        saver.finish()
    except CheckpointError as error:
        message = str(error)
    # The error was raised once; the saver can save again.
    if dist.get_rank() == 0:
        (root / "step-2.tmp").unlink()
    dist.barrier()
    saver.save(tensors, manifest_of(2), None)
    saver.finish()
    dist.barrier()
    return message, saver.has_failed, [path.name for path in list_checkpoints(root)]


def test_background_error_is_raised_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_on_ranks(2, fail_in_background, tmp_path)
    assert first == second
    message, has_failed, names = first
    assert message.startswith(f"rank 0 cannot write {tmp_path}/step-2.tmp: ")
    assert "step 2 is not saved, and earlier checkpoints are untouched" in message
    assert not has_failed
    assert names == ["step-2", "step-1"]


def test_published_checkpoints_are_reported_once(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        saver = Saver(tmp_path, KEEP_3, in_background=False)
        saver.save(build_plain(filled=True), manifest_of(4), None)
        (saved,) = saver.published()
        assert (saved.step, saved.directory) == (4, tmp_path / "step-4")
        assert saved.seconds > 0
        assert saver.published() == []
        for step in (5, 6):
            saver.save(build_plain(filled=True), manifest_of(step), None)
        assert saver.published(0) == []
        assert saver.num_published == 2
        assert [one.step for number in (1, 7) for one in saver.published(number)] == [5, 6]
    finally:
        dist.destroy_process_group()
    assert saver_module.Saved is type(saved)


def save_plain(root: Location, step: int, retention: Retention, loss: float | None = None) -> Location:
    manifest = manifest_of(step, evaluation_loss=loss)
    return write_checkpoint(root, build_plain(filled=True), manifest=manifest, huggingface=None, retention=retention)


def names(root: Location) -> set[str]:
    return {path.name for path in root.iterdir()}


def test_every_nth_and_the_best_checkpoints_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = {1: 5.0, 2: 1.0, 3: 4.0, 4: None, 5: 2.0, 6: 3.0, 7: 6.0}
    for step, loss in losses.items():
        save_plain(tmp_path, step, Retention(newest=1, every=3, best=2), loss)
    assert names(tmp_path) == {"step-2", "step-3", "step-5", "step-6", "step-7"}
    show_checkpoints(tmp_path)
    rows = capsys.readouterr().out.splitlines()
    (row,) = [row for row in rows if "step-5" in row]
    assert "2.0000" in row
    assert "LlamaForCausalLM" in row


@pytest.mark.parametrize("url", ["memory://root", "file://{}/root"])
def test_checkpoints_work_the_same_behind_a_url(tmp_path: Path, url: str) -> None:
    root = open_location(url.format(tmp_path))
    assert list_checkpoints(root) == []
    for step in (1, 2, 3):
        saved = save_plain(root, step, Retention(newest=2))
    assert names(root) == {"step-2", "step-3"}
    assert newest_intact_checkpoint(root) == saved == find_checkpoint(root)
    tensors, wanted = build_plain(filled=False), build_plain(filled=True)
    restore_checkpoint(saved, tensors)
    assert all(torch.equal(tensors[key], wanted[key]) for key in wanted)
    # Save a step again, then damage it, then remove its manifest, as after a killed save.
    save_plain(root, 3, Retention(newest=2))
    assert find_damage(root / "step-3") == []
    (root / "step-3" / ".metadata").write_bytes(b"x")
    assert newest_intact_checkpoint(root) == root / "step-2"
    (root / "step-3" / "manifest.json").unlink()
    assert list_checkpoints(root) == [root / "step-2"]
    save_plain(root, 4, Retention(newest=1))
    assert names(root) == {"step-4"}


def save_behind_url(url: str) -> bool:
    root = open_location(url)
    tensors = build_stage(1, 1, 2, 1, filled=True, scale=2)
    write_checkpoint(root, tensors, manifest=manifest_of(1), huggingface=write_config, retention=KEEP_3)
    return holds(root / "step-1", 2) and newest_intact_checkpoint(root) is not None


def write_config(directory: Path) -> None:
    (directory / "config.json").write_text("{}")


def test_ranks_save_to_a_url(tmp_path: Path) -> None:
    assert all(run_on_ranks(2, save_behind_url, f"file://{tmp_path}/root"))
    assert set(read_manifest(tmp_path / "root/step-1").files) == {
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "huggingface/config.json",
    }


def die_behind_url(url: str) -> None:
    from meshtrain.checkpoint.dcp import store

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    store.write_manifest = die  # type: ignore[assignment]
    save_plain(open_location(url), 2, KEEP_3)


def test_killed_save_to_a_url_leaves_no_checkpoint(tmp_path: Path) -> None:
    root = open_location(f"file://{tmp_path}")
    for step in (1, 2):
        save_plain(root, step, KEEP_3)
    with pytest.raises(RankError, match="killed by SIGKILL"):
        run_on_ranks(1, die_behind_url, str(root))
    # The step was being replaced. Without renaming there is a moment without it, but never half of
    # it.
    assert names(root) == {"step-1", "step-2"}
    assert list_checkpoints(root) == [root / "step-1"]


def test_temporary_store_failure_loses_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    root, lost, listing = open_location("memory://lost"), [], MemoryFileSystem.ls

    def ls(self: MemoryFileSystem, path: str, **kwargs: Any) -> Any:
        if any(word in path for word in lost):
            raise TimeoutError("no answer")
        return listing(self, path, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "ls", ls)
    for step in (10, 20, 30):
        save_plain(root, step, KEEP_3)
    for word in ("lost", "step-30"):
        lost[:] = [word]
        with pytest.raises(CheckpointError, match=r"lost cannot be read: no answer; nothing was changed there"):
            newest_intact_checkpoint(root)
    # The same failure while a newer one is saved and the old ones are listed.
    with pytest.raises(CheckpointError, match=r"lost cannot be read: no answer"):
        save_plain(root, 40, Retention(newest=1))
    lost.clear()
    assert names(root) == {"step-10", "step-20", "step-30", "step-40"}
    assert find_damage(root / "step-30") == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nowhere://bucket/run", r"nowhere://bucket/run cannot be reached: .*nowhere"),
        ("s3://bucket/run", r"s3://bucket/run cannot be reached: .*s3fs"),
    ],
)
def test_unreachable_url_is_refused(url: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_location(url)
