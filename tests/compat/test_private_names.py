"""Outside of `meshtrain/compat`, only public interfaces of other libraries are used.

A private use is: a name with one leading underscore that is read, set, imported or written as a
string, also in parts, and is not defined by a class of the same file; replacing the class or a
method of another library's object, or a member of its modules; overriding a private method of
another library's class; reading the source text or the code of functions.
"""

import ast
import importlib
import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn
from transformers import PreTrainedModel

import meshtrain
import meshtrain.compat

ROOT = Path(meshtrain.__file__).parent
PRIVATE = re.compile(r"_[A-Za-z]\w*(?<!__)")
# These names are documented by Python.
OF_PYTHON = {"_exit", "_getframe", "_current_frames", "_replace", "_asdict", "_fields"}
# The end of the names of standard errors, as lm_eval documents them.
OF_RESULTS = {"_stderr"}
# The end of the names of states of our own optimizer.
OF_STATES = {"_scale"}
METHODS = {
    name
    for kind in (nn.Module, PreTrainedModel)
    for name in dir(kind)
    if not name.startswith("__") and inspect.isroutine(inspect.getattr_static(kind, name))
}
LIBRARIES = ("torch", "transformers", "peft", "datatrove", "numpy", "tokenizers", "huggingface_hub")
# Fields of our own classes, such as `Trace.parameters`.
FIELDS = {
    field.target.id
    for path in ROOT.rglob("*.py")
    for kind in ast.walk(ast.parse(path.read_text()))
    if isinstance(kind, ast.ClassDef)
    for field in kind.body
    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
}
SOURCES = {"getsource", "getsourcelines", "findsource"}
CODE = {"co_names", "co_consts", "co_code", "co_varnames", "co_freevars", "co_cellvars"}
# This file reads our own docstrings.
READS_OWN_SOURCE = {"config/settings.py"}


def files() -> list[Path]:
    return [path for path in sorted(ROOT.rglob("*.py")) if (ROOT / "compat") not in path.parents]


def own_names(tree: ast.Module) -> set[str]:
    """Return the private names that a file defines: functions, classes, variables and members."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                found.add(name)
    return found


def docstrings(tree: ast.Module) -> set[int]:
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def library_names(tree: ast.Module) -> set[str]:
    """Return the names in a file that stand for modules, classes and functions of the libraries."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                places = [(alias.name, alias.asname or alias.name.partition(".")[0]) for alias in names]
            case ast.ImportFrom(module=str(module), names=names):
                places = [(module, alias.asname or alias.name) for alias in names]
            case _:
                continue
        found |= {name for module, name in places if module.partition(".")[0] in LIBRARIES}
    return found


def is_of(owner: ast.expr, names: set[str]) -> bool:
    """Return whether an expression is one of the names, or a member of one."""
    # `torch.backends` holds public settings.
    if ast.unparse(owner).startswith("torch.backends."):
        return False
    while isinstance(owner, ast.Attribute):
        owner = owner.value
    return isinstance(owner, ast.Name) and owner.id in names


def begins_private(name: ast.expr) -> bool:
    """Return whether an expression that is put together from parts begins with one underscore."""
    match name:
        case ast.BinOp(left=left):
            return begins_private(left)
        case ast.JoinedStr(values=[first, *_]):
            return begins_private(first)
        case ast.Constant(value=str(value)):
            return value.startswith("_") and not value.startswith("__")
    return False


def private_uses(text: str) -> Iterator[str]:
    """Yield the private uses in a file."""
    tree = ast.parse(text)
    own, documents, theirs = own_names(tree) | OF_PYTHON | OF_RESULTS | OF_STATES, docstrings(tree), library_names(tree)

    def replaces(owner: ast.expr, name: str) -> bool:
        is_own = isinstance(owner, ast.Name) and owner.id in ("self", "cls")
        return (name in METHODS - FIELDS and not is_own) or is_of(owner, theirs)

    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) if PRIVATE.fullmatch(name) and name not in own:
                yield f"{node.lineno}: .{name}"
            case ast.ImportFrom(module=str(module), names=names) if not module.startswith(("meshtrain", "__future__")):
                parts = [*module.split("."), *(alias.name for alias in names)]
                yield from (f"{node.lineno}: import {part}" for part in parts if PRIVATE.fullmatch(part))
                if module == "inspect" and SOURCES & set(parts):
                    yield f"{node.lineno}: the source text of a function"
            case ast.Import(names=names):
                parts = [part for alias in names for part in alias.name.split(".")]
                yield from (f"{node.lineno}: import {part}" for part in parts if PRIVATE.fullmatch(part))
            case ast.Constant(value=str(value)) if PRIVATE.fullmatch(value) and value not in own:
                if id(node) not in documents:
                    yield f"{node.lineno}: {value!r}"
            case ast.Attribute(attr="__class__", ctx=ast.Store()):
                yield f"{node.lineno}: __class__ = ..."
            case ast.Attribute(value=owner, attr=name, ctx=ast.Store()) if replaces(owner, name):
                yield f"{node.lineno}: .{name} = ..."
            case (
                ast.Call(func=ast.Name(id="setattr"), args=[owner, ast.Constant(value=str(name)), _])
                | ast.Call(func=ast.Attribute(attr="__setattr__"), args=[owner, ast.Constant(value=str(name)), _])
            ) if replaces(owner, name):
                yield f"{node.lineno}: setattr(..., {name!r}, ...)"
            case ast.Call(func=ast.Name(id="getattr" | "setattr" | "hasattr" | "delattr"), args=[_, name, *_]) if (
                not isinstance(name, ast.Constant) and begins_private(name)
            ):
                yield f"{node.lineno}: {ast.unparse(name)}"
            case ast.Subscript(value=ast.Attribute(value=owner, attr="__dict__"), ctx=ast.Store()):
                if not (isinstance(owner, ast.Name) and owner.id == "self"):
                    yield f"{node.lineno}: __dict__[...] = ..."
            case ast.Subscript(value=ast.Call(func=ast.Name(id="vars")), slice=ast.Constant(), ctx=ast.Store()):
                yield f"{node.lineno}: vars(...)[...] = ..."
            case ast.Attribute(attr=name) if name in SOURCES:
                yield f"{node.lineno}: the source text of a function"
            case ast.Attribute(attr=name) if name in CODE:
                yield f"{node.lineno}: the code of a function"


@pytest.mark.parametrize(
    "line",
    [
        "plan = model._tp_plan",
        "x = config._attn_implementation or 1",
        "config._experts_implementation = 'eager'",
        "norms = torch._foreach_norm(gradients)",
        "ops = torch.ops._c10d_functional",
        "from torch.utils._pytree import tree_leaves",
        "from torch.distributed.tensor.placement_types import _StridedShard",
        "import torch.distributed.fsdp._fully_shard",
        "ignored = getattr(model, '_keys_to_ignore_on_save', None)",
        "vars(model)['_weight_conversions'] = []",
        "buffers = self._buffers",
        "module.__class__ = Other",
        "model.forward = forward",
        "model.save_pretrained = save",
        "vars(model)['forward'] = forward",
        "text = inspect.getsource(type(module).forward)",
        "from inspect import getsource\ntext = getsource(type(module).forward)",
        "names = type(module).forward.__code__.co_names",
        "setattr(model, 'forward', forward)",
        "object.__setattr__(model, 'forward', forward)",
        "model.__dict__['forward'] = forward",
        "import torch\ntorch.nn.functional.dropout = dropout",
        "from torch.nn import functional\nfunctional.dropout = dropout",
        "import torch\nsetattr(torch.nn.functional, 'dropout', dropout)",
        "plan = getattr(model, '_' + 'tp_plan')",
        "plan = getattr(model, '_tp_' + kind + 's')",
        "plan = getattr(model, f'_{kind}_plan')",
    ],
)
def test_rule_reports_private_uses(line: str) -> None:
    assert [*private_uses(line)]


@pytest.mark.parametrize(
    "text",
    [
        "def _own(): ...\n_own()",
        "class A:\n    def __init__(self):\n        self._x = 1\n    def other(self, b):\n        return b._x",
        "model.config.name_or_path = 'x'",
        "x = module.__dict__",
        "class A:\n    def __init__(self):\n        self.__dict__['parts'] = 1",
        "class A:\n    def __setattr__(self, name, value):\n        super().__setattr__(name, value)",
        "setattr(module, 'training', False)\nsetattr(module, name, value)",
        "plan = getattr(model, kind + 'plan')",
        "import torch\ntorch.backends.cudnn.benchmark = True",
        "is_join = frame.f_code is Thread.join.__code__",
        "os._exit(1)",
        "row = row._replace(tokens=1)",
    ],
)
def test_rule_accepts_public_uses(text: str) -> None:
    assert not [*private_uses(text)]


def test_no_file_uses_private_names() -> None:
    found = {}
    for path in files():
        name = str(path.relative_to(ROOT))
        uses = [*private_uses(path.read_text())]
        if name in READS_OWN_SOURCE:
            uses = [use for use in uses if "source text" not in use]
        if uses:
            found[name] = uses
    assert not found


def modules() -> list[str]:
    return [name for _, name, _ in pkgutil.walk_packages(meshtrain.__path__, "meshtrain.") if "__main__" not in name]


def test_no_class_overrides_a_private_method() -> None:
    found = set()
    for name in modules():
        if name.startswith("meshtrain.compat"):
            continue
        if name.endswith(".trackio_run") and importlib.util.find_spec("trackio") is None:
            continue
        for kind in vars(importlib.import_module(name)).values():
            if not isinstance(kind, type) or kind.__module__ != name:
                continue
            foreign = [base for base in kind.__mro__ if not base.__module__.startswith("meshtrain.")]
            libraries = [base for base in foreign if base.__module__.partition(".")[0] in LIBRARIES]
            for member in vars(kind):
                is_theirs = any(inspect.isroutine(vars(base).get(member)) for base in libraries)
                if PRIVATE.fullmatch(member) and is_theirs:
                    found.add(f"{name}.{kind.__name__}.{member}")
    assert not found


def test_each_function_documents_its_reason_and_versions() -> None:
    lacking = []
    for path in sorted((ROOT / "compat").glob("*.py")):
        body = ast.parse(path.read_text()).body
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                text = ast.get_docstring(node) or ""
                if not (re.search(r"^Why: ", text, re.M) and re.search(r"^Holds: \w+ \d", text, re.M)):
                    lacking.append(f"{path.name}: {node.name}")
    assert not lacking
