"""The reference of the commands, from what typer knows of them."""

from collections.abc import Iterator
from typing import Any, get_args, get_origin

import typer

from meshtrain.cli import app

NAMES = {"int": "a whole number", "float": "a number", "str": "text", "Path": "a path", "bool": "a flag"}


def all_commands() -> Iterator[tuple[str, Any]]:
    """Yield every command with its whole name, such as `meshtrain checkpoint list`."""
    yield from _commands("meshtrain", typer.main.get_command(app))


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    if hasattr(command, "commands"):
        for inner, below in command.commands.items():
            yield from _commands(f"{name} {inner}", below)
    else:
        yield name, command


def page() -> str:
    """Return the reference of all commands in Markdown."""
    return "\n\n".join(_section(name, command) for name, command in all_commands())


def _section(name: str, command: Any) -> str:
    anchor = name.replace(" ", "-")
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    options = [param for param in command.params if param.param_type_name == "option"]
    usage = " ".join([name, *map(_usage, arguments), *(_usage(option) for option in options if option.required)])
    rest = " [OPTIONS]" if any(not option.required for option in options) else ""
    lines = [f"## `{name}` {{ #{anchor} }}", command.help, f"```text\n{usage}{rest}\n```"]
    lines += [_entry(param) for param in arguments + options]
    return "\n\n".join(lines)


def _usage(param: Any) -> str:
    if param.param_type_name == "option":
        return f"{param.opts[0]} {param.metavar or param.name.upper()}"
    many = " ..." if param.nargs == -1 else ""
    return f"{param.metavar}{many}" if param.required else f"[{param.metavar}{many}]"


def _entry(param: Any) -> str:
    """Return a definition: the name of a parameter, its type and default, its help."""
    name = param.opts[0] if param.param_type_name == "option" else param.metavar
    facts = [_type(param)]
    if param.required:
        facts.append("required")
    elif param.default not in (None, False):
        facts.append(f"default `{param.default}`")
    if param.param_type_name == "option" and _is_list(param):
        facts.append("repeatable")
    meaning = f" {param.help}" if param.help else ""
    return f"`{name}`\n:   {', '.join(facts)}.{meaning}"


def _is_list(param: Any) -> bool:
    return any(get_origin(form) is list for form in _forms(param.type_descriptor.annotation))


def _forms(annotation: Any) -> list[Any]:
    """Return the forms of a union but None."""
    inside = get_args(annotation) if get_origin(annotation) not in (None, list) else ()
    is_union = bool(inside) and not all(isinstance(word, str) for word in inside)
    return [form for form in inside if form is not type(None)] if is_union else [annotation]


def _type(param: Any) -> str:
    (form,) = _forms(param.type_descriptor.annotation)
    if get_origin(form) is list:
        (form,) = get_args(form)
    words = get_args(form)
    if words:
        return "One of " + ", ".join(f"`{word}`" for word in words)
    limits = [f"from {param.min}"] * (param.min is not None) + [f"to {param.max}"] * (param.max is not None)
    name = NAMES[form.__name__]
    return " ".join([name[0].upper() + name[1:], *limits])
