"""The commands for a run: train, sweep, check, verify, plan, schema."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from meshtrain import console
from meshtrain.cli.app import Overrides, RunFile, app, check_writable
from meshtrain.errors import ConfigError
from meshtrain.runtime.exit_codes import DOES_NOT_FIT, NOT_PROVEN, RESTART

if TYPE_CHECKING:
    from meshtrain.config.run import RunConfig
    from meshtrain.training.run import Ending

WorldSize = Annotated[int, typer.Option(min=1, max=10**6, help="Number of processes.", show_default=False)]
OptionalWorldSize = Annotated[
    int | None, typer.Option(min=1, max=10**6, help="Number of processes.", show_default=False)
]


@app.command()
def train(
    run: RunFile,
    overrides: Overrides = None,
    processes: Annotated[
        str | None,
        typer.Option(metavar="N", help="Start N processes on this machine; `gpus`: one for each GPU."),
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(
            min=0, help="With --processes: number of restarts of all processes after one was lost; left out: 0."
        ),
    ] = None,
) -> None:
    """Train a run, or resume it.

    Use --processes for several processes, torchrun for several machines.
    """
    if processes is None and max_restarts is not None:
        raise ConfigError("--max-restarts needs --processes", "pass both, or leave it out")
    from meshtrain.config.toml import load_run

    config = load_run(run, overrides or ())
    _check_machine(config)
    if processes is not None:
        arguments = ["train", str(run), *(overrides or ())]
        raise typer.Exit(_start_processes(arguments, processes, max_restarts=max_restarts or 0))
    from meshtrain.api.train import train as train_run

    _end(train_run(config))


def _end(ending: "Ending") -> None:
    """End with the exit code that says to start the run again, if it has only stopped."""
    from meshtrain.runtime.environment import must_end_with_0
    from meshtrain.training.run import Ending

    if ending is Ending.FOLLOWED or (ending is Ending.ASKED and not must_end_with_0()):
        raise typer.Exit(RESTART)


def _check_machine(config: "RunConfig") -> None:
    """Check the machine that a run names, before anything is launched.

    Raises:
        ConfigError: if there is no such machine, or its file is wrong.
    """
    if config.machine is not None:
        from meshtrain.planning.machine import check_machine

        check_machine(config.machine)


def _start_processes(arguments: Sequence[str], processes: str, *, max_restarts: int = 0) -> int:
    """Run a command of meshtrain in several processes, and return the exit code.

    Raises:
        ConfigError: if this number of processes is not possible.
    """
    number = _number_of_processes(processes)
    from meshtrain.runtime.launch import run_workers

    command = [sys.executable, "-u", "-m", "meshtrain", *arguments]
    return run_workers(command, number, max_restarts=max_restarts)


def _number_of_processes(processes: str) -> int:
    """Return the number of processes that --processes asks for.

    Raises:
        ConfigError: if this number of processes is not possible.
    """
    from meshtrain.runtime.environment import is_launched

    if is_launched():
        raise ConfigError("--processes starts processes, but torchrun has started this one", "leave one of them out")
    if processes != "gpus" and (not processes.isdecimal() or int(processes) == 0):
        raise ConfigError(f"--processes {processes}: expected a whole number from 1, or `gpus`")
    import torch

    number = torch.cuda.device_count() if processes == "gpus" else int(processes)
    if number == 0:
        raise ConfigError(
            "--processes gpus: this machine has no GPU",
            "pass the number of processes to start on its CPU, as in --processes 4",
        )
    return number


@app.command()
def sweep(
    run: RunFile,
    choices: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=[VALUE,...]",
            help="Keys with the values to try, such as 'optimizer.learning_rate=[1e-4,3e-4]'.",
            show_default=False,
        ),
    ] = None,
    processes: Annotated[
        str | None,
        typer.Option(metavar="N", help="Train each run with N processes on this machine; `gpus`: one for each GPU."),
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where the run directories are written; left out: the run_directory of RUN."),
    ] = None,
    slurm: Annotated[
        bool,
        typer.Option("--slurm", help="Train nothing, and write the script of a Slurm array job; N is for each node."),
    ] = False,
) -> None:
    """Train a run with every combination of some values, and compare.

    Runs that are done are not trained again. Exit code 1: a run has failed.
    """
    from meshtrain.runtime.environment import is_launched

    if is_launched():
        raise ConfigError("sweep starts the processes of its runs, but torchrun has started this one", "leave it out")
    number = None if processes is None or (slurm and processes == "gpus") else _number_of_processes(processes)
    from meshtrain.tuning.sweep.command import prepare, train, write_script

    prepared = prepare(run, choices or (), directory, None if slurm else number or 1)
    if slurm:
        write_script(prepared, number)
    elif code := train(prepared, number):
        raise typer.Exit(code)


@app.command("learning-rate")
def learning_rate(
    run: RunFile,
    overrides: Overrides = None,
    lowest: Annotated[float, typer.Option(metavar="RATE", help="Learning rate of the first step.")] = 1e-7,
    highest: Annotated[float, typer.Option(metavar="RATE", help="Learning rate of the last step.")] = 1.0,
    steps: Annotated[int, typer.Option(min=10, max=10_000, help="Number of steps.")] = 100,
    processes: Annotated[
        str | None,
        typer.Option(metavar="N", help="Start N processes on this machine; `gpus`: one for each GPU."),
    ] = None,
    html: Annotated[Path, typer.Option(metavar="FILE", help="The page with the curve.")] = Path("learning-rate.html"),
) -> None:
    """Find the learning rates at which the loss of a run falls.

    A few steps are trained, in which the rate grows by the same factor. Only the page is kept.
    """
    from meshtrain.config.optimizer import LARGEST_RATE
    from meshtrain.config.toml import load_run
    from meshtrain.runtime.environment import rank_from_environment

    if not 0 < lowest < highest <= LARGEST_RATE:
        raise ConfigError(
            f"--lowest {lowest:g} and --highest {highest:g}: expected rates above 0 to {LARGEST_RATE:g}",
            "pass the lower one as --lowest",
        )
    if rank_from_environment() == 0:
        # The attempt creates the file and removes it, so only one process may make it.
        check_writable("--html", html)
    config = load_run(run, overrides or ())
    _check_machine(config)
    from meshtrain.tuning.rates.trial import Bounds, remove_scratch

    if processes is not None:
        options = [f"--lowest={lowest!r}", f"--highest={highest!r}", f"--steps={steps}", f"--html={html}"]
        try:
            code = _start_processes(["learning-rate", str(run), *(overrides or ()), *options], processes)
        finally:
            # A process that was killed has not removed it.
            remove_scratch(config)
        raise typer.Exit(code)
    from meshtrain.tuning.rates.command import try_rates

    _end(try_rates(config, Bounds(lowest, highest, steps), html))


@app.command()
def check(run: RunFile, world_size: WorldSize, overrides: Overrides = None) -> None:
    """Show what each process would hold.

    Finds every contradiction between run, plan, model and number of processes.
    """
    from meshtrain.config.toml import load_run

    config = load_run(run, overrides or ())
    from meshtrain.api.check import check_run
    from meshtrain.training.report import show_run

    show_run(check_run(config, world_size))
    console.line("The plan fits the model, the batches and the processes. Activations and buffers are not counted.")


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
    only_defaults: Annotated[
        bool, typer.Option("--defaults", help="With --models: prove only the default flags of each class.")
    ] = False,
) -> None:
    """Prove that a plan computes what one device does. Exit code 0: proven, 1: not.

    The proof uses a tiny copy of the model.
    """
    if models == (run is not None):
        raise ConfigError(
            "meshtrain verify takes a RUN, or --models for every class of transformers", "pass one of them"
        )
    if (models and json_file is not None) or (not models and (types or only_defaults or table is not None)):
        raise ConfigError(
            "--json belongs to a RUN, --type, --defaults and --table to --models", "leave out what does not"
        )
    table = table or (Path("coverage.md") if models else None)
    for option, file in (("--json", json_file), ("--table", table)):
        if file is not None:
            check_writable(option, file)
    if run is None:
        from meshtrain.verify.classes import verify_models

        assert table is not None
        proven = verify_models(types or (), table, only_defaults=only_defaults)
    else:
        from meshtrain.config.toml import load_run

        config = load_run(run, overrides or ())
        from meshtrain.training.resolve import resolve_run
        from meshtrain.verify.verify_run import verify_run

        proven = verify_run(resolve_run(config), json_file)
    if not proven:
        raise typer.Exit(NOT_PROVEN)


@app.command()
def plan(
    run: RunFile,
    overrides: Overrides = None,
    as_toml: Annotated[bool, typer.Option("--toml", help="Show it as a plan file.")] = False,
    world_size: OptionalWorldSize = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Show what each process needs on this GPU: a name, a machine file, or `cpu`."
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="With --gpu: also write a page with drawings.")
    ] = None,
) -> None:
    """Show the resolved plan of a run. With --gpu: memory, messages and work of each process.

    For --gpu, the step is computed on tensors without values. Exit code 1: it does not fit.
    """
    if as_toml and gpu is not None:
        raise ConfigError("--toml shows the plan as a file, and --gpu what it needs", "leave one of them out")
    if html is not None:
        if gpu is None:
            raise ConfigError("--html shows what a plan needs on a machine", "add --gpu, or leave it out")
        check_writable("--html", html)
    from meshtrain.config.toml import dump_toml, load_run

    config = load_run(run, overrides or ())
    if gpu is not None:
        from meshtrain.planning.command import show_needs

        if not show_needs(config, world_size, gpu, html):
            raise typer.Exit(DOES_NOT_FIT)
        return
    from meshtrain.training.report import show_plan
    from meshtrain.training.resolve import resolve_run

    resolved = resolve_run(config, world_size)
    if as_toml:
        console.line(dump_toml(resolved.plan).rstrip())
    else:
        show_plan(resolved)


@app.command()
def search(
    run: RunFile,
    gpus: Annotated[int, typer.Option(min=1, max=10**6, help="Number of processes.", show_default=False)],
    gpu: Annotated[str, typer.Option(metavar="NAME", help="The GPU: a name or a machine file.", show_default=False)],
    overrides: Overrides = None,
    top: Annotated[int, typer.Option(min=1, help="Number of plans to show.")] = 10,
    seconds: Annotated[
        float | None,
        typer.Option(min=1, help="When simulations should end; by default 23 s, and 105 s for more than 64 GPUs."),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The plan file to write.")] = Path("found-plan.toml"),
) -> None:
    """Search the plan that trains a run fastest, and write it.

    Keys that are given as overrides are kept: plan.mesh.tp=4 searches among plans with tp 4.
    """
    from meshtrain.config.toml import load_run

    check_writable("--out", out)
    config = load_run(run, overrides or ())
    from meshtrain.runtime.fork_server import start

    # While this process imports torch, too.
    start(["meshtrain.planning.search.ranking"])
    from meshtrain.planning.search.command import search as search_plans

    pinned = {line.partition("=")[0].strip() for line in overrides or ()}
    search_plans(config, pinned, gpus, gpu, top, out, seconds)


@app.command()
def calibrate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The .toml file to write.", show_default=False)],
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN", help="Measure the operators of this run; else of small models.", show_default=False
        ),
    ] = None,
    overrides: Overrides = None,
    processes: Annotated[
        str | None,
        typer.Option(metavar="N", help="Measure with N processes on this machine; `gpus`: one for each GPU."),
    ] = None,
) -> None:
    """Measure how fast this machine is, and write its description for `plan` and `search`.

    Takes at most 2 minutes. Use torchrun to measure several machines.
    """
    from meshtrain.config.toml import load_run

    if file.suffix != ".toml":
        raise ConfigError(f"{file}: the description of a machine is a .toml file", "name it so, as in machine.toml")
    check_writable("FILE", file)
    config = None if run is None else load_run(run, overrides or ())
    if processes is not None:
        given = [] if run is None else [str(run), *(overrides or ())]
        raise typer.Exit(_start_processes(["calibrate", str(file), *given], processes))
    from meshtrain.planning.calibration.command import calibrate as measure

    measure(file, config)


@app.command()
def schema(
    kind: Annotated[
        Literal["run", "plan", "corpus", "machine"],
        typer.Argument(metavar="run|plan|corpus|machine", help="The kind of file.", show_default=False),
    ],
) -> None:
    """Show a JSON schema. With it, editors complete run, plan, corpus and machine files."""
    from meshtrain.config.schema import described_schema

    console.line(json.dumps(described_schema(kind), indent=2))
