"""Save and load with real process groups, kills and full disks."""

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from meshtrain.checkpoint.dcp.planner import BlockSavePlanner
from meshtrain.checkpoint.dcp.store import restore_checkpoint, write_checkpoint
from meshtrain.checkpoint.manifest import read_manifest
from meshtrain.checkpoint.storage.directory import list_checkpoints
from meshtrain.checkpoint.storage.publishing import Retention
from meshtrain.errors import CheckpointError
from meshtrain.models.layout import local_tensor
from tests.checkpoint.stages import build_plain, build_stage, manifest_of
from tests.ranks import RankError, run_on_ranks

Mesh = tuple[int, int, int, int]
WIDE: Mesh = (2, 1, 2, 2)


def save(root: Path, step: int, tensors: dict, *, keep: int = 3) -> Path:
    return write_checkpoint(
        root, tensors, manifest=manifest_of(step), huggingface=None, retention=Retention(newest=keep)
    )


def save_on(mesh: Mesh, root: Path, step: int = 10) -> None:
    save(root, step, build_stage(*mesh, filled=True))


def load_on(mesh: Mesh, directory: Path) -> bool:
    tensors, wanted = build_stage(*mesh, filled=False), build_stage(*mesh, filled=True)
    restore_checkpoint(directory, tensors)
    return all(torch.equal(local_tensor(tensors[key]), local_tensor(wanted[key])) for key in wanted)


def round_trip(mesh: Mesh, directory: Path, root: Path) -> bool:
    same = load_on(mesh, directory)
    save_on(mesh, root, 20)
    return same


def world_size(mesh: Mesh) -> int:
    return mesh[0] * mesh[1] * mesh[2] * mesh[3]


def raised(fn: Callable[[], object]) -> tuple[str, ...]:
    try:
        fn()
    except CheckpointError as error:
        return error.lines
    return ()


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("wide")
    run_on_ranks(world_size(WIDE), save_on, WIDE, root)
    return root / "step-10"


@pytest.mark.parametrize("mesh", [(1, 1, 1, 1), (1, 1, 3, 2), (4, 1, 1, 1), (1, 2, 2, 1)])
def test_any_mesh_loads_the_checkpoint_of_any_other(wide: Path, tmp_path: Path, mesh: Mesh) -> None:
    assert all(run_on_ranks(world_size(mesh), round_trip, mesh, wide, tmp_path))
    tensors, wanted = build_plain(filled=False), build_plain(filled=True)
    restore_checkpoint(tmp_path / "step-20", tensors)
    assert all(torch.equal(tensors[key], wanted[key]) for key in wanted)


def test_process_without_a_group_saves_and_loads(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    saved = save(tmp_path, 10, build_plain(filled=True))
    assert saved == tmp_path / "step-10"
    assert read_manifest(saved).step == 10
    assert all(run_on_ranks(2, load_on, (1, 1, 2, 1), saved))
    assert not [warning for warning in recwarn if "torch.distributed" in str(warning.message)]


def save_copies(root: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "tp"))
    matrix = torch.ones(100, 1000)
    halves = distribute_tensor(matrix, mesh, [Replicate(), Shard(0)])
    copies = distribute_tensor(matrix, mesh, [Replicate(), Replicate()])
    save(root, 1, {"model.halves": halves, "model.copies": copies, "model.plain": matrix})


def test_replicas_are_written_once(tmp_path: Path) -> None:
    run_on_ranks(4, save_copies, tmp_path)
    num_bytes = [path.stat().st_size for path in tmp_path.glob("step-1/*.distcp")]
    assert len(num_bytes) == 4
    assert 3 * 400_000 < sum(num_bytes) < 3 * 410_000


def test_weights_are_loaded_alone(wide: Path) -> None:
    tensors = {key: tensor for key, tensor in build_plain(filled=False).items() if key.startswith("model.")}
    wanted = build_plain(filled=True)
    restore_checkpoint(wide, tensors, weights_only=True)
    assert all(torch.equal(tensor, wanted[key]) for key, tensor in tensors.items())


def test_huggingface_files_are_written(tmp_path: Path) -> None:
    def write(directory: Path) -> None:
        (directory / "config.json").write_text("{}")

    kept = Retention(newest=2)
    saved = write_checkpoint(tmp_path, {}, manifest=manifest_of(1), huggingface=write, retention=kept)
    assert (saved / "huggingface" / "config.json").read_text() == "{}"
    assert "huggingface/config.json" in read_manifest(saved).files


def test_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, build_plain(filled=True), keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-3", "step-2"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 5, build_plain(filled=False))
    save(tmp_path, 5, build_plain(filled=True))
    assert [path.name for path in tmp_path.iterdir()] == ["step-5"]
    assert run_on_ranks(1, load_on, (1, 1, 1, 1), tmp_path / "step-5") == [True]


class Deadly(BlockSavePlanner):
    """Kills its rank after half of the tensors have been written."""

    def resolve_data(self, write_item):
        if dist.get_rank() == 1 and write_item is self.plan.items[len(self.plan.items) // 2]:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().resolve_data(write_item)


def save_and_die(root: Path) -> None:
    from meshtrain.checkpoint.dcp import store

    save_on((2, 1, 1, 1), root, 10)
    store.BlockSavePlanner = Deadly  # type: ignore[misc]
    save_on((2, 1, 1, 1), root, 20)


def test_killed_save_leaves_a_temporary_directory_only(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"killed by SIGKILL|Connection closed|Connection reset|Ranks 1 failed to pass"):
        run_on_ranks(2, save_and_die, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"step-10", "step-20.tmp"}
    assert list_checkpoints(tmp_path) == [tmp_path / "step-10"]
    assert all(run_on_ranks(4, load_on, (1, 1, 2, 2), tmp_path / "step-10"))
    run_on_ranks(1, save_on, (1, 1, 1, 1), tmp_path, 20)
    assert {path.name for path in tmp_path.iterdir()} == {"step-10", "step-20"}


def limit_file_size(num_bytes: int) -> None:
    # The kernel refuses further writes, as on a full disk. Without the handler, the signal would
    # end the process.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


def save_on_full_disk(root: Path, rank: int, num_values: int) -> tuple[str, ...]:
    tensors = {f"model.{dist.get_rank()}.{index}": torch.ones(num_values) for index in range(3)}
    save(root, 10, tensors)
    if dist.get_rank() == rank:
        limit_file_size(1000)
    return raised(lambda: save(root, 20, tensors))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("num_values", [10, 10_000])
def test_full_disk_is_named_on_all_ranks_and_earlier_checkpoints_are_kept(
    tmp_path: Path, rank: int, num_values: int
) -> None:
    first, second = run_on_ranks(2, save_on_full_disk, tmp_path, rank, num_values)
    assert first == second
    (problem,) = first
    assert problem.startswith(f"rank {rank} cannot write {tmp_path}/step-20.tmp: File too large; step 20 is not saved")
    assert "earlier checkpoints are untouched" in problem
    assert [path.name for path in tmp_path.iterdir()] == ["step-10"]


def test_directory_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (problem,) = raised(lambda: save(tmp_path / "file", 1, {}))
    assert problem.startswith(f"rank 0 cannot write {tmp_path}/file/step-1.tmp: Not a directory")


def save_on_two_disks(root: Path) -> tuple[str, ...]:
    return raised(lambda: save(root / f"machine-{dist.get_rank()}", 1, build_stage(2, 1, 1, 1, filled=True)))


def test_run_directory_that_is_not_shared_is_an_error(tmp_path: Path) -> None:
    first, second = run_on_ranks(2, save_on_two_disks, tmp_path)
    assert first == second
    (problem,) = first
    assert problem == (
        f"{tmp_path}/machine-0/step-1.tmp/__1_0.distcp is missing or cut off, though its rank wrote it; put the run "
        "directory where every machine sees the same files"
    )
    assert list_checkpoints(tmp_path / "machine-0") == []


def test_old_checkpoints_that_cannot_be_removed_are_named(tmp_path: Path) -> None:
    save(tmp_path, 1, {"model.a": torch.ones(2)}, keep=1)
    (tmp_path / "step-0.tmp").write_text("a file where a directory should be")
    (problem,) = raised(lambda: save(tmp_path, 2, {"model.a": torch.ones(2)}, keep=1))
    assert problem == (
        f"rank 0 cannot remove old checkpoints of {tmp_path}: Not a directory; step 2 is saved, but the disk will fill "
        "up; remove them by hand, then resume"
    )
    assert list_checkpoints(tmp_path)[0] == tmp_path / "step-2"


def load_other(directory: Path) -> tuple[str, ...]:
    tensors = build_stage(2, 1, 1, 1, filled=False)
    if dist.get_rank() == 1:
        del tensors["optimizer.exp_avg.layers.2.norm.weight"]
        tensors["model.layers.9.norm.weight"] = torch.zeros(3)
        tensors["model.layers.3.norm.weight"] = torch.zeros(4)
        tensors["model.layers.3.colwise.bias"] = torch.zeros(13, dtype=torch.bfloat16)
    return raised(lambda: restore_checkpoint(directory, tensors))


def test_checkpoint_of_another_model_is_refused_with_all_differences_on_all_ranks(wide: Path) -> None:
    first, second = run_on_ranks(2, load_other, wide)
    assert first == second
    assert first == (
        f"{wide} lacks what this run needs (1): model.layers.9.norm.weight",
        f"{wide} holds what this run does not have (1): optimizer.exp_avg.layers.2.norm.weight",
        f"{wide} has other shapes (1): model.layers.3.norm.weight is (3,) in the checkpoint and (4,) in this run",
        f"{wide} has other number formats (1): model.layers.3.colwise.bias is torch.float32 in the checkpoint "
        "and torch.bfloat16 in this run",
        "it is a checkpoint of another model or optimizer: resume with its own, or choose another run directory",
    )


def test_long_lists_in_messages_are_shortened(tmp_path: Path) -> None:
    saved = save(tmp_path, 1, {f"model.{index}": torch.ones(1) for index in range(15)})
    problem, _ = raised(lambda: restore_checkpoint(saved, {}))
    assert problem.endswith("(15): " + ", ".join(f"model.{index}" for index in range(10)) + " and 5 more")


def damaged(tmp_path: Path, damage: Callable[[Path], object], name: str) -> str:
    saved = save(tmp_path, 1, build_plain(filled=True))
    damage(saved / name)
    (problem,) = raised(lambda: restore_checkpoint(saved, build_plain(filled=False)))
    return problem.removeprefix(f"{saved / name} ")


def test_damaged_files_are_named(tmp_path: Path) -> None:
    data, table = "__0_0.distcp", ".metadata"
    assert damaged(tmp_path, Path.unlink, data) == "is missing; use another checkpoint"
    cut = damaged(tmp_path, lambda path: os.truncate(path, 100), data)
    assert cut.startswith("has 100 bytes and should have ")
    for name in (data, table):
        zeros = damaged(tmp_path, lambda path: path.write_bytes(bytes(path.stat().st_size)), name)
        assert zeros == "is not what was written: the size is right, but the content differs; use another checkpoint"
    assert damaged(tmp_path, Path.unlink, table) == "is missing; use another checkpoint"


def load_with_one_bad_rank(directory: Path) -> tuple[str, ...]:
    if dist.get_rank() == 1:
        directory = directory.with_name("nowhere")
    return raised(lambda: restore_checkpoint(directory, {}))


def test_unreadable_file_on_one_rank_stops_all(wide: Path) -> None:
    first, second = run_on_ranks(2, load_with_one_bad_rank, wide)
    assert first == second
    assert "nowhere/manifest.json: No such file or directory" in first[0]
