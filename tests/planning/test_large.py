"""Large runs are simulated with little memory. The seconds are printed."""

import resource
import time
from pathlib import Path

import pytest

from meshtrain.config.toml import load_run
from meshtrain.planning.assembly.pipeline import simulate
from meshtrain.planning.memory import memory_use
from meshtrain.planning.needs import simulated_run
from meshtrain.training.resolve import resolve_run
from tests.ranks import run_on_ranks

ROOT = Path(__file__).parents[2]
KIB = 4 * 2**20
RUNS = {
    "gpt3-175b": ("launch/runs/gpt3-175b.toml", 96, ()),
    "llama-65b": ("launch/runs/llama-65b.toml", 1024, ("plan.mesh.dp_shard=-1", "global_batch_size=16384")),
    "deepseek-671b": ("tests/planning/deepseek-671b.toml", 2048, ()),
}


def simulated(file: str, world_size: int, overrides: tuple[str, ...]) -> tuple[float, int, int]:
    """Return the seconds and KiB that a simulation takes, and how many ranks it covers."""
    run = simulated_run(resolve_run(load_run(ROOT / file, overrides), world_size), on_gpus=True)
    begin = time.process_time()
    found = simulate(run)
    for group in found.groups:
        assert memory_use(group.profile).peak_bytes > 0
    seconds = time.process_time() - begin
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, sum(len(it.ranks) for it in found.groups)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", RUNS)
def test_large_run_is_simulated_with_little_memory(name: str) -> None:
    ((seconds, kib, num_ranks),) = run_on_ranks(1, simulated, *RUNS[name], joins=False, timeout=500)
    print(f"{name}: {seconds:.0f} s of one core, {kib / 2**20:.2f} GiB")
    assert kib < KIB
    assert num_ranks == RUNS[name][1]
