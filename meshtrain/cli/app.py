"""The typer application that holds the commands, and arguments that several commands take."""

from pathlib import Path
from typing import Annotated

import typer

from meshtrain import console

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
