"""The walks of settings in docs/contributing.md name what there is, and no file twice."""

import ast
import re

from tests.docs.blocks import ROOT

STEP = re.compile(r"`([a-z_/]+\.py):([A-Za-z_.]+)`")
SETTINGS = ("micro_batch_size", "plan.mesh.tp", "data.sequence_length", "model.config")


def names_in(path: str) -> set[str]:
    """Return the functions, classes and methods of a file."""
    found = set()
    for node in ast.parse((ROOT / "meshtrain" / path).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return found


def test_the_walks_of_settings_exist_and_visit_no_file_twice() -> None:
    page = (ROOT / "docs" / "contributing.md").read_text()
    section = page[page.index("## Where a setting goes") : page.index("## Add a setting")]
    common, _, table = section.partition("| Setting |")
    rows = dict(re.findall(r"^\| `([a-z._]+)` \| (.*) \|$", table, re.MULTILINE))
    assert tuple(rows) == SETTINGS
    for row in rows.values():
        steps = [*STEP.findall(common), *STEP.findall(row)]
        assert [name for path, name in steps if name not in names_in(path)] == []
        files = [path for path, _ in steps]
        assert len(set(files)) == len(files)
