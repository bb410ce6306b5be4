"""Measure how many random mutants of meshtrain the quick suite kills, and how many the full one.

    python -m tests.suite.reach FOLDER
    python -m tests.suite.mutants FOLDER [--number 200] [--seed 0] [--seconds 120] [--workers 2]

A mutant is the source code with one expression or statement changed. It is killed if a test fails.
Only tests that reach the function of the mutant run, the quickest first, for at most `--seconds` in
each suite. A mutant that survives the quick suite meets the tests that only the full suite has.
Results are appended to FOLDER/mutants.jsonl, so that a run that was interrupted resumes. The
working tree is not changed: every worker has a copy.
"""

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

import coverage

from tests.suite.choose import read_full_only

ROOT = Path(__file__).resolve().parents[2]
UNNEEDED = shutil.ignore_patterns(".git", ".venv", "site", "build", "__pycache__", ".*_cache")
PACKAGES = ("parallel", "training", "checkpoint")
COMPARISONS = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*", ast.Div: "*", ast.Mod: "//"}


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
        path: of the file, from the root of the repository.
        line: number of the first changed line.
        first, last: lines of the innermost function around it.
        begin, end: offsets of the replaced text, in characters.
        text: the text that replaces it.
    """

    path: str
    line: int
    first: int
    last: int
    begin: int
    end: int
    text: str

    def apply(self, tree: Path) -> None:
        """Change the file in a copy of the working tree."""
        source = (ROOT / self.path).read_text()
        (tree / self.path).write_text(source[: self.begin] + self.text + source[self.end :])

    def undo(self, tree: Path) -> None:
        """Restore the file in a copy of the working tree."""
        shutil.copyfile(ROOT / self.path, tree / self.path)


def find_mutants(path: Path) -> Iterator[Mutant]:
    """Yield every mutant of the functions of a file."""
    source = path.read_text()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def visit(node: ast.AST, function: ast.FunctionDef | None) -> Iterator[Mutant]:
        if isinstance(node, ast.FunctionDef):
            function = node
        if function is not None and node is not function:
            for text in replacements(node, source):
                begin = starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
                end = starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
                yield Mutant(
                    path=str(path.relative_to(ROOT)),
                    line=node.lineno,  # type: ignore[attr-defined]
                    first=function.body[0].lineno,
                    last=function.end_lineno or function.lineno,
                    begin=begin,
                    end=end,
                    text=text,
                )
        for child in _mutable_children(node):
            yield from visit(child, function)

    yield from visit(ast.parse(source), None)


def _mutable_children(node: ast.AST) -> Iterator[ast.AST]:
    # What is raised or asserted, annotations, docstrings and defaults are left alone.
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr):
        return
    if isinstance(node, ast.FunctionDef):
        yield from node.body
        return
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child


def replacements(node: ast.AST, source: str) -> Iterator[str]:
    """Yield the texts that replace a node."""

    def text(part: ast.AST) -> str:
        return ast.get_source_segment(source, part) or ""

    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield f"{text(node.left)} {COMPARISONS[type(node.ops[0])]} {text(node.comparators[0])}"
    elif isinstance(node, ast.BoolOp):
        word = " or " if isinstance(node.op, ast.And) else " and "
        yield word.join(f"({text(value)})" for value in node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield f"({text(node.operand)})"
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not _is_text(node):
        yield f"({text(node.left)} {ARITHMETIC[type(node.op)]} {text(node.right)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield str(node.value + 1)
    elif isinstance(node, ast.If) and not isinstance(node.test, ast.Compare | ast.BoolOp | ast.UnaryOp):
        whole = text(node)
        offset = whole.index(text(node.test))
        yield f"{whole[:offset]}not ({text(node.test)}){whole[offset + len(text(node.test)) :]}"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "pass"
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield "return None"


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(part, ast.JoinedStr) or (isinstance(part, ast.Constant) and isinstance(part.value, str))
        for part in (node.left, node.right)
    )


class Reached:
    """The tests that reach a function, from the data of `tests.suite.reach`."""

    def __init__(self, folder: Path) -> None:
        combined = folder / "lines"
        if not combined.exists():
            writer = coverage.Coverage(data_file=str(combined), config_file=False)
            writer.combine([str(folder)], keep=True)
            writer.save()
        self._data = coverage.CoverageData(str(combined))
        self._data.read()
        self._files = {
            str(Path(file).relative_to(_common_root(self._data))): file for file in self._data.measured_files()
        }
        self.seconds: dict[str, float] = json.loads((folder / "seconds.json").read_text())

    def tests(self, path: str, first: int, last: int) -> list[str]:
        """Return the tests that execute lines from `first` to `last` of a file, quickest first."""
        if path not in self._files:
            return []
        contexts = self._data.contexts_by_lineno(self._files[path])
        found = {context_test(name) for line in range(first, last + 1) for name in contexts.get(line, ())}
        return sorted(found & self.seconds.keys(), key=lambda test: self.seconds[test])

    def lines(self) -> dict[str, set[int]]:
        """Return test -> the lines that it reaches, each under a number of its own."""
        found = dict[str, set[int]]()
        number = 0
        for file in sorted(self._files.values()):
            for contexts in self._data.contexts_by_lineno(file).values():
                number += 1
                for name in contexts:
                    found.setdefault(context_test(name), set()).add(number)
        return {test: lines for test, lines in found.items() if test in self.seconds}


def context_test(context: str) -> str:
    """Return the test of a context of coverage.py: `static (call)|dynamic`."""
    static, _, dynamic = context.partition("|")
    return dynamic or static.rpartition(" (")[0]


def _common_root(data: coverage.CoverageData) -> Path:
    some = next(iter(data.measured_files()))
    return Path(some[: some.index("/meshtrain/")])


def is_killed(tests: list[str], tree: Path, seconds: float) -> bool | None:
    """Return whether one of the tests fails; None if the time is over before all have passed."""
    if not tests:
        return False
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--reruns", "0", "--timeout", "120", *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        command, cwd=tree, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            return process.wait(seconds) != 0
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def within(tests: list[str], seconds: dict[str, float], budget: float) -> list[str]:
    """Return the first tests that take at most `budget` seconds together, and one at least."""
    chosen, total = list[str](), 0.0
    for test in tests:
        total += seconds[test]
        if chosen and total > budget:
            break
        chosen.append(test)
    return chosen


@dataclass(frozen=True)
class Judge:
    """Runs the tests against a mutant."""

    reached: Reached
    quick: set[str]
    seconds: float

    def result(self, mutant: Mutant, tree: Path) -> str:
        """Return "quick", "full" or "survived": the suite that kills a mutant."""
        tests = self.reached.tests(mutant.path, mutant.first, mutant.last)
        mutant.apply(tree)
        try:
            for suite, others in (("quick", self.quick), ("full", set(tests) - self.quick)):
                chosen = within([test for test in tests if test in others], self.reached.seconds, self.seconds)
                # A mutant that makes tests hang is killed too: tests that pass need no more than
                # their usual time.
                killed = is_killed(chosen, tree, 4 * self.seconds + 60)
                if killed or killed is None:
                    return suite
            return "survived"
        finally:
            mutant.undo(tree)


def main() -> None:
    """Draw mutants, run the tests against each, and print how many each suite kills."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()

    reached = Reached(options.folder)
    judge = Judge(reached, reached.seconds.keys() - read_full_only(), options.seconds)
    by_file = defaultdict(list)
    for package in PACKAGES:
        for path in sorted((ROOT / "meshtrain" / package).rglob("*.py")):
            for mutant in find_mutants(path):
                if judge.reached.tests(mutant.path, mutant.first, mutant.last):
                    by_file[mutant.path].append(mutant)
    candidates = [mutant for mutants in by_file.values() for mutant in mutants]
    chosen = random.Random(options.seed).sample(candidates, options.number)
    log = options.folder / "mutants.jsonl"
    known = dict[str, str]()
    if log.exists():
        for line in log.read_text().splitlines():
            entry = json.loads(line)
            known[json.dumps(entry["mutant"])] = entry["result"]

    trees: SimpleQueue[Path] = SimpleQueue()
    for number in range(options.workers):
        tree = options.folder / f"tree-{number}"
        shutil.rmtree(tree, ignore_errors=True)
        shutil.copytree(
            ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", "site", "build", "__pycache__", ".*_cache")
        )
        trees.put(tree)

    def work(mutant: Mutant) -> str:
        key = json.dumps(asdict(mutant))
        if key in known:
            return known[key]
        tree = trees.get()
        try:
            result = judge.result(mutant, tree)
        finally:
            trees.put(tree)
        with log.open("a") as file:
            file.write(json.dumps({"mutant": asdict(mutant), "result": result}) + "\n")
        print(f"{result:9} {mutant.path}:{mutant.line}  {mutant.text.splitlines()[0][:60]}", flush=True)
        return result

    with ThreadPoolExecutor(options.workers) as pool:
        results = list(pool.map(work, chosen))
    quick, full = results.count("quick"), results.count("quick") + results.count("full")
    print(f"of {len(results)} mutants out of {len(candidates)}: quick suite {quick}, full suite {full}")


if __name__ == "__main__":
    main()
