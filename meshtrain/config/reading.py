"""Reading of run, plan, corpus and machine files, and of the files that they extend."""

import json
import os
import stat
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshtrain.config.parsing import parse_json, parse_toml, unusable_values
from meshtrain.config.path_rules import path_problem
from meshtrain.config.problems import did_you_mean, place, syntax_problem
from meshtrain.config.tables import Key, Setting, SettingSource, Table, as_table, merge_tables
from meshtrain.errors import ConfigError, Problem

PLAN: Key = ("plan",)


def shipped_plans() -> Path:
    """Return the directory of the plans that come with meshtrain."""
    package = Path(__file__).parents[1]
    in_wheel = package / "parallel_plans"
    return in_wheel if in_wheel.is_dir() else package.parent / "parallel_plans"


def absolute_path(path: str, directory: Path) -> Path:
    """Return the absolute path for `path` in a file of `directory`."""
    # A path with a null character is not expanded, because Python raises an error; `path_problem`
    # reports it.
    expanded = path if "\0" in path else os.path.expanduser(path)
    return Path(os.path.abspath(directory / expanded))


def plan_path(name: str, directory: Path) -> Path:
    """Return the file of a plan. A name with .toml or .json is a path, others are shipped plans."""
    return absolute_path(name, directory) if name.endswith((".toml", ".json")) else shipped_plans() / f"{name}.toml"


def shown_path(path: Path) -> str:
    """Return the path relative to the current directory, if it is inside."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def names_plan(run: Table) -> bool:
    """Return whether these settings of a run name the plan to start from."""
    plan = run.get("plan")
    return isinstance(plan, Setting) or (plan is not None and "extends" in plan)


class Reader:
    """Reads files on top of what they extend, and collects all problems."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self._open: list[Path] = []

    def read_root(self, name: str, path: Path, read: Callable[[Path], Table]) -> Table:
        """Read the file that the user named, with the reader of its kind."""
        if refused := path_problem(name) or _missing(name, path):
            self.problems.append(refused)
            return {}
        return read(path)

    def read_run(self, path: Path) -> Table:
        """Read a run file on top of the run that it extends."""
        with self._opened(path, ()) as own:
            table: Table = {}
            if extends := _taken(own, "extends"):
                table = self._follow(extends, ("extends",), absolute_path, self.read_run)
            self.lay_over_run(table, own)
        return table

    def read_corpus(self, path: Path) -> Table:
        """Read a corpus file on top of the one that it extends."""
        with self._opened(path, ()) as own:
            extends = _taken(own, "extends")
            table: Table = {}
            if extends:
                table = self._follow(extends, ("extends",), absolute_path, self.read_corpus)
            merge_tables(table, own)
        return table

    def read_machine(self, path: Path) -> Table:
        """Read the description of a machine, which extends nothing."""
        with self._opened(path, ()) as own:
            return own

    def read_plan(self, path: Path, inside: Key = ()) -> Table:
        """Read a plan file on top of the plan that it extends.

        Args:
            path: the file.
            inside: ("plan",) when a run names it.
        """
        with self._opened(path, inside) as own:
            return self.lay_over_named(own, inside)

    def lay_over_named(self, own: Table, inside: Key = ()) -> Table:
        """Return the settings of a plan on top of the plan that they extend, if they name one."""
        extends = _taken(own, "extends")
        table = self._named_plan(extends, (*inside, "extends")) if extends else {}
        merge_tables(table, own)
        return table

    def lay_over_run(self, run: Table, top: Table) -> None:
        """Merge `top` into the run. A plan with `extends` starts from that, not the run's plan."""
        plan = top.get("plan")
        if name := _taken(top, "plan"):
            run["plan"] = self._named_plan(name, PLAN)
        elif isinstance(plan, dict) and (extends := _taken(plan, "extends")):
            run["plan"] = self._named_plan(extends, (*PLAN, "extends"))
        merge_tables(run, top)

    def _named_plan(self, name: Setting, key: Key) -> Table:
        inside = PLAN if key[:1] == PLAN else ()
        return self._follow(name, key, plan_path, lambda path: self.read_plan(path, inside))

    def _follow(
        self, name: Setting, key: Key, find: Callable[[str, Path], Path], read: Callable[[Path], Table]
    ) -> Table:
        refused = path_problem(name.value)
        if not refused:
            path = find(name.value, name.source.directory)
            refused = _missing(name.value, path) or self._circle(path)
        if refused:
            self.problems.append(refused.concerning(place(name.source, key)))
            return {}
        return read(path)

    def _circle(self, path: Path) -> Problem | None:
        if path.resolve() not in self._open:
            return None
        circle = " -> ".join(shown_path(file) for file in [*self._open, path.resolve()])
        return Problem(f"goes in a circle: {circle}", "leave out one `extends`")

    @contextmanager
    def _opened(self, path: Path, inside: Key) -> Iterator[Table]:
        source = SettingSource(shown_path(path), path.parent, inside)
        self._open.append(path.resolve())
        yield as_table(self._parsed(path, source), source)
        self._open.pop()

    def _parsed(self, path: Path, source: SettingSource) -> dict[str, Any]:
        try:
            text = path.read_bytes().decode()
            values = parse_json(text) if path.suffix == ".json" else parse_toml(text)
        except json.JSONDecodeError as error:
            found = Problem(f"line {error.lineno}, column {error.colno}: {error.msg[:1].lower()}{error.msg[1:]}")
        except tomllib.TOMLDecodeError as error:
            found = Problem(syntax_problem(error))
        except UnicodeDecodeError as error:
            found = Problem(f"not a TOML file: byte {error.start} is not UTF-8 text")
        except ConfigError as error:
            (found,) = error.problems
        except OSError as error:
            found = Problem(f"cannot be read: {error.strerror}")
        else:
            unusable = [found.concerning(place(source, key)) for key, found in unusable_values(values)]
            self.problems += unusable
            return {} if unusable else values
        self.problems.append(found.concerning(place(source, ())))
        return {}


def _missing(name: str, path: Path) -> Problem | None:
    """Return the problem that a file is missing, or None.

    None is also returned if the file cannot be inspected: reading it will raise the error.
    """
    try:
        kind = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return _no_file(name, path)
    except OSError:
        return None
    # A device may have no end. A pipe is accepted: a shell passes one in place of <(command).
    if stat.S_ISCHR(kind) or stat.S_ISBLK(kind):
        return Problem(f"{str(path)!r} is a device and not a file", "name a .toml or .json file")
    return None


def _no_file(name: str, path: Path) -> Problem:
    """Return the problem that a file does not exist, and which ones do."""
    root = shipped_plans()
    if path.is_relative_to(root) and not name.endswith(".toml"):
        shipped = sorted(file.relative_to(root).with_suffix("").as_posix() for file in root.rglob("*.toml"))
        return Problem(f"no shipped plan {name!r}", did_you_mean(name, shipped, "shipped are"))
    if not path.parent.is_dir():
        return Problem(f"no file {path.name!r}: there is no directory {path.parent}")
    neighbors = sorted(file.stem for file in path.parent.glob("*.toml"))
    hint = did_you_mean(path.stem, neighbors, "there is", ending=".toml")
    return Problem(f"no file {path.name!r} in {path.parent}", hint)


def _taken(table: Table, name: str) -> Setting | None:
    """Remove a string from the table and return it.

    Other values stay, and are reported as wrong with all others.
    """
    node = table.get(name)
    if isinstance(node, Setting) and isinstance(node.value, str):
        del table[name]
        return node
    return None
