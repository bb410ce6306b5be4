"""The places of meshtrain that name CUDA, and a note of each one that is executed.

A place is a statement of a function that names CUDA, or that runs only where CUDA is used. Modules
are changed when they are imported: before each place, a call notes its line in a file. A tracer
would be slower, and would lose what it knows in processes that end at once.
"""

import ast
import os
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

REACHED = "HOST_CUDA_REACHED"
"""Environment variable with the file into which the executed places are written."""
ROOT = Path(__file__).parents[2] / "meshtrain"
_WORDS = {"cuda", "nccl", "cpu:gloo,cuda:nccl"}
_NAMES = {"cuda", "is_cuda", "pin_memory", "on_gpu", "_on_gpu", "is_gpu"}
_noted: set[str] = set()


def find_places() -> dict[str, str]:
    """Return all places: "module.py:line" -> its line of code."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        lines = path.read_text().splitlines()
        marker = _Marker(path)
        marker.visit(ast.parse("\n".join(lines)))
        found |= {place: lines[int(place.rpartition(":")[2]) - 1].strip() for place in marker.places}
    return found


def note_places() -> None:
    """Note from now on which places this process executes."""
    get_code = SourceFileLoader.get_code

    def get_marked_code(self: SourceFileLoader, name: str) -> CodeType | None:
        path = Path(self.get_filename(name))
        if ROOT not in path.parents:
            return get_code(self, name)
        tree = _Marker(path).visit(ast.parse(path.read_text()))
        return compile(ast.fix_missing_locations(tree), str(path), "exec", dont_inherit=True)

    SourceFileLoader.get_code = get_marked_code  # type: ignore[method-assign,assignment]
    builtins: Any = __builtins__
    names = builtins if isinstance(builtins, dict) else vars(builtins)
    names["_note_place"] = _note


def _note(place: str) -> bool:
    if place not in _noted:
        _noted.add(place)
        with Path(os.environ[REACHED]).open("a") as file:
            file.write(f"{place}\n")
    return True


class _Marker(ast.NodeTransformer):
    """Puts a call before each place."""

    def __init__(self, path: Path) -> None:
        self.places: list[str] = []
        self._name, self._depth = str(path.relative_to(ROOT)), 0

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        # Decorators and defaults run at the import.
        self._depth += 1
        node.body = self._marked(node.body)
        self._depth -= 1
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        if self._depth and _names_cuda(node.test):
            node.body = ast.copy_location(
                ast.BoolOp(ast.And(), [self._call(node.body.lineno, f":{node.body.col_offset}"), node.body]), node.body
            )
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.If) and _excludes_cuda(node.test):
            return node
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                whole = isinstance(node, ast.If) and field == "body" and _names_cuda(node.test)
                setattr(node, field, self._marked(block, first_is_place=whole) if self._depth else self._plain(block))
        for name, value in ast.iter_fields(node):
            if name in ("body", "orelse", "finalbody") and isinstance(value, list):
                continue
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, ast.AST):
                    self.visit(item)
        return node

    def _plain(self, block: list[Any]) -> list[Any]:
        return [self.visit(statement) for statement in block]

    def _marked(self, block: list[Any], *, first_is_place: bool = False) -> list[Any]:
        marked: list[Any] = []
        for index, statement in enumerate(block):
            if (index == 0 and first_is_place) or any(map(_names_cuda, _own_parts(statement))):
                marked.append(ast.copy_location(ast.Expr(self._call(statement.lineno)), statement))
            marked.append(self.visit(statement))
        return marked

    def _call(self, line: int, part: str = "") -> ast.Call:
        place = f"{self._name}{part}:{line}"
        self.places.append(place)
        return ast.Call(ast.Name("_note_place", ast.Load()), [ast.Constant(place)], [])


def _own_parts(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the expressions of a statement, without the statements inside it."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return
    for node in ast.iter_child_nodes(statement):
        if not isinstance(node, ast.stmt | ast.excepthandler):
            yield node


def _names_cuda(node: ast.AST) -> bool:
    return any(_is_name(inner) for inner in ast.walk(node))


def _excludes_cuda(test: ast.expr) -> bool:
    """Return whether a condition is true only where CUDA is not used."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _names_cuda(test.operand)
    values = [node.value for node in ast.walk(test) if isinstance(node, ast.Constant)]
    return isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq) and values == ["cpu"]


def _is_name(node: ast.AST) -> bool:
    values: dict[type, Callable[[Any], bool]] = {
        ast.Constant: lambda it: isinstance(it.value, str) and it.value in _WORDS,
        ast.Attribute: lambda it: it.attr in _NAMES,
        ast.Name: lambda it: it.id in _NAMES,
        ast.keyword: lambda it: it.arg in _NAMES,
    }
    return type(node) in values and values[type(node)](node)
