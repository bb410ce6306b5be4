"""Every code block of README.md and the docs is parsed, loaded or compared with the code."""

import ast
import importlib.util
import inspect
import re
import subprocess
import textwrap
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from torch.distributed.run import get_args_parser

import meshtrain
from meshtrain.cli import app
from meshtrain.config.settings import Settings
from meshtrain.config.toml import load_corpus, load_machine, load_plan, load_run
from meshtrain.tuning.sweep.choices import combinations, read_choices
from meshtrain.tuning.sweep.command import SCRIPT_NAME
from tests.docs.blocks import LANGUAGES, PAGES, ROOT, Block, blocks, commands, output_lines
from tests.docs.messages import fits_a_message, is_message, templates

ROWS_OF_MESSAGES = re.compile(r"^\| (`{1,2}) ?(.+?) ?\1 \|", re.MULTILINE)
COMMAND = typer.main.get_command(app)
FOREIGN = {"cd", "kill", "kubectl", "mlflow", "pkill", "scontrol", "tensorboard", "trackio", "wandb"}
"""Programs whose arguments are not looked at."""
SAID = ("error: ", "rank ", "Damaged: ", "Resumed from ", "Stopped by ", "Validation loss ", "global batch ")
"""Lines of output that begin so are compared with the code."""
BASE = """
run_directory = "out"
steps = 10
global_batch_size = 8
"""
NEW_MODEL = 'model.type = "llama"\n'


def shown(block: Block) -> str:
    return block.location


def test_every_block_names_its_language() -> None:
    assert [block.location for block in blocks() if block.language not in LANGUAGES] == []


@pytest.mark.parametrize("block", blocks("yaml"), ids=shown)
def test_yaml_is_a_task_of_the_harness(block: Block) -> None:
    needed = {"task", "dataset_path", "test_split", "output_type", "doc_to_text", "doc_to_target", "metric_list"}
    assert needed <= yaml.safe_load(block.text).keys()


@pytest.mark.parametrize("block", blocks("python"), ids=shown)
def test_python_compiles_and_calls_existing_names(block: Block) -> None:
    tree = ast.parse(block.text)
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="meshtrain"), attr=name)):
                arguments = [None] * len(node.args)
                keywords = {keyword.arg: None for keyword in node.keywords if keyword.arg}
                inspect.signature(getattr(meshtrain, name)).bind(*arguments, **keywords)
            case ast.Attribute(value=ast.Name(id="meshtrain"), attr=name):
                assert name in meshtrain.__all__


@pytest.mark.parametrize("block", blocks("toml"), ids=shown)
def test_toml_loads(block: Block, tmp_path: Path) -> None:
    kind = block.kind.removeprefix("part of ")
    load: dict[str, Any] = {
        "run": load_run,
        "plan": load_plan,
        "corpus": load_corpus,
        "machine": load_machine,
    }
    assert kind in load, f'{block.location}: write <!-- toml: run --> above it, or another kind, or "part of run"'
    text = block.text
    if block.kind.startswith("part of "):
        own = tomllib.loads(text)
        needed = (BASE + NEW_MODEL).strip().splitlines() if kind == "run" else []
        missing = [line for line in needed if line.partition(" ")[0].partition(".")[0] not in own]
        text = "\n".join([*missing, text])
    (tmp_path / "file.toml").write_text(text)
    assert isinstance(load[kind](tmp_path / "file.toml"), Settings)


@pytest.mark.parametrize("block", [block for block in blocks("bash", "console", "text") if commands(block)], ids=shown)
def test_commands_parse(block: Block, tmp_path: Path) -> None:
    for words in commands(block):
        check_command(words, tmp_path)


def check_command(words: list[str], scratch: Path) -> None:
    """Check a command with the parser of its program, and that the repository has its files."""
    program, *arguments = words
    for word in words:
        if re.match(r"(\./)?(launch|parallel_plans|docs|tests)/", word):
            assert (ROOT / word).exists(), word
    if program == "meshtrain":
        check_meshtrain(arguments, scratch)
    elif program == "torchrun":
        parsed = get_args_parser().parse_args(arguments)
        if parsed.module:
            assert parsed.training_script == "meshtrain"
            check_meshtrain(parsed.training_script_args, scratch)
    elif program == "python":
        check_python(arguments)
    elif program in ("./launch/local.sh", "sbatch"):
        run = [index for index, word in enumerate(arguments) if word.endswith(".toml")]
        if run or not arguments[-1].endswith(f"/{SCRIPT_NAME}"):
            check_overrides(*arguments[run[0] :], scratch=scratch)
    elif program == "pip":
        check_pip(arguments)
    else:
        assert program in FOREIGN or program.startswith("./launch/"), words


def check_meshtrain(arguments: list[str], scratch: Path) -> None:
    """Parse the arguments of `meshtrain` with typer, and load the run that they name."""
    command, rest = COMMAND, arguments
    while hasattr(command, "commands"):
        name, *rest = rest
        assert name in command.commands, f"meshtrain has no command {name}"
        command = command.commands[name]
    context = command.make_context(command.name, list(rest))
    overrides = context.params.get("overrides") or []
    if command.name == "sweep":
        overrides = combinations(read_choices(context.params["choices"]))[-1].overrides
    if (run := context.params.get("run")) is not None:
        check_overrides(str(run), *overrides, scratch=scratch)
    elif command.name == "corpus":
        # A file without a folder is one that the page has shown.
        if "/" in str(context.params["file"]):
            load_corpus(context.params["file"], overrides)
    elif overrides:
        load_plan(None, overrides)


def check_overrides(run: str, *overrides: str, scratch: Path) -> None:
    """Load a run of the repository, or a run that the reader is to write, with the overrides."""
    path = ROOT / run
    if not path.exists():
        path = scratch / "base.toml"
        names_a_model = any(override.startswith("model.path=") for override in overrides)
        path.write_text(BASE + ("" if names_a_model else NEW_MODEL))
    load_run(path, overrides)


def check_python(arguments: list[str]) -> None:
    """Check that a module exists and that its source contains the flags."""
    dash_m, module, *flags = arguments
    assert dash_m == "-m"
    spec = importlib.util.find_spec(module)
    if spec is not None and spec.origin is None:
        # A folder runs its __main__.py.
        spec = importlib.util.find_spec(f"{module}.__main__")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    assert [flag for flag in flags if flag.startswith("--") and f'"{flag}"' not in source] == []


def check_pip(arguments: list[str]) -> None:
    """Check that the extras exist."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in re.findall(r"\[(\w+)\]", " ".join(arguments)):
        assert extra in extras


@pytest.mark.parametrize("block", blocks("text", "console"), ids=shown)
def test_shown_lines_and_tables_match_the_code(block: Block) -> None:
    lines = output_lines(block)
    for line in lines:
        if line.startswith(SAID):
            message = re.sub(r"^(error: |rank \d+ stops: |rank \d+: )", "", line).removesuffix(" ...")
            assert fits_a_message(message), line
    for header, rule in pairwise(lines):
        if set(rule) == {"─"}:
            assert [cell for cell in re.split(r" {2,}", header.strip()) if cell not in templates()] == []


def test_messages_of_the_troubleshooting_page_match_the_code() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    messages = [match[2].replace("\\|", "|") for match in ROWS_OF_MESSAGES.finditer(page)]
    assert len(messages) > 40
    assert [message for message in messages if not is_message(message)] == []


def test_names_in_running_text_exist() -> None:
    """Check the repository files, test modules and package names that sentences mention."""
    wrong = []
    for page in PAGES:
        text = page.read_text()
        for path in re.findall(r"`((?:launch|parallel_plans|meshtrain|tests|docs)/[\w./-]+)`", text):
            wrong += [path] * (not (ROOT / path).exists() and path not in ("tests/x", "meshtrain/x"))
        for name in re.findall(r"`meshtrain\.(\w+)", text):
            wrong += [name] * (name not in meshtrain.__all__)
        for module in re.findall(r"`python -m ([\w.]+)", text):
            wrong += [module] * (importlib.util.find_spec(module) is None)
    assert wrong == []


DIFFS = re.findall(r"^ {4}```diff\n(.*?)^ {4}```$", (ROOT / "docs" / "contributing.md").read_text(), re.M | re.S)


@pytest.mark.parametrize("diff", DIFFS, ids=["schedule", "style", "optimizer", "axis"])
def test_diffs_of_the_contributing_page_apply(diff: str, tmp_path: Path) -> None:
    """A diff applies to this tree, or has been applied to it already."""
    (tmp_path / "diff").write_text(textwrap.dedent(diff))
    check = ["git", "apply", "--check", str(tmp_path / "diff")]
    answers = [subprocess.run([*check, *way], cwd=ROOT, capture_output=True, text=True) for way in ((), ("-R",))]
    assert 0 in [answer.returncode for answer in answers], answers
