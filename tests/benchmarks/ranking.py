"""Whether the plan that a search puts first is the fastest, on two processes of this machine.

    python -m tests.benchmarks.ranking [--rounds 3] [--top 8] [--seconds 180] [--machine FILE]

The machine is calibrated first, unless a description is given. The plans that the search puts first
run one after the other in every round. Nothing else should run on the machine.
"""

import argparse
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from meshtrain.config.toml import load_machine
from meshtrain.planning.machine import CPU_GRANULARITY, Machine
from meshtrain.planning.needs import simulated_run
from meshtrain.planning.search.ranking import rank_plans
from meshtrain.planning.search.wanted import wanted_run
from tests.benchmarks.prediction import LLAMA, calibrated, make_run, make_small, measured

PROCESSES = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--top", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=180.0, help="in which simulations should end")
    parser.add_argument("--machine", type=Path)
    parser.add_argument("--small", action="store_true", help="a tiny model, to see that the benchmark works")
    arguments = parser.parse_args()
    if arguments.small:
        make_small()
    with TemporaryDirectory() as folder:
        description = load_machine(arguments.machine or calibrated(Path(folder)))
    machine = Machine("this machine", description, CPU_GRANULARITY, is_cpu=True)
    wanted = wanted_run(make_run(LLAMA, 1, {}), machine, PROCESSES)
    ranking = rank_plans(wanted, (), PROCESSES, time.monotonic() + arguments.seconds)
    first = ranking.fitting[: arguments.top]
    if not first:
        raise SystemExit("no plan fits this machine")
    print(f"{len(ranking.estimates)} plans, {len(ranking.simulated)} simulated, {len(first)} run")
    seconds: list[list[float]] = [[] for _ in first]
    for _ in range(arguments.rounds):
        for found, times in zip(first, seconds, strict=True):
            resolved = wanted.resolved(found.candidate, runs_model=True)
            times.append(measured(simulated_run(resolved, on_gpus=False)))
    medians = [statistics.median(times) for times in seconds]
    for found, median in zip(first, medians, strict=True):
        print(f"{found.candidate.described():70} predicted {found.time.seconds:.3f} s, measured {median:.3f} s")
    print(f"the first one takes {medians[0] / min(medians) - 1:+.1%} against the fastest")


if __name__ == "__main__":
    main()
