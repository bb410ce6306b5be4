"""The commands for the results of a run: report, checkpoints, ordinary models, generated text."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from meshtrain import console
from meshtrain.cli.app import app, check_writable, checkpoint_app

if TYPE_CHECKING:
    from meshtrain.config.plan import ParallelPlan

DtypeOption = Annotated[
    Literal["original", "float32", "bfloat16", "float16"],
    typer.Option(help="Number format of the weights; original: what the model had before the training."),
]


def _argument(metavar: str, text: str) -> Any:
    """Return a required argument with its help."""
    return typer.Argument(metavar=metavar, help=text, show_default=False)


def _plan_of(file: str | None, overrides: list[str] | None) -> "ParallelPlan | None":
    """Return the plan that the options of a command name; None: there is one process."""
    from meshtrain.config.toml import load_plan

    return load_plan(file, overrides or ()) if file is not None or overrides else None


ModelSource = Annotated[
    str,
    _argument("CHECKPOINT", "A checkpoint, a run directory for its newest one, or a Hugging Face model. May be a URL."),
]
PlanOverrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Keys of the plan, such as mesh.tp=4.", show_default=False),
]
PlanFile = Annotated[
    str | None, typer.Option(metavar="FILE", help="A plan file, for more than one process.", show_default=False)
]


@app.command()
def report(
    run_directory: Annotated[Path, _argument("RUN_DIRECTORY", "The directory of a run, which may still be running.")],
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with charts, in one HTML file.")
    ] = None,
) -> None:
    """Show what a run did.

    Losses, speed, memory, time, checkpoints, restarts and bad steps; predicted against measured.
    """
    from meshtrain.profiling.report.command import show_report

    if html is not None:
        check_writable("--html", html)
    show_report(run_directory, html)


@app.command()
def export(
    checkpoint: Annotated[
        str, _argument("CHECKPOINT", "A checkpoint, or a run directory for its newest one. May be a URL.")
    ],
    folder: Annotated[Path, _argument("FOLDER", "The folder to write.")],
    dtype: DtypeOption = "original",
    merge_adapters: Annotated[
        bool, typer.Option("--merge-adapters", help="Add LoRA adapters to the weights, and write the full model.")
    ] = False,
    ema: Annotated[bool, typer.Option("--ema", help="Write the average of the weights ([ema] of the run).")] = False,
) -> None:
    """Write a Hugging Face model, or adapters for peft. The stock from_pretrained loads it."""
    from meshtrain.inference.lora import export as export_model

    export_model(checkpoint, folder, dtype=dtype, merge_adapters=merge_adapters, ema=ema)


@app.command()
def merge(
    folder: Annotated[str, _argument("FOLDER", "What save_parallelized wrote, or a checkpoint; may be a URL.")],
    out: Annotated[Path, _argument("OUT", "The folder to write.")],
    dtype: DtypeOption = "original",
) -> None:
    """Join the files of all processes into a Hugging Face model, in one process on the CPU."""
    from meshtrain.checkpoint.huggingface.export import merge as merge_files
    from meshtrain.checkpoint.storage.location import open_location

    merge_files(open_location(folder), out, dtype=dtype)


@checkpoint_app.command("list")
def list_checkpoints(
    directory: Annotated[str, _argument("DIR", "A run directory or its checkpoints; may be a URL.")],
) -> None:
    """Show the checkpoints of a run."""
    from meshtrain.checkpoint.show import show_checkpoints
    from meshtrain.checkpoint.storage.location import open_location

    show_checkpoints(open_location(directory))


@checkpoint_app.command("verify")
def verify_checkpoints(
    directory: Annotated[str, _argument("DIR", "A checkpoint, or a directory of them; may be a URL.")],
) -> None:
    """Read every file of checkpoints, and compare it with what was written."""
    from meshtrain.checkpoint.show import verify_checkpoints as verify_them
    from meshtrain.checkpoint.storage.location import open_location

    verify_them(open_location(directory))


@checkpoint_app.command("convert")
def convert_checkpoint(
    source: Annotated[
        str, _argument("FROM", "A checkpoint, a run directory for its newest one, or a Hugging Face folder.")
    ],
    target: Annotated[str, _argument("TO", "The Hugging Face folder, or where step-0 is written.")],
    dtype: DtypeOption = "original",
) -> None:
    """Convert a checkpoint to a Hugging Face folder, or a folder to a checkpoint to train from."""
    from meshtrain.checkpoint.huggingface.convert import convert
    from meshtrain.checkpoint.storage.location import open_location

    convert(open_location(source), open_location(target), dtype=dtype)


@app.command()
def evaluate(
    source: ModelSource,
    tasks: Annotated[
        str, typer.Option(metavar="NAMES", help="Tasks of lm-evaluation-harness, with commas.", show_default=False)
    ],
    overrides: PlanOverrides = None,
    plan: PlanFile = None,
    folder: Annotated[
        Path | None, typer.Option("--task-folder", metavar="DIR", help="A folder with tasks of your own.")
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, help="Number of examples in a prompt; left out: as the task says.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Number of documents of each task; left out: all.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests that are answered at once.")] = 8,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the scores as JSON.")] = None,
) -> None:
    """Evaluate a model on tasks of lm-evaluation-harness.

    To use several processes, start torchrun and pass a plan or its keys.
    """
    how = _plan_of(plan, overrides)
    from meshtrain.runtime.environment import rank_from_environment

    if out is not None and rank_from_environment() == 0:
        check_writable("--out", out)
    from meshtrain.inference.evaluation import Tasks, evaluate_tasks

    names = tuple(name.strip() for name in tasks.split(","))
    wanted = Tasks(names, folder, num_fewshot=num_fewshot, limit=limit, batch_size=batch_size)
    evaluate_tasks(source, wanted, how, out)


@app.command()
def generate(
    source: ModelSource,
    prompt: Annotated[list[str], typer.Option(help="The text to continue; repeatable.", show_default=False)],
    overrides: PlanOverrides = None,
    plan: PlanFile = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Largest number of new tokens.")] = 64,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="0: always the most likely token; left out: 0.8, or 0 with beams.", show_default=False
        ),
    ] = None,
    top_k: Annotated[
        int, typer.Option(min=0, help="Draw among this number of the most likely tokens; 0: among all.")
    ] = 0,
    top_p: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Draw among the most likely tokens that together have this probability."),
    ] = 1.0,
    num_beams: Annotated[int, typer.Option(min=1, help="Number of beams; only the best text is printed.")] = 1,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the draws.")] = 0,
) -> None:
    """Continue prompts with a model.

    To use several processes, start torchrun and pass a plan or its keys.
    """
    how = _plan_of(plan, overrides)
    from meshtrain.inference.prompts import Decoding, generate_texts

    decoding = Decoding(
        max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, num_beams=num_beams, seed=seed
    )
    for text in generate_texts(source, prompt, decoding, how):
        console.line(text)
