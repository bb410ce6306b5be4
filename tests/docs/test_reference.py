"""The references, generated and hand-written, contain everything that the code has."""

import ast
import importlib
import json
import re
from typing import Any, Literal, get_args

import pytest
from mkdocs.exceptions import PluginError
from rich.text import Text

import meshtrain
import mkdocs_hooks
from docs.generate import commands, configuration, coverage, terminal
from meshtrain.config.plan import Style
from meshtrain.config.schedules import ScheduleName
from meshtrain.config.schema import Schema, described_schema, keys_of, resolved, subschema
from meshtrain.parallel.routers.formulas import AUXILIARY_LOSS, Z_LOSS
from meshtrain.training import directory
from meshtrain.training.directory import FREE
from meshtrain.training.epoch_averages import AVERAGED
from meshtrain.training.files import SAVED_KEY
from tests.docs.blocks import ROOT

KINDS: tuple[Literal["run", "plan", "corpus"], ...] = ("run", "plan", "corpus")
UNITS = re.compile(
    r"seconds|steps?\b|sequences|samples|tokens|megabytes|GB\b|fraction|factor|number of|copies|processes|stages|layer"
    r"|times|overflows|tasks|probability|rate\b|norm\b|similarity|standard deviations|scale\b|decay|share|denominator"
    r"|seed",
    flags=re.IGNORECASE,
)


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def keys(kind: Literal["run", "plan", "corpus"]) -> list[str]:
    """Return every key of a file that its own page describes."""
    names = (".".join(key) for key in keys_of(described_schema(kind)))
    return [name for name in names if not (kind == "run" and name.startswith("plan."))]


def of_sources(schema: Schema) -> list[str]:
    tables = subschema(schema, ("data", "sources"))
    assert tables is not None
    return [f"data.sources.NAME.{name}" for name in resolved(schema, tables["additionalProperties"])["properties"]]


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_is_on_its_page_with_type_default_and_description(kind: Literal["run", "plan", "corpus"]) -> None:
    text = configuration.page(kind)
    expected = keys(kind) + (of_sources(described_schema("run")) if kind == "run" else [])
    anchors = re.findall(r"\{ #([\w.-]+) ", text)
    assert set(expected) == set(anchors) - {"data.sources.NAME"}
    assert len(anchors) == len(set(anchors))
    for entry in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        name, facts, meaning = entry.partition("\n## ")[0].split("\n\n", 2)
        assert "Type: " in facts, name
        assert "Default: " in facts or "**Required**" in facts or name.startswith("`plan`"), name
        assert meaning.strip().endswith("."), name


@pytest.mark.parametrize("kind", KINDS)
def test_every_allowed_value_is_on_the_page(kind: Literal["run", "plan", "corpus"]) -> None:
    text, schema = configuration.page(kind), described_schema(kind)
    for key in keys(kind):
        part: Any = subschema(schema, tuple(key.split(".")))
        for form in part.get("anyOf", [part]):
            for word in form.get("enum", ()):
                assert f"`{json.dumps(word)}`" in text, f"{key}: {word}"


@pytest.mark.parametrize("kind", KINDS)
def test_number_has_a_unit(kind: Literal["run", "plan", "corpus"]) -> None:
    schema = described_schema(kind)
    for key in keys(kind):
        part: Any = subschema(schema, tuple(key.split(".")))
        forms = {form.get("type") for form in part.get("anyOf", [part])}
        if forms & {"integer", "number"}:
            assert UNITS.search(part["description"]), f"{key}: {part['description']}"


def test_every_command_is_described_with_its_arguments_and_options() -> None:
    text = commands.page()
    found = list(commands.all_commands())
    assert {"meshtrain train", "meshtrain checkpoint verify", "meshtrain tokenizer train"} <= {
        name for name, _ in found
    }
    for name, command in found:
        (section,) = re.findall(rf"^## `{name}` .*?(?=^## |\Z)", text, flags=re.MULTILINE | re.DOTALL)
        for param in command.params:
            shown = param.opts[0] if param.param_type_name == "option" else param.metavar
            assert f"`{shown}`\n:   " in section, f"{name}: {shown}"
            assert param.help, f"{name} {shown} has no help"


def test_every_public_name_is_in_the_api_reference() -> None:
    shown = re.findall(r"^::: meshtrain\.(\w+)$", page("reference/api.md"), flags=re.MULTILINE)
    assert sorted(set(shown) - {"errors"}) == sorted(meshtrain.__all__)
    assert all(getattr(meshtrain, name).__doc__ for name in meshtrain.__all__)


def test_every_style_and_schedule_has_a_row() -> None:
    text = mkdocs_hooks.on_page_markdown(page("guides/plan.md"))
    schedules = re.findall(r"^\| `(\w+)` \| ((?:1|2, in a V|any number) \| .+ \| (?:yes|no)) \|$", text, re.MULTILINE)
    assert tuple(name for name, _ in schedules) == get_args(ScheduleName)
    assert dict(schedules)["DualPipeV"] == "2, in a V | at least as many as stages | yes"
    rows = {name: cells for name, *cells in re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+\.) \|$", text, re.MULTILINE)}
    assert rows.keys() == set(get_args(Style))
    assert rows["rowwise"] == ["Linear, Conv1D", "The inputs are sharded, and the results summed."]


def test_every_shipped_plan_has_a_row() -> None:
    shipped = {path.stem for path in (ROOT / "parallel_plans").glob("*.toml")}
    assert shipped <= set(re.findall(r"^\| `([\w-]+)` \|", page("guides/plan.md"), flags=re.MULTILINE))


def test_keys_that_a_resumed_run_may_change_are_listed() -> None:
    sentence = re.search(r"other values of these keys:\n\n(.*?)\.\n\n", page("guides/checkpoints.md"), flags=re.DOTALL)
    assert sentence is not None
    assert sorted(re.findall(r"`([\w.]+)`", sentence[1])) == sorted(FREE)


def keys_of_metrics() -> set[str]:
    """Return the keys of metrics.jsonl, from the tables that the code makes for hooks."""
    found = {SAVED_KEY, "step", AUXILIARY_LOSS, Z_LOSS, *(f"epoch_{name}" for name in AVERAGED[:2])}
    package = ROOT / "meshtrain"
    for path in [*(package / "training").glob("*.py"), package / "parallel" / "experts" / "use.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.FunctionDef(name="metrics" | "_metrics" | "note" | "averages", body=made):
                    tables = made
                case ast.Assign(targets=[ast.Name(id="metrics" | "note" | "of_each")], value=made):
                    tables = [made]
                case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="hooks")), args=made):
                    tables = made
                case _:
                    continue
            within = [part for table in tables for part in ast.walk(table) if isinstance(part, ast.Dict | ast.DictComp)]
            for table in within:
                for key in table.keys if isinstance(table, ast.Dict) else [table.key]:
                    match key:
                        case ast.Constant(value=str(name)):
                            found.add(name)
                        case ast.JoinedStr(values=[ast.Constant(value=str(prefix)), _]) if prefix.endswith("/"):
                            found.add(f"{prefix}NAME")
    return found


def test_every_file_and_metric_of_a_run_is_on_its_page() -> None:
    text = page("reference/run-directory.md")
    files = re.findall(r"^RUN/(\S+)", directory.__doc__ or "", flags=re.MULTILINE)
    assert len(files) == 13
    assert [name for name in files if not re.search(rf"^\| `{name}/?` \|", text, flags=re.MULTILINE)] == []
    keys = keys_of_metrics()
    assert {"loss", "samples/NAME", "eval_loss/NAME", "router_aux_loss", "bad_steps", "loss_scale", "answer"} <= keys
    assert {"parameters_checksum", "checkpoint", "checkpoint_background_seconds", "epoch_steps", "eval_loss"} <= keys
    assert sorted(key for key in keys if f"`{key}`" not in text) == []


def test_pictures_of_the_terminal_are_drawn_from_the_capture() -> None:
    output = (terminal.PICTURES / "quickstart.ansi").read_text()
    for name, theme in terminal.THEMES.items():
        assert (terminal.PICTURES / f"terminal-{name}.svg").read_text() == terminal.draw(output, theme)
    lines = {line.rstrip() for line in Text.from_ansi(output).plain.splitlines()}
    (sample,) = re.findall(r"^== meshtrain train .*?tokens per step$", page("start.md"), re.MULTILINE | re.DOTALL)
    assert set(sample.splitlines()) <= lines


def test_every_error_class_is_in_the_api_reference() -> None:
    errors = importlib.import_module("meshtrain.errors")
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert kinds - {"MeshtrainError", "MissingAttribute"} <= set(re.findall(r"\w+", page("reference/api.md")))


def test_coverage_page_has_every_row_of_the_table() -> None:
    table = (ROOT / "parallel_plans" / "coverage.md").read_text()
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    html = coverage.page(table)
    assert html.count("<tr>") == len(rows) + 1
    assert "<script" not in coverage.page("# T\n\n| a | b |\n|---|---|\n| <script> | proven |\n")
    with pytest.raises(ValueError, match="a row of the coverage table has 1 cells, its header 2"):
        coverage.rows_of("| a | b |\n|---|---|\n| c |\n")


def test_pages_show_the_numbers_of_the_coverage_table() -> None:
    table = (ROOT / "parallel_plans" / "coverage.md").read_text()
    counts = dict(re.findall(r"(?:^|\. )([\w ]+): proven are (\d+ of \d+) model types", table, re.M))
    pipeline, total = counts["pipeline x sharding"].split(" of ")
    tensor = counts["tensor"].split(" of ")[0]
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"{pipeline} of {total} model types proven under pp x dp, {tensor} under tp" in readme
    assert f"{tensor} of {total} model types proven, GPT-2 included" in readme
    verify = " ".join(page("guides/verify.md").split())
    assert re.search(rf"Of {total} types \(\d+ classes\), {pipeline} are proven .* Under tp 2, {tensor} are", verify)


def test_unknown_generated_section_is_refused() -> None:
    with pytest.raises(PluginError, match="nothing generates 'nothing'"):
        mkdocs_hooks.on_page_markdown("<!-- generated: nothing -->")


def test_resources_from_other_hosts_are_found() -> None:
    html = '<script src="https://a.example/x.js"></script><a href="https://b.example">b</a><img src="x.svg">'
    assert mkdocs_hooks.foreign_resources(html) == ["https://a.example/x.js"]
    assert mkdocs_hooks.foreign_resources('<link rel="stylesheet" href="//c.example/x.css">') == ["//c.example/x.css"]
    assert mkdocs_hooks.foreign_resources(
        "@import 'https://d.example/f.css'; a { b: url(https://e.example/g.woff) }"
    ) == [
        "https://d.example/f.css",
        "https://e.example/g.woff",
    ]


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 180
