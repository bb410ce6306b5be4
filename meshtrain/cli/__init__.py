"""The command line: one function per command. Only this package prints errors and sets exit codes.

Exit codes:
    0    done
    1    a bug (with its traceback), a plan that is not proven, or a failed run of a sweep
    2    a mistake of the user (one line for each)
    3    another process of the run failed, vanished or hangs (every process reports which)
    75   asked to stop (SIGTERM, SIGUSR1 or `stop_after`) and saved: start the run again
    130  stopped by ctrl-C
    128 + number of the signal: stopped by a second signal

`train --processes` ends with the code of its processes, with 130 after ctrl-C even if they have
saved, and with 3 if one of them was killed.

Under torchrun a run that was asked to stop ends with 0, because torchrun would treat any other code
as a failure and start the run again. A restart is right where only another process received
SIGTERM, because its machine goes away: a process that stops for that reason ends with 75 under
torchrun too.

app.py             the typer application, and what several commands share
data_commands.py   commands for text: corpora, tokens, tokenizers, samples
model_commands.py  commands for the results of a run: report, checkpoints, models, text
run_commands.py    commands for a run: train, sweep, check, verify, plan, schema
"""

import gc
import os
import sys
import time
import traceback
from collections.abc import Iterable

import typer

from meshtrain import console
from meshtrain.cli import data_commands, model_commands, run_commands
from meshtrain.cli.app import app
from meshtrain.errors import UserError
from meshtrain.runtime.exit_codes import BUG, INTERRUPTED, USER_MISTAKE

# A module of commands adds them to the application when it is imported.
__all__ = ["data_commands", "main", "model_commands", "run_commands"]

SECONDS_FOR_RANK_0 = 5.0


def main() -> None:
    """Run the command line."""
    from meshtrain.runtime.environment import rank_from_environment
    from meshtrain.runtime.garbage_collection import rare_collections
    from meshtrain.runtime.lifetime import end_with_torchrun

    end_with_torchrun()
    console.configure(rank=rank_from_environment())
    with rare_collections():
        code = _exit_code(sys.argv[1:] or ["--help"])
    sys.stdout.flush()
    sys.stderr.flush()
    # Python's last garbage collections would inspect all objects of torch and of the run, which
    # takes up to 2 seconds, and frees what the operating system frees anyway.
    gc.freeze()
    if code != 0:
        # Without Python's clean-up: destroying a process group that others have not left waits for
        # them, or aborts.
        os._exit(code)


def _exit_code(arguments: list[str]) -> int:
    # Not app(): it treats a broken pipe anywhere in the training as a closed terminal, and ends
    # silently.
    command = typer.main.get_command(app)
    try:
        with command.make_context("meshtrain", arguments) as context:
            command.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    except typer.TyperException as mistake:
        return _print_mistake([f"{' '.join(mistake.format_message().split())} (see meshtrain --help)"])
    except UserError as mistake:
        return _print_mistake(mistake.lines, mistake.reporting_rank)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception:  # noqa: BLE001 - a bug; Python's own way out waits for process groups, or aborts
        traceback.print_exc()
        return BUG
    return 0


def _print_mistake(problems: Iterable[str], reporting_rank: int | None = None) -> int:
    """Print the problems, unless another rank does.

    Args:
        problems: one per line.
        reporting_rank: the rank that prints them; None: the ranks have agreed on none.
    """
    from meshtrain.runtime.environment import rank_from_environment

    if reporting_rank is not None and reporting_rank != rank_from_environment():
        return USER_MISTAKE
    if reporting_rank is None and rank_from_environment() != 0:
        # Almost always rank 0 finds the same problem and prints it, and torchrun ends this process
        # meanwhile. A problem that rank 0 does not find (such as the disk of another machine) must
        # be printed too.
        time.sleep(SECONDS_FOR_RANK_0)
    console.error_lines(problems)
    return USER_MISTAKE
