"""Weights saved in the shards of a mesh are loaded on another mesh, and merged by one process."""

import resource
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from meshtrain import cli
from meshtrain.checkpoint.huggingface.export import merge
from meshtrain.checkpoint.huggingface.pretrained import owned_tensors, write_pretrained
from meshtrain.checkpoint.manifest import read_manifest
from meshtrain.checkpoint.parallelized import write_parallelized
from meshtrain.checkpoint.storage.named_folder import locked_folder
from meshtrain.config.mesh import MeshPlan
from meshtrain.errors import CheckpointError
from meshtrain.models.layout import local_tensor
from meshtrain.parallel.pipeline import Pipeline, full_tensor
from meshtrain.training.saving import save_state
from meshtrain.training.state import TrainState, load_weights_of
from tests.checkpoint.folders import assert_same, pipeline_of, stock_of, tiny_pipeline
from tests.parity import Case, build
from tests.ranks import run_on_ranks
from tests.tiny import tiny_config

SAVED_ON = Case("gpt2-odd", (1, 2, 1, 2))
LOADED_ON = Case("gpt2-odd", (2, 1, 1, 1))


def save(case: Case, folder: Path) -> None:
    write_parallelized(pipeline_of(case), folder)


def load(case: Case, folder: Path, out: Path) -> None:
    pipeline: Pipeline = build(case)
    load_weights_of(folder, pipeline)
    wanted = owned_tensors(pipeline_of(case))
    for name, tensor in owned_tensors(pipeline).items():
        assert torch.equal(full_tensor(tensor), full_tensor(wanted[name])), name
    write_pretrained(pipeline, out)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that four ranks wrote, with two copies of a model over tp = 2."""
    folder = tmp_path_factory.mktemp("saved") / "parts"
    run_on_ranks(4, save, SAVED_ON, folder)
    return folder


def test_parallelized_weights_load_on_another_mesh_and_merge_in_one_process(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_on_ranks(2, load, LOADED_ON, saved, tmp_path / "loaded")
    assert cli._exit_code(["merge", str(saved), str(tmp_path / "merged")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{tmp_path}/merged holds GPT2LMHeadModel"
    assert not dist.is_initialized()
    stock = stock_of("gpt2-odd")
    stock.save_pretrained(tmp_path / "stock")
    assert_same(tmp_path / "merged", tmp_path / "stock")
    assert_same(tmp_path / "loaded", tmp_path / "stock")


def test_merge_converts_to_the_chosen_dtype(saved: Path, tmp_path: Path) -> None:
    for name in ("float32", "bfloat16", "float16"):
        assert cli._exit_code(["merge", str(saved), str(tmp_path / name), "--dtype", name]) == 0
        stock_of("gpt2-odd").to(getattr(torch, name)).save_pretrained(tmp_path / f"{name}-stock")
        assert_same(tmp_path / name, tmp_path / f"{name}-stock")


def test_parallelized_weights_are_a_valid_checkpoint(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._exit_code(["checkpoint", "verify", str(saved)]) == 0
    assert cli._exit_code(["checkpoint", "list", str(saved)]) == 0
    text = capsys.readouterr().out
    assert "parts is intact: " in text
    assert "dp_replicate 2 x tp 2" in text
    files = read_manifest(saved).files
    num_bytes = sum(file.num_bytes for name, file in files.items() if name.endswith(".distcp"))
    weights = sum(parameter.nbytes for parameter in stock_of("gpt2-odd").parameters())
    # Two copies of the model are written once; each block has a header.
    assert weights < num_bytes < 1.5 * weights


def test_folders_that_cannot_be_merged_are_named(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged, foreign = tmp_path / "damaged", tmp_path / "foreign"
    shutil.copytree(saved, damaged)
    data = max(damaged.glob("*.distcp"), key=lambda file: file.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    stock_of("gpt2-odd").save_pretrained(foreign)
    # Discard the progress bar.
    capsys.readouterr()
    for source, out, message in (
        (damaged, tmp_path / "out", f"{data} is not what was written: the size is right, but the content differs; use"),
        (foreign, tmp_path / "out", f"{foreign} has no manifest.json; use a folder that save_parallelized wrote, or"),
        (tmp_path / "none", tmp_path / "out", f"{tmp_path}/none is not a directory; use a folder that save_par"),
        (saved, foreign, f"{foreign} exists and is not empty; write into a new folder"),
    ):
        assert cli._exit_code(["merge", str(source), str(out)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {message}")
    assert not (tmp_path / "out").exists()


def save_badly(folders: list[Path]) -> list[str]:
    pipeline, messages = pipeline_of(LOADED_ON), []
    for folder in folders:
        if folder.name == "full" and dist.get_rank() == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
        with pytest.raises(CheckpointError) as caught:
            write_parallelized(pipeline, folder, tokenizer=tokenizer_for(folder))
        messages.append(str(caught.value))
    return messages


def tokenizer_for(folder: Path) -> str | None:
    return "nowhere" if folder.name == "without" else None


def test_refused_save_is_a_one_line_error_on_all_ranks_and_leaves_no_files(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").touch()
    first, second = run_on_ranks(2, save_badly, [tmp_path / name for name in ("taken", "without", "full")])
    assert first == second
    taken, without, full = first
    assert taken == f"{tmp_path}/taken exists and is not empty; write into a new folder"
    assert without == "tokenizer = 'nowhere' is not a directory with a tokenizer; pass one, or the tokenizer itself"
    assert full == f"rank 1 cannot write {tmp_path}/full: File too large; make room or write elsewhere"
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def save_where_another_writes(folder: Path) -> list[str]:
    pipeline, messages = pipeline_of(LOADED_ON), []
    state = TrainState(pipeline, step=1)
    saves = (write_parallelized, write_pretrained, lambda _, root: save_state(root, pipeline, state, keep=1))
    with locked_folder(folder) if dist.get_rank() == 0 else nullcontext():
        dist.barrier()
        for save_there in saves:
            with pytest.raises(CheckpointError) as caught:
                save_there(pipeline, folder)
            messages.append(str(caught.value))
        dist.barrier()
    return messages


def test_folder_in_use_by_another_process_is_refused_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_on_ranks(2, save_where_another_writes, tmp_path / "out")
    assert first == second
    assert len(set(first)) == 1
    assert first[0].startswith(f"{tmp_path}/out is in use by process ")
    assert first[0].endswith("; wait until it ends, end it, or write into another folder")
    assert list(tmp_path.iterdir()) == []


def save_twice(folder: Path) -> None:
    pipeline = pipeline_of(LOADED_ON)
    folder.mkdir(exist_ok=True)
    write_parallelized(pipeline, folder)
    for _, parameter in pipeline.named_parameters():
        local_tensor(parameter.detach()).zero_()


def test_empty_folder_is_filled_and_a_step_name_is_kept(tmp_path: Path) -> None:
    run_on_ranks(2, save_twice, tmp_path / "step-7")
    assert [path.name for path in tmp_path.iterdir()] == ["step-7"]
    assert read_manifest(tmp_path / "step-7").step == 7


def save_through_links(folder: Path) -> None:
    pipeline = pipeline_of(LOADED_ON)
    write_parallelized(pipeline, folder / "parts")
    write_pretrained(pipeline, folder / "whole")


def test_link_is_followed_and_its_neighbors_are_kept(tmp_path: Path) -> None:
    for name in ("parts", "whole"):
        (tmp_path / "disk" / name).mkdir(parents=True)
        (tmp_path / name).symlink_to(tmp_path / "disk" / name)
        (tmp_path / f"{name}.tmp").mkdir()
    run_on_ranks(2, save_through_links, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "parts", "parts.tmp", "whole", "whole.tmp"]
    assert read_manifest(tmp_path / "disk" / "parts").step == 0
    assert (tmp_path / "disk" / "whole" / "model.safetensors").is_file()


def fill_with(pipeline: Pipeline, value: float) -> None:
    with torch.no_grad():
        for tensor in owned_tensors(pipeline).values():
            local_tensor(tensor).fill_(value)


def save_filled(folder: Path) -> None:
    pipeline = tiny_pipeline(tiny_config("deepseek_v3"), MeshPlan(tp=2, dp_shard=1))
    fill_with(pipeline, 0.5)
    write_parallelized(pipeline, folder)


def load_filled(folder: Path) -> set[str]:
    pipeline = tiny_pipeline(tiny_config("deepseek_v3"), MeshPlan(pp=2, dp_shard=1))
    fill_with(pipeline, 0.0)
    load_weights_of(folder, pipeline)
    assert all(bool((local_tensor(tensor) == 0.5).all()) for tensor in owned_tensors(pipeline).values())
    return {name for name, _ in pipeline.saved_buffers()}


def test_saved_buffers_are_loaded_and_merged(tmp_path: Path) -> None:
    run_on_ranks(2, save_filled, tmp_path / "parts")
    first, last = run_on_ranks(2, load_filled, tmp_path / "parts")
    assert first | last == {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2, 3)}
    merge(tmp_path / "parts", tmp_path / "merged")
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(report.values())
    assert all(bool((tensor == 0.5).all()) for tensor in loaded.state_dict().values())
