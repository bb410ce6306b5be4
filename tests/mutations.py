"""Random damage to run files, plan files and command lines, reproducible from a seed."""

import copy
import math
import random
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from functools import cache
from typing import Any

import tomli_w
from transformers import AutoConfig

from meshtrain.config.reading import shipped_plans
from meshtrain.config.schema import choices, json_schema, keys_of, subschema

RUNS = shipped_plans().parent / "launch" / "runs"
# Sizes that keep what the shipped runs need for parallelism, with tiny models.
SIZES = {
    "vocab_size": 300,
    "n_positions": 16,
    "max_position_embeddings": 16,
    "n_embd": 16,
    "hidden_size": 16,
    "intermediate_size": 16,
    "n_head": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_layer": 2,
    "num_hidden_layers": 2,
}
# Name of a shipped run -> number of processes, with at most two stages.
PROCESSES = {"quickstart": 4, "llama-65b": 4, "gpt3-175b": 8, "llama-tp4": 4, "gpt2-zero-offload": 1, "gpt2-124m": 1}

INTEGERS = (-1, 0, 1, 2, 3, 7, -7, 40, 65537, 2**31, 2**53 + 1, 10**18, 2**63 - 1, -(2**63), 2**64, 10**30)
FLOATS = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, 0.5, -0.1, 1.5, 5e-324, 1e-30, 1e12, 1e30, 1e308, -1e30)
STRINGS = (
    *("", " ", "a", "none", "True", "-1", "1e400", "inf", "gpt2", "llama", "families/gpt2", "auto", "bert", "t5"),
    *("\0", "a\0b", "~\0", "\x1b[31mred", "a\nb", "a\r\nb", "\t", "\x7f", "\x85", "a\u2028b", "\u202egpj", "\ufeff"),
    *(
        "é",
        "名前",
        "😀" * 3,
        "x" * 300,
        "y" * 5000,
        "/".join("z" * 3000),
        "名" * 100,
        "..",
        "../" * 50,
        "/",
        "~",
        "~nobody/x",
    ),
    *("/dev/null", "/dev/zero", "/proc/self/mem", "/root", ".", "a/b/c/d", "*", "[", "**/*", "{a,b}", "$HOME", "-"),
    *("nosuch://bucket/x", "s4://bucket/run", "S3://b", "http://[::1", "file://", "://", "s3:/b", "a::s3://b", "gs://"),
    *("memory://a\0b", "x.toml", "y" * 300 + ".toml", "a\0.toml", "\n.toml", "/dev/zero.json", "run.toml", "plan.toml"),
    *("999h", "9" * 400 + "s", "٣h", "{}", "[]", "a.b", "%s %d {0}", "C:\\x", "owner/name", "python-stdlib", "0x10"),
)
OTHERS = (
    True,
    False,
    [],
    {},
    [[]],
    [1, "a", None],
    [0.5],
    ["a"],
    ["\0"],
    {"a": 1},
    {"a": {"b": []}},
    date(1979, 5, 27),
)
BYTES = (
    b"\0",
    b"\xff",
    b"\n",
    b"=",
    b"[",
    b"]",
    b'"',
    b"'''",
    b"\\",
    b"\xe2\x80\xa8",
    b"#",
    b".",
    b"[[",
    b"{",
    b"\x1b",
    b"\r",
)
LINES = (
    b"a" + b".a" * 600 + b" = 1",
    b"a = " + b"[" * 1500 + b"]" * 1500,
    b"seed = " + b"9" * 5000,
    b"seed = 0x" + b"f" * 5000,
    b"[" + b"a." * 500 + b"a]",
    b"steps = 1e999",
    b'"a\\nb" = 1',
    b"'\0' = 1",
    b"[model]",
    b"plan.mesh.tp = 2",
    b"\xef\xbb\xbf",
)
LINES_OF_OVERRIDES = (
    *("", "=", "=1", "a", "a=", ".=1", "a..b=1", "[a]\n#=x", "#=1", "steps==3", "steps=\0", "steps=9" + "9" * 5000),
    *("a.b=1\nseed=2", "model.config=" + "[" * 1500, "seed=0x" + "f" * 5000, "a" + ".a" * 600 + "=1", "\udcff=1"),
    *("run_directory=\udcff", "run_directory=a\0", 'data.train=["\\u0000"]', "extends=x", "plan=", "model=", "data="),
    *("plan.extends=families/gpt2", "plan=\0", "plan=" + "x" * 300, "plan=/dev/zero.toml", '"a\\nb"=1', "'x y'=1"),
)


@dataclass
class Case:
    """Damaged input, and the shipped run from which it was made."""

    name: str
    run: bytes
    plan: bytes
    num_processes: int
    overrides: list[str] = field(default_factory=list)
    what: str = ""
    """The damage, for the report."""

    def files(self) -> dict[str, bytes]:
        """Return name -> content."""
        return {"run.toml": self.run, "plan.toml": self.plan}


@cache
def _shipped(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a shipped run and its plan, with a tiny model."""
    run = tomllib.loads((RUNS / f"{name}.toml").read_text())
    plan = tomllib.loads((shipped_plans() / f"{name}.toml").read_text())
    config = run["model"]["config"]
    defaults = AutoConfig.for_model(run["model"]["type"]).to_dict()
    config |= {key: size for key, size in SIZES.items() if key in defaults}
    run |= {"plan": "plan.toml", "run_directory": "out", "global_batch_size": 8, "micro_batch_size": 1}
    run["data"] |= {"sequence_length": 16, "tokenizer": {"vocab_size": 300}}
    if "pp" in plan.get("mesh", {}):
        plan["mesh"]["pp"] = 2
    return run, plan


@cache
def _model_keys(model_type: str) -> tuple[tuple[str, ...], ...]:
    return tuple(("model", "config", name) for name in sorted(AutoConfig.for_model(model_type).to_dict()))


@cache
def _written(name: str) -> Case:
    run, plan = _shipped(name)
    return Case(name, tomli_w.dumps(run).encode(), tomli_w.dumps(plan).encode(), PROCESSES[name])


def make_case(seed: int) -> Case:
    """Return the damaged case of a seed."""
    chance = random.Random(seed)
    name = chance.choices(list(PROCESSES), (1, 1, 1, 1, 3, 3))[0]
    case = copy.copy(_written(name))
    case.overrides = []
    kinds = chance.choices(list(_KINDS), list(_KINDS.values()), k=chance.choice((1, 1, 2, 2, 3)))
    for damage in kinds:
        case.what += f"{damage.__name__.strip('_')}: {damage(case, chance)}; "
    return case


def _value(chance: random.Random) -> Any:
    pool: tuple[Any, ...] = chance.choice((INTEGERS, FLOATS, STRINGS, STRINGS, OTHERS))
    value = copy.deepcopy(chance.choice(pool))
    return [value, *["b"] * chance.randrange(2)] if chance.random() < 0.05 else value


def _similar_value(old: Any, chance: random.Random) -> Any:
    """Return a value like the old one."""
    if isinstance(old, bool):
        return not old
    if isinstance(old, int | float):
        return chance.choice((-old, old + 1, old * 2, old * 10**9, str(old), float(old), [old], old // 2, 0, bool(old)))
    if isinstance(old, str):
        return chance.choice(
            (old.upper(), old[:-1], old + old, old + "\0", [old], {old: 1}, f"nosuch://{old}", old * 400)
        )
    if isinstance(old, list):
        return chance.choice((old * 2, old[:-1], [old], {str(entry): 1 for entry in old}, str(old), [*old, 1]))
    return chance.choice((1, "a", [], [old]))


def _put(table: dict[str, Any], key: tuple[str, ...], value: Any) -> None:
    for name in key[:-1]:
        below = table.get(name)
        table = table.setdefault(name, {}) if isinstance(below, dict | None) else {}
    table[key[-1]] = value


def _paths_in(table: dict[str, Any], above: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    found: list[tuple[tuple[str, ...], Any]] = []
    for name, value in table.items():
        found.append(((*above, name), value))
        if isinstance(value, dict):
            found += _paths_in(value, (*above, name))
    return found


def _in_file(case: Case, chance: random.Random, change: Callable[[dict[str, Any], str], str], kind: str = "") -> str:
    """Change the table of one of the files, if it still is a table."""
    kind = kind or ("run" if chance.random() < 0.75 else "plan")
    try:
        table = tomllib.loads(getattr(case, kind).decode())
    except (ValueError, RecursionError):
        return "nothing"
    try:
        what = change(table, kind)
        setattr(case, kind, tomli_w.dumps(table).encode("utf-8", "surrogatepass"))
    except (TypeError, ValueError, RecursionError) as error:
        return f"cannot be written ({error})"
    return f"{kind} {what}"


def _set_a_value(case: Case, chance: random.Random) -> str:
    def change(table: dict[str, Any], kind: str) -> str:
        key, old = chance.choice(_paths_in(table) or [(("seed",), 0)])
        value = _similar_value(old, chance) if chance.random() < 0.5 else _value(chance)
        _put(table, key, value)
        return f"{key} = {value!r:.80}"

    return _in_file(case, chance, change)


@cache
def _keys(kind: str) -> list[tuple[str, ...]]:
    return keys_of(json_schema("run" if kind == "run" else "plan"))


def _set_any_key(case: Case, chance: random.Random) -> str:
    def change(table: dict[str, Any], kind: str) -> str:
        schema = json_schema("run" if kind == "run" else "plan")
        key = chance.choice(_keys(kind))
        words = choices(subschema(schema, key) or {})
        value = chance.choice(words) if words and chance.random() < 0.4 else _value(chance)
        _put(table, key, value)
        return f"{key} = {value!r:.80}"

    return _in_file(case, chance, change)


def _set_a_value_of_the_model(case: Case, chance: random.Random) -> str:
    def change(table: dict[str, Any], _: str) -> str:
        key = chance.choice(_model_keys(_shipped(case.name)[0]["model"]["type"]))
        value = _value(chance)
        _put(table, key, value)
        return f"{key} = {value!r:.80}"

    return _in_file(case, chance, change, kind="run")


def _remove_a_key(case: Case, chance: random.Random) -> str:
    def change(table: dict[str, Any], kind: str) -> str:
        key, _ = chance.choice(_paths_in(table) or [(("seed",), 0)])
        for name in key[:-1]:
            table = table[name]
        table.pop(key[-1], None)
        return str(key)

    return _in_file(case, chance, change)


def _rename_a_key(case: Case, chance: random.Random) -> str:
    def change(table: dict[str, Any], kind: str) -> str:
        key, value = chance.choice(_paths_in(table) or [(("seed",), 0)])
        new = chance.choice((key[-1][1:], key[-1] + "s", key[-1].upper(), *STRINGS))
        for name in key[:-1]:
            table = table[name]
        table.pop(key[-1], None)
        table[new] = value
        return f"{key} -> {new!r:.80}"

    return _in_file(case, chance, change)


def _damage_the_text(case: Case, chance: random.Random) -> str:
    kind = "run" if chance.random() < 0.75 else "plan"
    lines = getattr(case, kind).split(b"\n")
    at, other = chance.randrange(len(lines)), chance.randrange(len(lines))
    what = chance.choice(("repeat", "drop", "swap", "join", "insert", "shorten"))
    if what == "repeat":
        lines.insert(other, lines[at])
    elif what == "drop":
        del lines[at]
    elif what == "swap":
        lines[at], lines[other] = lines[other], lines[at]
    elif what == "join":
        lines[at : at + 2] = [b" ".join(lines[at : at + 2])]
    elif what == "insert":
        lines.insert(at, chance.choice(LINES))
    else:
        lines = lines[:at]
    setattr(case, kind, b"\n".join(lines))
    return f"{kind} {what} {at} {other}"


def _damage_bytes(case: Case, chance: random.Random) -> str:
    kind = "run" if chance.random() < 0.75 else "plan"
    content = bytearray(getattr(case, kind))
    for _ in range(chance.choice((1, 1, 4, 30))):
        at = chance.randrange(len(content) + 1)
        if chance.random() < 0.5:
            content[at : at + 1] = bytes([chance.randrange(256)])
        else:
            content[at:at] = chance.choice(BYTES)
    setattr(case, kind, bytes(content))
    return kind


def _override(case: Case, chance: random.Random) -> str:
    keys = [*_keys("run"), *_model_keys(_shipped(case.name)[0]["model"]["type"])]
    key, value = ".".join(chance.choice(keys)), _value(chance)
    try:
        text = tomli_w.dumps({"k": value}).partition("=")[2].strip() if chance.random() < 0.5 else str(value)
    except (TypeError, ValueError):
        text = str(value)
    line = chance.choice(LINES_OF_OVERRIDES) if chance.random() < 0.2 else f"{key}={text}"
    case.overrides.append(line)
    return f"{line!r:.80}"


def _number_of_processes(case: Case, chance: random.Random) -> str:
    case.num_processes = chance.choice((1, 2, 3, 6, 8, 64, 10**6))
    return str(case.num_processes)


# Each with its frequency.
_KINDS: dict[Callable[[Case, random.Random], str], int] = {
    _set_a_value: 20,
    _set_any_key: 25,
    _set_a_value_of_the_model: 10,
    _remove_a_key: 3,
    _rename_a_key: 8,
    _damage_the_text: 8,
    _damage_bytes: 8,
    _override: 20,
    _number_of_processes: 1,
}
