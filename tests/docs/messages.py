"""The messages of the code as templates: their fixed parts, in order."""

import ast
from collections.abc import Iterator
from functools import cache

from meshtrain import errors
from tests.docs.blocks import ROOT

GAP = "\0"
"""What differs from message to message."""
LEAST_FIXED = len(" failed in : ")
"""A template with fewer fixed characters fits anything."""


@cache
def templates() -> tuple[str, ...]:
    """Return every string of the package, with a gap for each formatted value."""
    found: set[str] = set()
    for path in sorted((ROOT / "meshtrain").rglob("*.py")):
        found |= set(_strings(ast.parse(path.read_text())))
    return tuple(found)


def _strings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Constant, ast.JoinedStr, ast.BinOp, ast.Call)):
            text = _template(node)
            if text.strip(GAP):
                yield text


def _template(node: ast.AST) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_template(part) for part in parts)
        case ast.BinOp(left=left, right=right):
            return _template(left) + _template(right)
        case ast.Call(func=ast.Name(id=name), args=[found, advice]) if name == "kind" or hasattr(errors, name):
            return f"{_template(found)}; {_template(advice)}"
        case ast.Call(func=ast.Name(id="problem"), args=[_, _, found, advice]):
            return f"{_template(found)}; {_template(advice)}"
    return GAP


def is_message(shown: str) -> bool:
    """Return whether the code has this message; `…` stands for any text."""
    fragments = [part.strip(" .") for part in shown.split("…")]
    return any(_in_order([part for part in fragments if part], template) for template in templates())


def _in_order(fragments: list[str], template: str) -> bool:
    at = 0
    for fragment in fragments:
        found = template.find(fragment, at)
        if found < 0:
            return False
        at = found + len(fragment)
    return bool(fragments)


def fits_a_message(shown: str) -> bool:
    """Return whether a line of output fits a template with enough fixed text."""
    return any(_fits(shown, template.split(GAP)) for template in templates())


def _fits(shown: str, parts: list[str]) -> bool:
    at, fixed = 0, 0
    for part in parts:
        found = shown.find(part, at)
        if found < 0:
            return False
        at, fixed = found + len(part), fixed + len(part)
    return fixed >= LEAST_FIXED
