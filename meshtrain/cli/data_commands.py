"""The commands for text: corpora, tokens, tokenizers, samples."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer

from meshtrain.cli.app import Overrides, app, data_app, tokenizer_app
from meshtrain.errors import ConfigError, UserError, name_some

CORPUS_PACKAGES = (
    "aiohttp",
    "datatrove",
    "ftfy",
    "lxml_html_clean",
    "orjson",
    "protego",
    "py3langid",
    "pyarrow",
    "tldextract",
    "trafilatura",
    "zstandard",
)
"""The packages of the extra `[corpus]`."""


@app.command()
def corpus(
    what: Annotated[
        Literal["run", "urls", "download", "clean", "deduplicate", "shuffle", "split", "report"],
        typer.Argument(
            metavar="WHAT",
            help="All steps, one of them, or a report of what they did.",
            show_default=False,
        ),
    ],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The corpus file.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Keys to override, such as clean.minimum_tokens=64."),
    ] = None,
    redo: Annotated[
        str | None, typer.Option(metavar="STEP", help="First remove this step and those after it.", show_default=False)
    ] = None,
) -> None:
    """Prepare a corpus from links or raw documents, and report what happened to each of them."""
    from meshtrain.config.toml import load_corpus

    config = load_corpus(file, overrides or ())
    if what == "report" and redo is not None:
        raise ConfigError("--redo is for steps, and report runs no step", "leave it out")
    _check_corpus_packages()
    if what == "report":
        from meshtrain.corpus.report.tables import report

        report(config)
    else:
        from meshtrain.corpus.preparation import run_chain

        run_chain(config, only=None if what == "run" else what, redo=redo)


def _check_corpus_packages() -> None:
    """Check that the packages of the extra are installed, before meshtrain.corpus imports them.

    Raises:
        UserError: naming the missing packages.
    """
    if missing := [package for package in CORPUS_PACKAGES if find_spec(package) is None]:
        raise UserError(
            f"meshtrain corpus needs packages that are not installed ({name_some(missing)})",
            'run pip install "meshtrain[corpus]"',
        )


Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCES",
        help="Files (.jsonl, .json, .txt, each also .gz or .zst; .parquet), directories, globs, or python-stdlib.",
        show_default=False,
    ),
]
TextKey = Annotated[str, typer.Option(metavar="KEY", help="The key or column that holds the text.")]
OnBadRecord = Annotated[
    Literal["fail", "skip"], typer.Option(help="What to do with a bad record. `skip` leaves it out and counts it.")
]
Limit = Annotated[
    int | None, typer.Option(min=1, help="Largest number of documents, from the first on.", show_default=False)
]


@app.command()
def tokenize(
    sources: Sources,
    tokenizer: Annotated[
        str,
        typer.Option(metavar="PATH", help="A Hugging Face directory, tokenizer.json or hub id.", show_default=False),
    ],
    output: Annotated[Path, typer.Option(metavar="DIR", help="The directory to write.", show_default=False)],
    text_key: TextKey = "text",
    on_bad_record: OnBadRecord = "fail",
    format: Annotated[
        Literal["meshtrain", "megatron"],
        typer.Option(
            help="Token files of meshtrain, or .bin/.idx pairs of Megatron-LM with end tokens (--append-eod)."
        ),
    ] = "meshtrain",
    workers: Annotated[
        int | None, typer.Option(min=1, help="Number of processes; left out: one per core.", show_default=False)
    ] = None,
    validation: Annotated[
        float,
        typer.Option(
            min=0.0, max=0.99, metavar="FRACTION", help="Fraction of the documents that are kept for validation."
        ),
    ] = 0.0,
    limit: Limit = None,
) -> None:
    """Turn text into token files. If killed, it resumes; the files are the same byte for byte."""
    from meshtrain.config.data import DataConfig
    from meshtrain.data.cache import Cache
    from meshtrain.data.tokens.tokenize_command import TokenizeRequest, tokenize_sources

    request = TokenizeRequest(
        sources,
        tokenizer,
        output,
        text_key=text_key,
        on_bad_record=on_bad_record,
        format=format,
        num_workers=workers,
        validation=validation,
        num_documents=limit,
    )
    tokenize_sources(request, Cache(Path(DataConfig().cache_directory)))


@tokenizer_app.command("train")
def train_tokenizer_command(
    sources: Sources,
    vocab_size: Annotated[
        int, typer.Option(min=258, help="256 bytes, 2 special tokens, and the merges.", show_default=False)
    ],
    output: Annotated[Path, typer.Option(metavar="DIR", help="The directory to write.", show_default=False)],
    text_key: TextKey = "text",
    on_bad_record: OnBadRecord = "fail",
    limit: Limit = None,
) -> None:
    """Train a byte-level BPE. The result is a Hugging Face directory, the same on every machine."""
    from meshtrain.data.tokens.tokenizer_training import train_tokenizer_on_sources

    train_tokenizer_on_sources(
        sources, vocab_size, output, text_key=text_key, on_bad_record=on_bad_record, num_documents=limit
    )


@data_app.command("inspect")
def inspect_data(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN|TOKENS", help="A run file, a token file, or a pair of Megatron-LM.", show_default=False
        ),
    ],
    overrides: Overrides = None,
    index: Annotated[
        int, typer.Option(min=0, help="Index of the first sample, or of the first document of a token file.")
    ] = 0,
    count: Annotated[int, typer.Option(min=1, help="Number of samples or documents.")] = 1,
    part: Annotated[
        Literal["train", "validation"] | None, typer.Option(help="Part of a run; left out: train.", show_default=False)
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="Tokenizer of a token file, if it is not beside the file.", show_default=False
        ),
    ] = None,
) -> None:
    """Show samples as the model sees them: decoded, with document borders and trained parts."""
    if target.endswith(".toml"):
        from meshtrain.config.toml import load_run
        from meshtrain.data.inspection import inspect_run

        if tokenizer is not None:
            raise ConfigError("--tokenizer belongs to a token file", "override data.tokenizer.path of a run")
        config = load_run(target, overrides or ())
        inspect_run(config.data, part=part or "train", first=index, count=count, name=target)
        return
    if overrides or part is not None:
        found = f"the override {overrides[0]}" if overrides else "--part"
        raise ConfigError(f"{found} belongs to a run file (.toml), and {target} is not one", "leave it out")
    from meshtrain.config.data import DataConfig
    from meshtrain.data.cache import Cache
    from meshtrain.data.inspection import inspect_tokens

    cache = Cache(Path(DataConfig().cache_directory))
    inspect_tokens(str(Path(target).absolute()), tokenizer, cache, first=index, count=count)
