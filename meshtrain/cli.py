"""The doors: one function per verb, and the only place that prints an error and sets an exit code.

Exit codes: 0 done, 1 a bug (with its traceback) or a plan that is not proven, 2 the user's mistake (a line for each),
3 another process of the run failed, vanished or is stuck (all say which), 75 asked to stop (SIGTERM, SIGUSR1 or
`stop_after`) and saved: come again; 130 stopped by ctrl-C, 128 + number by a second signal. Under torchrun a run that
was asked to stop ends with 0: torchrun would take anything else for a failure, and start it again. Just that is right
where only another process was sent SIGTERM, because its machine has to go: such a process ends with 75 there too.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import typer

from meshtrain import console
from meshtrain.errors import ConfigError, UserError

BUG = NOT_PROVEN = 1
USER_MISTAKE = 2
INTERRUPTED = 130
COME_AGAIN = 75
SECONDS_FOR_RANK_0 = 5.0

# Neither rich's help panels nor its tracebacks: they take longer to load than everything else here together.
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

Run = Annotated[Path, typer.Argument(metavar="RUN", help="The run file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Keys to override, such as plan.mesh.tp=4.", show_default=False),
]
WorldSize = Annotated[int, typer.Option(min=1, help="Number of processes.", show_default=False)]
Dtype = Annotated[
    Literal["original", "float32", "bfloat16", "float16"],
    typer.Option(help="Number format of the weights; original: what the model had before the training."),
]
OptionalWorldSize = Annotated[int | None, typer.Option(min=1, help="Number of processes.", show_default=False)]


def main() -> None:
    """Run the command line."""
    from meshtrain.runtime.environment import rank_from_environment

    console.configure(rank=rank_from_environment())
    code = _exit_code(sys.argv[1:] or ["--help"])
    sys.stdout.flush()
    sys.stderr.flush()
    if code != 0:
        # Without Python's clean-up: to take down a process group that others have not left waits for them, or aborts.
        os._exit(code)


def _exit_code(arguments: list[str]) -> int:
    # Not app(): it takes a broken pipe anywhere in the training for a closed terminal, and ends without a trace.
    command = typer.main.get_command(app)
    try:
        with command.make_context("meshtrain", arguments) as context:
            command.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    except typer.TyperException as mistake:
        return _tell_mistake([f"{' '.join(mistake.format_message().split())} (see meshtrain --help)"])
    except UserError as mistake:
        return _tell_mistake(mistake.problems, mistake.teller)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception:  # noqa: BLE001 - a bug; Python's own way out waits for process groups, or aborts
        traceback.print_exc()
        return BUG
    return 0


def _tell_mistake(problems: Iterable[str], teller: int | None = None) -> int:
    """Print the problems, unless another rank does.

    Args:
        problems: one per line.
        teller: the rank that prints them; None: nothing was agreed.
    """
    from meshtrain.runtime.environment import rank_from_environment

    if teller is not None and teller != rank_from_environment():
        return USER_MISTAKE
    if teller is None and rank_from_environment() != 0:
        # Almost always rank 0 finds the same and says it, and torchrun ends this process meanwhile. What rank 0 does
        # not find (the disk of another machine, say) must not go unsaid.
        time.sleep(SECONDS_FOR_RANK_0)
    console.error_lines(problems)
    return USER_MISTAKE


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


@app.command()
def train(run: Run, overrides: Overrides = None) -> None:
    """Train a run, or resume it. Start it with torchrun for more than one process."""
    from meshtrain.config.toml import load_run

    config = load_run(run, overrides or ())
    from meshtrain.library.train import train as train_run
    from meshtrain.runtime.environment import is_under_torchrun
    from meshtrain.training.run import Ending

    ending = train_run(config)
    if ending is Ending.FOLLOWED or (ending is Ending.ASKED and not is_under_torchrun()):
        raise typer.Exit(COME_AGAIN)


@app.command()
def check(run: Run, world_size: WorldSize, overrides: Overrides = None) -> None:
    """Show who would hold what. Finds every contradiction between run, plan, model and number of processes."""
    from meshtrain.config.toml import load_run

    config = load_run(run, overrides or ())
    from meshtrain.training.report import check_run

    check_run(config, world_size)


@app.command()
def verify(
    run: Annotated[Path | None, typer.Argument(metavar="RUN", help="The run file.", show_default=False)] = None,
    overrides: Overrides = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the proofs as JSON.")] = None,
    models: Annotated[bool, typer.Option("--models", help="Instead of a run: every class of transformers.")] = False,
    table: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --models: where to write the table; else coverage.md.")
    ] = None,
    types: Annotated[
        list[str] | None, typer.Option("--type", help="With --models: this type only; repeatable.")
    ] = None,
) -> None:
    """Prove on a tiny copy of the model that the plan computes what one device computes. 0: proven, 1: not."""
    if models == (run is not None):
        raise ConfigError("meshtrain verify takes a RUN, or --models for every class of transformers; give one of them")
    if (models and json_file is not None) or (not models and (types or table is not None)):
        raise ConfigError("--json belongs to a RUN, --type and --table to --models; leave out what does not")
    table = table or (Path("coverage.md") if models else None)
    for option, file in (("--json", json_file), ("--table", table)):
        if file is not None:
            _check_writable(option, file)
    if run is None:
        from meshtrain.verify.classes import verify_models

        assert table is not None
        proven = verify_models(types or (), table)
    else:
        from meshtrain.config.toml import load_run

        config = load_run(run, overrides or ())
        from meshtrain.verify.run import verify_run

        proven = verify_run(config, json_file)
    if not proven:
        raise typer.Exit(NOT_PROVEN)


def _check_writable(option: str, file: Path) -> None:
    """Check that a file can be written in the end: a proof takes long, and must not be lost.

    Raises:
        ConfigError: if it cannot.
    """
    try:
        if not file.parent.is_dir():
            raise ConfigError(f"{option}: {file.parent} is no directory; make it, or choose another place")
        if file.is_dir():
            # An empty name is the directory that this is.
            raise ConfigError(f"{option}: {file} is a directory; give the name of a file")
        is_new = not file.exists()
        # Nothing but trying tells: a file system may be read-only, or may not have such names.
        file.open("a").close()
    except OSError as error:
        raise ConfigError(f"{option}: {file} cannot be written ({error.strerror}); choose another place") from error
    if is_new:
        file.unlink()


@app.command()
def plan(
    run: Run,
    overrides: Overrides = None,
    as_toml: Annotated[bool, typer.Option("--toml", help="Show it as a plan file.")] = False,
    world_size: OptionalWorldSize = None,
) -> None:
    """Show the resolved plan of a run."""
    from meshtrain.config.toml import load_run

    config = load_run(run, overrides or ())
    from meshtrain.training.report import show_plan

    show_plan(config, world_size=world_size, as_toml=as_toml)


@app.command()
def export(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT", help="A checkpoint, or a run directory: its newest; may be a URL.", show_default=False
        ),
    ],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder to write.", show_default=False)],
    dtype: Dtype = "original",
) -> None:
    """Write a Hugging Face model. The stock from_pretrained loads it."""
    from meshtrain.checkpoint.export import export_checkpoint
    from meshtrain.checkpoint.location import open_location

    export_checkpoint(open_location(checkpoint), folder, dtype=dtype)


@app.command()
def merge(
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", help="What save_parallelized wrote; may be a URL.", show_default=False)
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.", show_default=False)],
    dtype: Dtype = "original",
) -> None:
    """Make one Hugging Face model of the files that every process wrote. One process, no accelerator."""
    from meshtrain.checkpoint.export import merge as merge_files
    from meshtrain.checkpoint.location import open_location

    merge_files(open_location(folder), out, dtype=dtype)


@checkpoint_app.command("list")
def list_checkpoints(
    directory: Annotated[
        str, typer.Argument(metavar="DIR", help="A run directory or its checkpoints; may be a URL.", show_default=False)
    ],
) -> None:
    """Show the checkpoints of a run."""
    from meshtrain.checkpoint.location import open_location
    from meshtrain.checkpoint.show import show_checkpoints

    show_checkpoints(open_location(directory))


@checkpoint_app.command("verify")
def verify_checkpoints(
    directory: Annotated[
        str,
        typer.Argument(metavar="DIR", help="A checkpoint, or a directory of them; may be a URL.", show_default=False),
    ],
) -> None:
    """Read every file of checkpoints and compare it with what was written."""
    from meshtrain.checkpoint.location import open_location
    from meshtrain.checkpoint.show import verify_checkpoints as verify_them

    verify_them(open_location(directory))


@checkpoint_app.command("convert")
def convert_checkpoint(
    source: Annotated[
        str, typer.Argument(metavar="FROM", help="A checkpoint, or a Hugging Face folder.", show_default=False)
    ],
    target: Annotated[
        str,
        typer.Argument(metavar="TO", help="The Hugging Face folder, or where step-0 is written.", show_default=False),
    ],
    dtype: Dtype = "original",
) -> None:
    """Turn a checkpoint into a Hugging Face folder, or such a folder into a checkpoint to train from."""
    from meshtrain.checkpoint.convert import convert
    from meshtrain.checkpoint.location import open_location

    convert(open_location(source), open_location(target), dtype=dtype)


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
        str | None, typer.Option(metavar="STEP", help="Remove this step and what follows it first.", show_default=False)
    ] = None,
) -> None:
    """Prepare a corpus, from links or raw documents, and report what happened to every document."""
    from meshtrain.config.toml import load_corpus

    config = load_corpus(file, overrides or ())
    if what == "report" and redo is not None:
        raise ConfigError("--redo belongs to steps, and report runs none; leave it out")
    from meshtrain.corpus.installed import check_installed

    check_installed()
    if what == "report":
        from meshtrain.corpus.report import report

        report(config)
    else:
        from meshtrain.corpus.run import run_chain

        run_chain(config, only=None if what == "run" else what, redo=redo)


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
    Literal["fail", "skip"], typer.Option(help="What to do with a record that is no text; skip counts them.")
]
Limit = Annotated[
    int | None, typer.Option(min=1, help="Only so many documents, from the first on.", show_default=False)
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
        float, typer.Option(min=0.0, max=0.99, metavar="FRACTION", help="Keep so many of the documents aside.")
    ] = 0.0,
    limit: Limit = None,
) -> None:
    """Turn text into token files. Killed, it goes on where it stopped; the files are the same byte for byte."""
    from meshtrain.config.data import DataConfig
    from meshtrain.data.cache import Cache
    from meshtrain.data.tokenise_to import Order, tokenise_to

    order = Order(
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
    tokenise_to(order, Cache(Path(DataConfig().cache_directory)))


@tokenizer_app.command("train")
def train_tokenizer_command(
    sources: Sources,
    vocab_size: Annotated[
        int, typer.Option(min=258, help="256 bytes, 2 special tokens, and what is learnt.", show_default=False)
    ],
    output: Annotated[Path, typer.Option(metavar="DIR", help="The directory to write.", show_default=False)],
    text_key: TextKey = "text",
    on_bad_record: OnBadRecord = "fail",
    limit: Limit = None,
) -> None:
    """Train a byte-level BPE. The result is a Hugging Face directory, the same on every machine."""
    from meshtrain.data.tokenizer_training import train_tokenizer_to

    train_tokenizer_to(sources, vocab_size, output, text_key=text_key, on_bad_record=on_bad_record, num_documents=limit)


@data_app.command("inspect")
def inspect_data(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN|TOKENS", help="A run file, a token file, or a pair of Megatron-LM.", show_default=False
        ),
    ],
    overrides: Overrides = None,
    index: Annotated[int, typer.Option(min=0, help="Of the sample, or document of a token file, as stored.")] = 0,
    count: Annotated[int, typer.Option(min=1, help="How many, from there on.")] = 1,
    part: Annotated[
        Literal["train", "validation"] | None, typer.Option(help="Of a run; left out: train.", show_default=False)
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="PATH", help="Of a token file, if not beside it.", show_default=False)
    ] = None,
) -> None:
    """Show samples as the model sees them: decoded, with the borders of documents and what is trained on."""
    if target.endswith(".toml"):
        from meshtrain.config.toml import load_run
        from meshtrain.data.inspection import inspect_run

        if tokenizer is not None:
            raise ConfigError("--tokenizer belongs to a token file; override data.tokenizer.path of a run")
        config = load_run(target, overrides or ())
        inspect_run(config.data, part=part or "train", first=index, count=count, name=target)
        return
    if overrides or part is not None:
        found = f"the override {overrides[0]}" if overrides else "--part"
        raise ConfigError(f"{found} belongs to a run file (.toml), and {target} is none; leave it out")
    from meshtrain.config.data import DataConfig
    from meshtrain.data.cache import Cache
    from meshtrain.data.inspection import inspect_tokens

    cache = Cache(Path(DataConfig().cache_directory))
    inspect_tokens(str(Path(target).absolute()), tokenizer, cache, first=index, count=count)


@app.command()
def generate(
    source: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A checkpoint, or a run directory: its newest; or a Hugging Face model; may be a URL.",
            show_default=False,
        ),
    ],
    prompt: Annotated[list[str], typer.Option(help="The text to go on from; repeatable.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Keys of the plan, such as mesh.tp=4.", show_default=False),
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A plan file, for more than one process.", show_default=False),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="0: always the most likely token; left out: 0.8, or 0 with beams.", show_default=False
        ),
    ] = None,
    top_k: Annotated[int, typer.Option(min=0, help="Draw among so many likely tokens; 0: among all.")] = 0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Draw among those that have this probability.")] = 1.0,
    num_beams: Annotated[int, typer.Option(min=1, help="Follow so many likely texts, and give the best.")] = 1,
    seed: int = 0,
) -> None:
    """Let a model go on from prompts. Start it with torchrun, and a plan or keys of one, for more than one process."""
    from meshtrain.config.toml import load_plan

    how = load_plan(plan, overrides or ()) if plan is not None or overrides else None
    from meshtrain.inference.generate import Decoding, generate_texts

    decoding = Decoding(
        max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, num_beams=num_beams, seed=seed
    )
    for text in generate_texts(source, prompt, decoding, how):
        console.line(text)


@app.command()
def schema(
    kind: Annotated[Literal["run", "plan", "corpus"], typer.Argument(metavar="run|plan|corpus", show_default=False)],
) -> None:
    """Show a JSON schema. With it, editors complete run, plan and corpus files."""
    from meshtrain.config.schema import json_schema

    console.line(json.dumps(json_schema(kind), indent=2))
