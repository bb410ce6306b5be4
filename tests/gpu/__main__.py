"""Check and measure meshtrain on the GPU of this machine, with one command.

python -m tests.gpu                  all parts, at most 25 minutes; results into gpu-results/
python -m tests.gpu parity memory    some parts
python -m tests.gpu --list           the parts
python -m tests.gpu --device cpu --small    on the CPU at tiny sizes, to see that the parts work

It needs no network: models are built from configurations, and data is made. What fails is reported,
and the rest goes on. The exit code is 0 if nothing failed, 1 if something did, and 2 without a GPU.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.gpu.report import Row, shown_numbers, shown_result, write_report

MINUTES = 25.0
MOST_SECONDS = 500.0
"""Time of a process. A case that hangs must not take the time of the others."""
ROWS_NAME = "rows.jsonl"


def main() -> int:
    """Run the parts that the arguments name."""
    from tests.gpu.parts import PARTS

    options = _arguments(list(PARTS))
    if options.list:
        for name, part in PARTS.items():
            print(f"{name:12} {'; '.join(part.cases)}")
        return 0
    if options.device == "cuda" and not _has_gpu():
        print("error: there is no GPU; add --device cpu --small to see on the CPU that the parts work", file=sys.stderr)
        return 2
    folder = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if options.child is not None:
        _run_cases(options, folder)
        return 0
    (folder / ROWS_NAME).write_text("")
    deadline = time.monotonic() + 60 * options.minutes
    for part in options.parts or PARTS:
        cases = list(PARTS[part].cases)
        for chosen in [[case] for case in cases] if PARTS[part].apart else [cases]:
            _run_child(options, folder, part, chosen, deadline)
            write_report(folder, _machine(options.device), _rows(folder))
    rows = _rows(folder)
    numbers = {status: sum(row.status == status for row in rows) for status in ("passed", "failed", "skipped")}
    print(f"{', '.join(f'{number} {status}' for status, number in numbers.items())}; see {folder / 'results.md'}")
    return 1 if numbers["failed"] else 0


def _arguments(parts: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", choices=[*parts, []], help=", ".join(parts))
    parser.add_argument("--list", action="store_true", help="show the parts and their cases")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models, which measure nothing")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder of the results")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="parts that begin later are skipped")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--cases", nargs="*", help=argparse.SUPPRESS)
    return parser.parse_args()


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _machine(device: str) -> dict[str, Any]:
    import torch

    names = ("torch", "transformers")
    machine = {name: version(name) for name in names} | {
        "python": platform.python_version(),
        "device": platform.machine(),
    }
    if device == "cuda":
        number = torch.cuda.device_count()
        machine |= {"device": f"{number} x {torch.cuda.get_device_name()}", "cuda": str(torch.version.cuda)}
    return machine


def _run_child(options: argparse.Namespace, folder: Path, part: str, cases: list[str], deadline: float) -> None:
    """Run cases in a process of their own, and note those that it did not end."""
    before = len(_rows(folder))
    if (left := deadline - time.monotonic()) <= 0:
        for case in cases:
            _note(folder, Row(part, case, "skipped", reason=f"the {options.minutes:g} minutes are over"))
        return
    command = [sys.executable, "-m", "tests.gpu", "--child", part, "--device", options.device, "--out", str(folder)]
    command += [*(["--small"] if options.small else []), "--cases", *cases]
    # A CPU run on a machine with GPUs.
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if options.device == "cpu" else {}
    log, problem = folder / f"{part}.log", ""
    with log.open("a") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, **hidden})
        try:
            process.wait(min(left, MOST_SECONDS))
            if process.returncode:
                problem = f"its process ended with {process.returncode}, see {log.name}"
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            problem = f"not finished after {min(left, MOST_SECONDS):.0f} s"
    ended = {row.case for row in _rows(folder)[before:]}
    for case in cases:
        if case not in ended:
            _note(folder, Row(part, case, "failed", reason=problem or f"did not run, see {log.name}"))
    for row in _rows(folder)[before:]:
        print(f"{row.part:12} {row.case:24} {shown_result(row)}  {shown_numbers(row)}", flush=True)


def _run_cases(options: argparse.Namespace, folder: Path) -> None:
    from tests.gpu.outcome import Setting
    from tests.gpu.parts import PARTS

    setting = Setting(options.device, options.small, folder / options.child)
    setting.folder.mkdir(exist_ok=True)
    for case in options.cases:
        _note(folder, _run_case(setting, options.child, case, PARTS[options.child].cases[case]))


def _run_case(setting: Any, part: str, case: str, check: Any) -> Row:
    from tests.gpu.outcome import Failed, Skipped
    from tests.gpu.parts import free_memory

    begin = time.monotonic()
    sys.stderr.write(f"== {case}\n")
    try:
        numbers = check(setting)
    except Skipped as skipped:
        return Row(part, case, "skipped", skipped.numbers, str(skipped))
    except Failed as failed:
        traceback.print_exc()
        return Row(part, case, "failed", failed.numbers, str(failed))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is reported, and the other cases go on
        traceback.print_exc()
        return Row(part, case, "failed", reason=f"{type(error).__name__}: {error}".strip().splitlines()[0])
    finally:
        free_memory()
    return Row(part, case, "passed", {**numbers, "case_seconds": time.monotonic() - begin})


def _note(folder: Path, row: Row) -> None:
    with (folder / ROWS_NAME).open("a") as file:
        file.write(json.dumps(asdict(row)) + "\n")


def _rows(folder: Path) -> list[Row]:
    return list(_read_rows(folder / ROWS_NAME))


def _read_rows(path: Path) -> Iterator[Row]:
    for line in path.read_text().splitlines():
        yield Row(**json.loads(line))


if __name__ == "__main__":
    sys.exit(main())
