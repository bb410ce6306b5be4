"""The typer application that holds the commands, and what several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from meshtrain import console
from meshtrain.errors import ConfigError

# rich's help panels and tracebacks are off: they take longer to load than everything else here.
app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Train any Hugging Face causal language model on PyTorch's own distributed stack, from one plan file.",
)

checkpoint_app = typer.Typer(help="Look at checkpoints, verify and convert them.")
app.add_typer(checkpoint_app, name="checkpoint")
tokenizer_app = typer.Typer(help="Make tokenizers.")
app.add_typer(tokenizer_app, name="tokenizer")
data_app = typer.Typer(help="Look at data.")
app.add_typer(data_app, name="data")
RunFile = Annotated[Path, typer.Argument(metavar="RUN", help="The run file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Keys to override, such as plan.mesh.tp=4.", show_default=False),
]


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        console.line(f"meshtrain {version('meshtrain')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None: ...


def check_writable(option: str, file: Path) -> None:
    """Check before the work that its result can be written to a file.

    Raises:
        ConfigError: if it cannot.
    """
    try:
        if not file.parent.is_dir():
            raise ConfigError(f"{option}: {file.parent} is not a directory", "create it, or choose another one")
        if file.is_dir():
            # An empty name means the current directory.
            raise ConfigError(f"{option}: {file} is a directory", "pass the name of a file")
        is_new = not file.exists()
        # Only an attempt shows it: a file system may be read-only, or may not allow such names.
        file.open("a").close()
    except OSError as error:
        raise ConfigError(f"{option}: {file} cannot be written ({error.strerror})", "choose another file") from error
    if is_new:
        # Another process of the same command may have removed it.
        file.unlink(missing_ok=True)
