"""What the quick suite keeps of the full one, and the changes that measure the suites."""

import ast
from pathlib import Path

import pytest

from tests.suite.choose import choose
from tests.suite.mutants import ROOT, find_mutants


def test_quick_suite_keeps_every_line_and_then_the_quickest_tests() -> None:
    lines = {"slow": {1, 2, 3}, "alone": {9}, "quick": {1, 2}, "other": {3}, "none": set[int]()}
    seconds = {"slow": 60.0, "alone": 30.0, "quick": 1.0, "other": 1.0, "none": 2.0}

    assert choose(lines, seconds, 0.0) == {"alone", "quick", "other"}
    assert choose(lines, seconds, 34.0) == {"alone", "quick", "other", "none"}
    assert choose(lines, seconds, 94.0) == set(lines)


SOURCE = '''
LIMIT = 3


def count(rows: int = 7, *, strict: bool = True) -> int:
    """Count."""
    if rows < 2 and strict:
        raise ValueError(f"{rows + 1} rows")
    notify(rows)
    return rows * 2
'''


def test_mutants_change_what_a_function_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.suite.mutants.ROOT", tmp_path)
    (tmp_path / "counting.py").write_text(SOURCE)

    mutants = list(find_mutants(tmp_path / "counting.py"))

    changed = []
    for mutant in mutants:
        text = SOURCE[: mutant.begin] + mutant.text + SOURCE[mutant.end :]
        ast.parse(text)
        changed += [new.strip() for old, new in zip(SOURCE.splitlines(), text.splitlines(), strict=True) if old != new]
        assert (mutant.first, mutant.last) == (6, 10)
    assert changed == [
        "if (rows < 2) or (strict):",
        "if rows <= 2 and strict:",
        "if rows < 3 and strict:",
        "pass",
        "return None",
        "return (rows // 2)",
        "return rows * 3",
    ]


def test_every_mutant_of_a_large_module_is_valid_python() -> None:
    path = ROOT / "meshtrain" / "parallel" / "pipeline.py"
    source = path.read_text()
    mutants = list(find_mutants(path))

    assert len(mutants) > 50
    for mutant in mutants:
        text = source[: mutant.begin] + mutant.text + source[mutant.end :]
        assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(source))
