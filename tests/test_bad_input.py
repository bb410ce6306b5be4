"""Every user error is one clear line with exit code 2, without a traceback or a loss of data."""

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from meshtrain import cli, console
from meshtrain.checkpoint.storage.directory import list_checkpoints
from meshtrain.models.layout import local_tensor
from tests.ranks import run_on_ranks
from tests.training.runs import LLAMA_TEXT, RUN_TEXT, read_checkpoint, steps_of, write_text

GPT2_TEXT = """
[model]
type = "gpt2"
config = { vocab_size = 300, n_embd = 32, n_layer = 4, n_head = 4, n_positions = 32 }
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "meshtrain"]


@pytest.fixture(scope="module")
def directory_of_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with valid and invalid runs and texts, and a cache of the valid ones."""
    directory = tmp_path_factory.mktemp("bad")
    (directory / "run.toml").write_text(RUN_TEXT + GPT2_TEXT)
    (directory / "llama.toml").write_text(RUN_TEXT + LLAMA_TEXT)
    write_text(directory / "text.jsonl")
    (directory / "empty.jsonl").write_text("")
    (directory / "small.jsonl").write_text('{"text": "one two three"}\n')
    (directory / "broken.jsonl").write_text((directory / "text.jsonl").read_text() + '{"text": \n{"title": "x"}\n')
    (directory / "folder.jsonl").mkdir()
    (directory / "latin.txt").write_bytes("é".encode("latin-1"))
    (directory / "torn.jsonl.gz").write_bytes(b"not gzip")
    return directory


@pytest.fixture
def here(directory_of_runs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter that directory, as the first of two processes, without a run in it."""
    monkeypatch.chdir(directory_of_runs)
    monkeypatch.setenv("RANK", "0")
    shutil.rmtree("out", ignore_errors=True)
    return directory_of_runs


INTERLEAVED = ["plan.pipeline.schedule=Interleaved1F1B", "plan.pipeline.stages_per_rank=2"]
MISTAKES: dict[str, tuple[list[str], list[str]]] = {
    "a mistyped key": (
        ["run.toml", "plan.mesh.tq=2", "global_batchsize=3"],
        [
            "command line: plan.mesh.tq: unknown key; did you mean 'tp'?",
            "command line: global_batchsize: unknown key; did you mean 'global_batch_size'?",
        ],
    ),
    "a mistyped value of the model": (
        ["run.toml", "model.config.n_layers=3"],
        ["model.config.n_layers: gpt2 has no such value; did you mean 'n_layer'?"],
    ),
    "a rule that matches nothing": (
        [
            "run.toml",
            'plan.tensor.styles."transformer.h.*.mlpp.c_fc"="colwise"',
            "plan=families/gpt2",
            "plan.mesh.tp=2",
        ],
        [
            "tensor.styles: 'transformer.h.*.mlpp.c_fc' matches no module of the model; the nearest is "
            "'transformer.h.*.mlp.c_fc'"
        ],
    ),
    "a world size that the mesh does not divide": (
        ["run.toml", "plan.mesh.pp=2", "plan.mesh.tp=2"],
        [
            "mesh: pp 2 x dp_replicate 1 x ep 1 x cp 1 x tp 2 uses processes in groups of 4, but 2 is not a multiple "
            "of 4; start a multiple of 4, or change the degrees"
        ],
    ),
    "a mesh of another size": (
        ["run.toml", "plan.mesh.pp=2", "plan.mesh.dp_shard=2"],
        [
            "mesh: pp 2 x dp_replicate 1 x dp_shard 2 x ep 1 x cp 1 x tp 1 needs 4 processes, but there are 2; start "
            "4, or set plan.mesh.dp_shard = -1 to use all available processes"
        ],
    ),
    "attention heads": (
        ["run.toml", "plan.mesh.tp=2", "model.config.n_head=1"],
        ["mesh.tp = 2 does not divide the model's 1 attention heads (num_attention_heads); set mesh.tp to 1"],
    ),
    "the width of the MLP": (
        ["llama.toml", "plan.mesh.tp=2", "model.config.intermediate_size=49"],
        [
            "mesh.tp = 2 does not divide the width 49 of model.layers.0.mlp.gate_proj (colwise); set mesh.tp to one "
            "of 1, 7, 49"
        ],
    ),
    "float8 on shapes that no kernel multiplies": (
        ["run.toml", "plan.precision.compute=float8", "model.config.n_embd=40"],
        [
            "precision.compute = 'float8': no linear layer of the decoder layers can compute in it (skipped: "
            "transformer.h.*.attn.c_attn.q, transformer.h.*.attn.c_attn.k and 4 more; 40 inputs, not a multiple of "
            "16: transformer.h.*.attn.c_attn.q, transformer.h.*.attn.c_attn.k and 3 more; 40 outputs, not a multiple "
            "of 16: transformer.h.*.mlp.c_proj); compute in bfloat16, or change precision.float8.skip"
        ],
    ),
    "fewer layers than stages": (
        ["run.toml", "plan.mesh.pp=2", *INTERLEAVED, "model.config.n_layer=2"],
        ["mesh.pp x stages_per_rank makes 4 stages, but the model has only 2 layers; use fewer"],
    ),
    "fewer microbatches than stages": (
        ["run.toml", "plan.mesh.pp=2", "micro_batch_size=8"],
        [
            "pipeline.schedule = '1F1B' needs at least as many microbatches as stages: found 1 for 2 stages; "
            "raise global_batch_size to 16 or lower micro_batch_size"
        ],
    ),
    "a global batch that cannot be divided": (
        ["run.toml", "global_batch_size=9"],
        [
            "global_batch_size = 9 is not a multiple of dp 2 x micro_batch_size 1 = 2; set it to 8 or 10",
        ],
    ),
    "a sequence longer than the model": (
        ["run.toml", "data.sequence_length=33"],
        [
            "data.sequence_length = 33 is longer than the 32 positions of the model; shorten it, or raise "
            "n_positions of a new model"
        ],
    ),
    "several contradictions at once": (
        ["run.toml", "data.sequence_length=33", "plan.mesh.tp=2", "model.config.n_head=1", "micro_batch_size=3"],
        [
            "global_batch_size = 8 is not a multiple of dp 1 x micro_batch_size 3 = 3; set it to 6 or 9",
            "data.sequence_length = 33 is longer than the 32 positions of the model; shorten it, or raise "
            "n_positions of a new model",
            "mesh.tp = 2 does not divide the model's 1 attention heads (num_attention_heads); set mesh.tp to 1",
        ],
    ),
    "a tokenizer larger than the vocabulary": (
        ["run.toml", "model.config.vocab_size=280"],
        [
            "the tokenizer has 300 tokens, but the model's vocabulary has 280; set model.config.vocab_size = 300 "
            "or more for a new model, model.enlarge_vocabulary = true for a pretrained one, or use the tokenizer that "
            "belongs to it"
        ],
    ),
    "a run directory inside of a file": (
        ["run.toml", "run_directory=text.jsonl/out"],
        ["run_directory = text.jsonl/out: text.jsonl is not a directory; choose another directory"],
    ),
    "missing data": (
        ["run.toml", 'data.train=["texd.jsonl"]'],
        ['data.train: "{here}/texd.jsonl" does not exist; did you mean "text.jsonl"?'],
    ),
    "empty data": (
        ["run.toml", 'data.train=["text.jsonl", "empty.jsonl"]'],
        ['data.train: "{here}/empty.jsonl" is empty; leave it out, or write documents into it'],
    ),
    "a directory": (
        ["run.toml", 'data.train=["folder.jsonl"]'],
        [
            'data.train: "{here}/folder.jsonl" is a directory without a file of a known kind that holds anything; '
            "{here}/folder.jsonl holds nothing; use one of .jsonl, .jsonl.gz, .jsonl.zst, .json.gz, .json.zst, .txt, "
            ".txt.gz, .txt.zst, .parquet"
        ],
    ),
    "unreadable text": (
        ["run.toml", 'data.train=["latin.txt"]'],
        [
            "{here}/latin.txt: not UTF-8 text (byte 1: unexpected end of data); fix it, or leave such records out "
            'with data.on_bad_record = "skip"'
        ],
    ),
    "an unreadable archive": (
        ["run.toml", 'data.train=["torn.jsonl.gz"]'],
        [
            "{here}/torn.jsonl.gz: the gzip file is damaged: Not a gzipped file (b'no'); fix it, or leave such "
            'records out with data.on_bad_record = "skip"'
        ],
    ),
    "a broken line": (
        ["run.toml", 'data.train=["broken.jsonl"]'],
        [
            "{here}/broken.jsonl, line 61: not JSON (column 10: Expecting value); fix it, or leave "
            'such records out with data.on_bad_record = "skip"'
        ],
    ),
    "a source smaller than a batch": (
        ["run.toml", 'data.train=["small.jsonl"]', "data.tokenizer.vocab_size=258"],
        [
            "data.train: 1 documents with 14 tokens make 0 packed samples of 16 tokens, and one batch needs 8: provide "
            "more text or lower data.sequence_length to 1 or less"
        ],
    ),
    "a learning-rate schedule's argument": (
        ["run.toml", "learning_rate.arguments={ cycles = 1 }"],
        [
            "learning_rate: the schedule 'cosine' refuses its arguments: get_cosine_schedule_with_warmup() got an "
            "unexpected keyword argument 'cycles'"
        ],
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_user_error_is_reported_before_any_process_group(
    here: Path, mistake: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, problems = MISTAKES[mistake]
    monkeypatch.setenv("WORLD_SIZE", "2")
    console.configure()
    assert cli._exit_code(["train", *arguments]) == 2
    message = capsys.readouterr()
    assert message.err.splitlines() == [f"error: {problem.replace('{here}', str(here))}" for problem in problems]
    assert not (here / "out").exists()


def run_command(directory: Path, arguments: list[str], size_limit: int | None = None) -> tuple[int, str, str]:
    """Run a command line on this rank, and return its exit code and output."""
    os.chdir(directory)
    cli.SECONDS_FOR_RANK_0 = 0.0
    console.configure(rank=int(os.environ["RANK"]))
    if size_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size_limit, size_limit))
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as error:
        code = cli._exit_code(arguments)
    return code, out.getvalue(), error.getvalue()


def on_ranks(number: int, *arguments: str, size_limit: int | None = None) -> list[tuple[int, str, str]]:
    """Run a command line on several ranks of the current directory."""
    return run_on_ranks(number, run_command, Path.cwd(), list(arguments), size_limit, joins=False)


def test_broken_lines_can_be_skipped_and_are_counted(here: Path) -> None:
    skipping = ["train", "run.toml", 'data.train=["broken.jsonl"]', "data.on_bad_record=skip", "steps=1"]
    ((code, out, error),) = on_ranks(1, *skipping)
    assert code == 0
    assert [line.split(": ")[1] for line in error.splitlines()] == [f"{here}/broken.jsonl, line {n}" for n in (61, 62)]
    assert "Data: train 60 documents, 2,302 tokens; vocabulary 300; 2 bad records skipped; tokenized into" in out


def test_unwritable_run_directory_is_a_one_line_error(here: Path) -> None:
    # The data must be cached before, because its files are larger than the limit.
    assert on_ranks(1, "train", "run.toml", "steps=1", "run_directory=other")[0][0] == 0
    answers = on_ranks(2, "train", "run.toml", size_limit=1_000)
    problem = (
        f"cannot write into {here}/out: File too large; free disk space, or set run_directory to another directory"
    )
    assert [code for code, _, _ in answers] == [2, 2]
    assert [error for _, _, error in answers] == [f"error: {problem}\n", ""]


def run_in_own_directory(directories: list[Path], arguments: list[str]) -> tuple[int, str, str]:
    """Run a command line on this rank in a directory of its own, like on another machine."""
    return run_command(directories[int(os.environ["RANK"])], arguments)


def test_machines_with_different_text_are_refused(here: Path, tmp_path: Path) -> None:
    shutil.copy(here / "run.toml", tmp_path)
    write_text(tmp_path / "text.jsonl", seed=1)
    answers = run_on_ranks(2, run_in_own_directory, [here, tmp_path], ["train", "run.toml"], joins=False)
    host = socket.gethostname()
    problem = (
        f"the data of {host} is not that of {host}: text, tokenizer or Python version differs; use the same files on "
        "all machines"
    )
    assert [(code, error) for code, _, error in answers] == [(2, f"error: {problem}\n"), (2, "")]
    assert not (here / "out").exists()


@pytest.mark.parametrize("saving", ["checkpoint.in_background=false", "checkpoint.in_background=true"])
def test_full_disk_during_a_save_keeps_the_earlier_checkpoint(here: Path, saving: str) -> None:
    assert on_ranks(1, "train", "run.toml", "steps=2")[0][0] == 0
    saved = read_checkpoint(here / "out")
    answers = on_ranks(2, "train", "run.toml", "plan.mesh.pp=2", saving, size_limit=100_000)
    assert [code for code, _, _ in answers] == [2, 2]
    assert "steps was 2 and is 6; the learning rate follows its schedule over the new length\n" in answers[0][1]
    assert answers[0][2] == (
        f"error: ranks 0, 1 cannot write {here}/out/checkpoints/step-4.tmp: File too large; step 4 is not saved, and "
        "earlier checkpoints are untouched; make room, then resume\n"
    )
    assert [path.name for path in (here / "out" / "checkpoints").iterdir()] == ["step-2"]
    assert all(torch.equal(tensor, saved[name]) for name, tensor in read_checkpoint(here / "out").items())
    # There is space again.
    code, out, error = on_ranks(1, "train", "run.toml")[0]
    assert (code, error) == (0, "")
    assert "Resumed from out/checkpoints/step-2: step 2 done\nParameters checksum " in out
    assert [metrics["step"] for metrics in steps_of(here / "out")] == [1, 2, 3, 4, 5, 6]


def test_unwritable_metrics_stop_all_ranks(here: Path) -> None:
    answers = on_ranks(2, "train", "run.toml", "steps=40", "checkpoint.every=100", size_limit=5_000)
    assert [code for code, _, _ in answers] == [2, 2]
    assert answers[0][2] == (
        "error: cannot write metrics into out: File too large, so training stopped; free disk space, then start the "
        "run again; it resumes from its newest checkpoint\n"
    )
    # There is space again; the incomplete line has been removed.
    assert on_ranks(1, "train", "run.toml", "steps=3")[0][0] == 0
    assert [metrics["step"] for metrics in steps_of(here / "out")] == [1, 2, 3]


def poison_a_parameter(directory: Path, arguments: list[str]) -> tuple[tuple[int, str, str], list[int], bool]:
    """Damage a parameter of the second stage before the third step.

    Returns:
        The result of the command, the samples of the last step, and whether parameters changed.
    """
    from meshtrain.training import loop

    step_of_product, rank = loop.train_step, os.environ["RANK"]
    samples: list[int] = []
    untouched = []

    def spy(context: Any, step: int, batch: Any, sample_ids: Any) -> Any:
        parameters = [local_tensor(parameter.detach()) for _, parameter in context.pipeline.named_parameters()]
        if step == 2 and rank == "1":
            parameters[0].view(-1)[0] = torch.nan
        before = [parameter.clone() for parameter in parameters]
        samples[:] = sample_ids.tolist()
        try:
            return step_of_product(context, step, batch, sample_ids)
        finally:
            pairs = zip(before, parameters, strict=True)
            untouched.append(all(torch.equal(old.nan_to_num(), new.nan_to_num()) for old, new in pairs))

    loop.train_step = spy
    return run_command(directory, arguments), samples, untouched[-1]


@pytest.mark.parametrize("saving", ["checkpoint.in_background=false", "checkpoint.in_background=true"])
def test_loss_that_is_not_finite_stops_before_the_optimizer_step(here: Path, saving: str) -> None:
    command = ["train", "run.toml", "plan.mesh.pp=2", saving]
    answers = run_on_ranks(2, poison_a_parameter, here, command, joins=False)
    (first, samples, _), _ = answers
    assert [answer[0] for answer, _, _ in answers] == [2, 2]
    assert all(untouched for _, _, untouched in answers)
    assert first[2] == (
        "error: step 3: the loss is nan, the gradient norm nan; stopped before the optimizer step, so the parameters "
        f"and the last checkpoint are as they were. Samples of this step: {', '.join(map(str, samples))}; look at "
        'them, lower optimizer.learning_rate, set optimizer.max_gradient_norm, or set bad_steps.policy to "skip" or '
        '"rewind"\n'
    )
    assert [path.name for path in list_checkpoints(here / "out" / "checkpoints")] == ["step-2"]
    assert [metrics["step"] for metrics in steps_of(here / "out")] == [1, 2]


def break_the_evaluation(directory: Path, arguments: list[str]) -> tuple[int, str, str]:
    """Let the evaluation find a value that is not finite."""
    from meshtrain.training import loop
    from meshtrain.training.step import Evaluated

    loop.evaluate = lambda context, batches: Evaluated(float("inf"), 1, {})
    return run_command(directory, arguments)


def test_evaluation_that_is_not_finite_stops_before_the_checkpoint(here: Path) -> None:
    command = ["train", "run.toml", "data.validation=0.2", "evaluation.every=2"]
    ((code, _, error),) = run_on_ranks(1, break_the_evaluation, here, command, joins=False)
    assert (code, error) == (
        2,
        "error: step 2: the evaluation loss is inf, so the parameters are broken; training stopped before a "
        "checkpoint was written; lower optimizer.learning_rate, or set optimizer.max_gradient_norm\n",
    )
    assert list_checkpoints(here / "out" / "checkpoints") == []


def shell(directory_of_runs: Path, *command: str) -> subprocess.Popen:
    """Start a command like a user in a shell."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment["TORCH_DISTRIBUTED_DEBUG"] = "OFF"
    return subprocess.Popen(
        command, cwd=directory_of_runs, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


MESHTRAIN = [sys.executable, "-m", "meshtrain"]


@pytest.fixture(scope="module")
def shown(directory_of_runs: Path) -> dict[str, tuple[int, list[str], str]]:
    """Run real commands in parallel: name -> exit code, lines with `error:`, standard error."""
    run_on_ranks(1, run_command, directory_of_runs, ["train", "run.toml", "run_directory=half", "steps=2"], joins=False)
    new = ["train", "run.toml", "run_directory=new"]
    half = ["train", "run.toml", "run_directory=half"]
    absurd = ["train", "run.toml", "run_directory=absurd", "optimizer.learning_rate=10", "checkpoint.every=1"]
    # After such a large step float16 overflows, and the scale is at its minimum.
    absurd += ["plan.precision.compute=float16", "plan.precision.loss_scale.minimum=65536"]
    absurd += ["plan.precision.loss_scale.hysteresis=1"]
    processes = {
        "key": shell(directory_of_runs, *MESHTRAIN, *new, "plan.mesh.tq=2"),
        "check": shell(directory_of_runs, *MESHTRAIN, "check", *new[1:], "--world-size", "3", "plan.mesh.tp=2"),
        "another run": shell(directory_of_runs, *MESHTRAIN, *half, "seed=5"),
        "line": shell(directory_of_runs, *MESHTRAIN, *new, 'data.train=["broken.jsonl"]'),
        "torchrun": shell(directory_of_runs, *TORCHRUN, *new, "plan.mesh.pp=2", "plan.mesh.tp=2"),
        "disk": shell(
            directory_of_runs, "bash", "-c", 'ulimit -f 100 && exec "$@"', "bash", *TORCHRUN, *half, "plan.mesh.pp=2"
        ),
        "not finite": shell(directory_of_runs, *TORCHRUN, *absurd, 'learning_rate.name="constant"', "plan.mesh.pp=2"),
    }
    results = {}
    for name, process in processes.items():
        _, error = process.communicate(timeout=120)
        lines = [line for line in error.splitlines() if line.startswith("error:")]
        results[name] = (process.returncode, lines, error)
    return results


def test_user_error_of_one_process_is_one_line_with_exit_code_2(
    directory_of_runs: Path, shown: dict[str, tuple[int, list[str], str]]
) -> None:
    assert {name: shown[name][0] for name in ("key", "check", "another run", "line")} == {
        "key": 2,
        "check": 2,
        "another run": 2,
        "line": 2,
    }
    for name in ("key", "check", "line"):
        assert [line + "\n" for line in shown[name][1]] == [shown[name][2]]
    assert shown["key"][1] == ["error: command line: plan.mesh.tq: unknown key; did you mean 'tp'?"]
    assert "3 is not a multiple of 2; start a multiple of 2" in shown["check"][1][0]
    assert "broken.jsonl, line 61: not JSON" in shown["line"][1][0]
    assert shown["another run"][1] == [
        "error: half/run.toml: seed is 0 in that file and 5 in this run",
        "error: half holds another run; choose another run_directory, resume that run unchanged, or, to continue it "
        "with other settings, change half/run.toml too",
    ]


@pytest.mark.parametrize("name", ["torchrun", "disk", "not finite"])
def test_user_error_of_several_processes_is_printed_once(
    name: str, shown: dict[str, tuple[int, list[str], str]]
) -> None:
    code, lines, error = shown[name]
    assert code == 1, "of torchrun itself"
    assert "exitcode  : 2" in error
    assert len(lines) == 1
    # torchrun prints a traceback of its own.
    assert "/meshtrain/" not in error


def test_messages_and_files_of_failed_processes(
    directory_of_runs: Path, shown: dict[str, tuple[int, list[str], str]]
) -> None:
    assert shown["torchrun"][1] == [f"error: {MISTAKES['a world size that the mesh does not divide'][1][0]}"]
    temporary = directory_of_runs / "half" / "checkpoints" / "step-4.tmp"
    assert shown["disk"][1][0].startswith(f"error: ranks 0, 1 cannot write {temporary}: File too large;")
    assert [path.name for path in list_checkpoints(directory_of_runs / "half" / "checkpoints")] == ["step-2"]
    assert shown["not finite"][1][0].startswith("error: step 2: the loss is nan, the gradient norm nan; stopped before")
    assert [path.name for path in list_checkpoints(directory_of_runs / "absurd" / "checkpoints")] == ["step-1"]
    assert json.loads((directory_of_runs / "absurd" / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 1
