"""Reading runs, plans, corpora and machines from TOML, and writing them."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import ValidationError

from meshtrain.config.arguments import check_strings, described, path_text
from meshtrain.config.corpus import CorpusConfig
from meshtrain.config.machine import MachineConfig
from meshtrain.config.parsing import parse_toml, unusable_values
from meshtrain.config.paths import CORPUS_PATHS, PATHS, with_absolute_paths
from meshtrain.config.plan import ParallelPlan
from meshtrain.config.problems import Explainer, place, problem, shortened
from meshtrain.config.reading import Reader, absolute_path, names_plan, plan_path, shown_path
from meshtrain.config.run import RunConfig
from meshtrain.config.schema import Kind, json_schema
from meshtrain.config.settings import Settings
from meshtrain.config.tables import Key, Setting, SettingSource, Table, as_table, merge_tables, plain
from meshtrain.errors import ConfigError, Problem

W = TypeVar("W", bound=Settings)
FORM = "expected key=value, as in plan.mesh.tp=4"
QUOTING = """quote lists and tables for the shell, as in 'data.train=["a.jsonl"]'"""
PLAN_FILE = "a .toml or .json file, or the name of a shipped plan, such as 'families/gpt2'"


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run file, what it extends, and the overrides on top.

    Args:
        path: the file.
        overrides: `key=value` in TOML; later ones win. `plan=name` starts from another plan,
            whatever its position.

    Returns:
        The run with its plan, checked and frozen.

    Raises:
        ConfigError: with every problem of all files and overrides.

    Source: TOML 1.0 (toml.io); the keys are those of transformers, torch and torchtitan.
    """
    named = path_text("load_run: path", path, wanted="a .toml or .json file")
    file = absolute_path(named, Path.cwd())
    reader = Reader()
    table = reader.read_root(named, file, reader.read_run)
    for top in sorted(read_overrides(overrides, reader.problems), key=names_plan, reverse=True):
        reader.lay_over_run(table, top)
    return _checked(RunConfig, "run", table, file, reader.problems)


def load_plan(path_or_name: str | Path | None, overrides: Sequence[str] = ()) -> ParallelPlan:
    """Read a plan file or a shipped plan, what it extends, and the overrides on top.

    Args:
        path_or_name: a path to a .toml or .json file, or the name of a shipped plan such as
            "families/gpt2"; None: the overrides alone.
        overrides: `key=value` in TOML, such as `mesh.tp=4`; later ones win.

    Returns:
        The plan, checked and frozen.

    Raises:
        ConfigError: with every problem of all files and overrides.

    Source: TOML 1.0 (toml.io); the styles are transformers' tensor-parallel plans, the schedules
    torch's.
    """
    if path_or_name is None:
        return _overridden(ParallelPlan, "plan", {}, Path.cwd() / "plan", overrides, [])
    named = path_text("load_plan: path_or_name", path_or_name, wanted=PLAN_FILE)
    file, reader = plan_path(named, Path.cwd()), Reader()
    table = reader.read_root(named, file, reader.read_plan)
    return _overridden(ParallelPlan, "plan", table, file, overrides, reader.problems)


def read_plan(plan: ParallelPlan | Mapping[str, Any] | str | Path) -> ParallelPlan:
    """Return a plan that is passed as a ParallelPlan, as a table, or as a file.

    Args:
        plan: a ParallelPlan; a table such as `{"mesh": {"tp": 4}}`, which may name a plan that it
            `extends`; a path to a .toml or .json file; or the name of a shipped plan.

    Raises:
        ConfigError: with every problem.
    """
    if isinstance(plan, ParallelPlan):
        return plan
    if not isinstance(plan, Mapping):
        return load_plan(path_text("plan", plan, wanted=f'a table such as {{"mesh": {{"tp": 4}}}}, {PLAN_FILE}'))
    reader, source = Reader(), SettingSource("plan", Path.cwd())
    table = reader.lay_over_named(as_table(_as_written(plan, source), source))
    return _checked(ParallelPlan, "plan", table, Path.cwd() / "plan", reader.problems)


def _as_written(value: Any, source: SettingSource, above: Key = ()) -> Any:
    """Return a program's table as a file has it: dicts with string keys, lists, plain integers.

    Raises:
        ConfigError: for a key that is not a string.
    """
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise ConfigError(problem(source, above, f"a key is {described(name)}", "use strings for keys"))
        return {name: _as_written(below, source, (*above, name)) for name, below in value.items()}
    if isinstance(value, list | tuple):
        return [_as_written(entry, source, above) for entry in value]
    # A bool is an integer too, and stays a bool; other integers (of numpy) become Python's.
    return value if isinstance(value, bool) or not isinstance(value, Integral) else int(value)


def load_corpus(path: str | Path, overrides: Sequence[str] = ()) -> CorpusConfig:
    """Read a corpus file, what it extends, and the overrides on top.

    Args:
        path: the file.
        overrides: `key=value` in TOML, such as `clean.minimum_tokens=64`; later ones win.

    Raises:
        ConfigError: with every problem of all files and overrides.
    """
    file, reader = absolute_path(str(path), Path.cwd()), Reader()
    table = reader.read_root(str(path), file, reader.read_corpus)
    return _overridden(CorpusConfig, "corpus", table, file, overrides, reader.problems)


def load_machine(path: str | Path) -> MachineConfig:
    """Read the description of a machine.

    Args:
        path: the file.

    Raises:
        ConfigError: with every problem.
    """
    file, reader = absolute_path(str(path), Path.cwd()), Reader()
    table = reader.read_root(str(path), file, reader.read_machine)
    return _overridden(MachineConfig, "machine", table, file, (), reader.problems)


def _overridden(
    settings_type: type[W],
    kind: Kind,
    table: Table,
    file: Path,
    overrides: Sequence[str],
    problems: list[Problem],
) -> W:
    for top in read_overrides(overrides, problems):
        merge_tables(table, top)
    return _checked(settings_type, kind, table, file, problems)


def _checked(settings_type: type[W], kind: Kind, table: Table, file: Path, problems: list[Problem]) -> W:
    explainer = Explainer(
        table, json_schema(kind), asked=SettingSource(shown_path(file), file.parent), is_whole=not problems
    )
    problems = problems + explainer.explain_removals()
    try:
        paths = CORPUS_PATHS if kind == "corpus" else PATHS
        settings = settings_type.model_validate(plain(with_absolute_paths(table, paths)))
    except ValidationError as error:
        raise ConfigError(dict.fromkeys(problems + explainer.explain(error))) from None
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    return settings


def read_overrides(lines: Sequence[str], problems: list[Problem]) -> list[Table]:
    """Return a table for each override; those that cannot be read are added to `problems`.

    A value that is not TOML is taken as a string (`run_directory=out`). An empty value removes the
    key (`epochs=`), so that a key that excludes it can be set.

    Raises:
        ConfigError: if `lines` is not a list of strings.
    """
    check_strings("overrides", lines, "a list of strings, such as ['mesh.tp=4']")
    source = SettingSource("command line", Path.cwd())
    tables = []
    for line in lines:
        try:
            values = _parsed_override(line)
        except ValueError:
            advice = QUOTING if _is_compound(line) else FORM
            problems.append(problem(source, (), f"cannot read {shortened(repr(line))}", advice))
            continue
        unusable = [found.concerning(place(source, key)) for key, found in unusable_values(values)]
        if unusable:
            problems += unusable
            continue
        table = as_table(values, source)
        if isinstance(table.get("extends"), Setting):
            problems.append(problem(source, ("extends",), "only a file can extend another", "name that file instead"))
            continue
        tables.append(table)
    return tables


def _parsed_override(line: str) -> dict[str, Any]:
    key, equals, value = line.partition("=")
    # A line break would allow several settings in one override.
    if not equals or "\n" in key or key.lstrip().startswith(("#", "[")):
        raise ValueError
    try:
        return parse_toml(line)
    except ValueError:
        if _is_compound(line):
            raise
        return _with_leaf(parse_toml(f"{key} = 0"), value.strip() or None)


def _is_compound(line: str) -> bool:
    return line.partition("=")[2].lstrip().startswith(("[", "{", '"', "'"))


def _with_leaf(table: dict[str, Any], value: str | None) -> dict[str, Any]:
    ((name, below),) = table.items()
    return {name: _with_leaf(below, value) if isinstance(below, dict) else value}


def dump_toml(settings: Settings) -> str:
    """Return a run or plan as TOML with all values; `load_run` and `load_plan` read it back."""
    return tomli_w.dumps(settings.model_dump(exclude_none=True))


def plan_hash(plan: ParallelPlan) -> str:
    """Return a short hash of the settings of a plan, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(plan.model_dump(), sort_keys=True).encode()).hexdigest()[:12]
