"""The docstring of each package names its modules."""

import ast
import re

import pytest

from tests.docs.blocks import ROOT

PACKAGES = sorted((ROOT / "meshtrain").rglob("__init__.py"))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_is_named(package):
    docstring = ast.get_docstring(ast.parse(package.read_text()))
    assert docstring is not None
    inside = [*package.parent.glob("*.py"), *(path.parent for path in package.parent.glob("*/__init__.py"))]
    modules = {path.stem for path in inside} - {"__init__", "__main__"}
    # An entry begins a line or a sentence, or follows another one. Prose may use the same word.
    entry = r"(^[ \-`]*|, |\. ){}(\.py|/|`?:|, |  )"
    assert [name for name in sorted(modules) if not re.search(entry.format(name), docstring, re.M)] == []
