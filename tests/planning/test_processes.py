"""Processes of one stage that hold parts of different sizes are simulated apart."""

from typing import Any

import pytest

from meshtrain.config.mesh import MeshPlan
from meshtrain.parallel.tensor.head_share import Heads
from meshtrain.planning.assembly.pipeline import Simulation, simulate
from meshtrain.planning.assembly.processes import Shape, alike_processes
from meshtrain.planning.memory import memory_use
from meshtrain.planning.names import rank_range
from meshtrain.planning.simulation.rank import simulate_rank
from meshtrain.planning.simulation.recorder import Role
from meshtrain.planning.simulation.run import SimulatedRun
from meshtrain.planning.totals import totals_of
from tests.planning.cases import UNEVEN, make_run
from tests.planning.measured import measure
from tests.ranks import run_on_ranks

EVEN, TALL, WIDE = Shape((8, 6), None), Shape((10, 6), None), Shape((8, 6), 1)


@pytest.mark.parametrize(
    ("mesh", "shapes", "heads", "groups"),
    [
        ({"dp_shard": 4}, [EVEN], None, [(0, 1, 2, 3)]),
        ({"dp_shard": 4}, [EVEN, TALL], None, [(0, 1, 2), (3,)]),
        ({"dp_shard": 4}, [Shape((5,), None)], None, [(0, 1, 2), (3,)]),
        ({"dp_shard": 4}, [Shape((2,), None)], None, [(0, 1), (2, 3)]),
        # Few experts are split by another dimension, with and without tp and ep.
        ({"dp_shard": 4}, [Shape((2, 8, 6), None, of_experts=True)], None, [(0, 1, 2, 3)]),
        ({"dp_shard": 4}, [Shape((2, 7, 6), None, of_experts=True)], None, [(0, 1), (2, 3)]),
        ({"dp_shard": 2, "tp": 2}, [Shape((1, 8, 6), 1, of_experts=True)], None, [(0, 1, 2, 3)]),
        ({"dp_shard": 2, "ep": 2}, [Shape((2, 8, 6), None, of_experts=True)], None, [(0, 1, 2, 3)]),
        ({"dp_shard": 4}, [Shape((), None)], None, [(0, 1, 2, 3)]),
        ({"dp_replicate": 2, "dp_shard": 2}, [Shape((5,), None)], None, [(0, 2), (1, 3)]),
        ({"dp_shard": 1, "tp": 4}, [EVEN, TALL], None, [(0, 1, 2, 3)]),
        ({"dp_shard": 1, "tp": 4}, [WIDE], None, [(0, 1, 2), (3,)]),
        ({"dp_shard": 1, "tp": 2}, [EVEN], Heads(3, 3), [(0,), (1,)]),
        ({"dp_shard": 4, "tp": 2}, [TALL], Heads(3, 3), [(0, 2, 4), (1, 3, 5), (6,), (7,)]),
        ({"pp": 2, "dp_shard": 2, "tp": 2}, [WIDE], None, [(0, 1, 2, 3)]),
    ],
)
def test_processes_with_like_parts_are_found(
    mesh: dict[str, int], shapes: list[Shape], heads: Heads | None, groups: list[tuple[int, ...]]
) -> None:
    assert alike_processes(MeshPlan.model_validate(mesh), shapes, heads) == groups


def compare(run: SimulatedRun) -> Simulation:
    """Compare the simulated steps with those of all processes, and return the simulation."""
    found = simulate(run)
    assert sorted(rank for group in found.groups for rank in group.ranks) == list(range(run.plan.mesh.world_size))
    for group in found.groups:
        for rank in group.ranks:
            alone = simulate_rank(run, rank)
            assert memory_use(group.profile) == memory_use(alone)
            assert totals_of(group.profile.work()) == totals_of(alone.work())
    return found


@pytest.mark.parametrize(
    ("mesh", "groups"),
    [
        # Both layers are on the first stage. The head of the second is even.
        ({"pp": 2, "dp_shard": 3}, [(0, 1), (2,), (3, 4, 5)]),
        ({"tp": 2, "dp_shard": 2}, [(0, 2), (1, 3)]),
    ],
)
def test_all_processes_need_what_their_group_does(mesh: dict[str, int], groups: list[tuple[int, ...]]) -> None:
    values = {**UNEVEN, "hidden_size": 252, "intermediate_size": 704, "vocab_size": 8004}
    (found,) = run_on_ranks(1, compare, make_run("llama", {"mesh": mesh}, values=values), joins=False, timeout=300)
    assert [group.ranks for group in found.groups] == groups
    assert [profile is group[0].profile for profile, group in zip(found.profiles, found.pp_ranks, strict=True)]


@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"tp": 2, "dp_shard": 1}])
def test_uneven_processes_need_what_real_ones_need(mesh: dict[str, Any]) -> None:
    run = make_run("llama", {"mesh": mesh}, values=UNEVEN)
    measured = run_on_ranks(2, measure, run)
    (found,) = run_on_ranks(1, simulate, run, joins=False)
    assert [group.ranks for group in found.groups] == [(0,), (1,)]
    first, last = (memory_use(group.profile) for group in found.groups)
    for real, group in zip(measured, found.groups, strict=True):
        assert totals_of(group.profile.work()) == real.totals
    if "tp" in mesh:
        # The last process has two of three heads.
        assert last.peak_bytes > first.peak_bytes
        for real, use in zip(measured, (first, last), strict=True):
            assert use.peak_bytes == pytest.approx(real.peak_bytes, rel=0.05)
    else:
        # The peak is not compared: on a CPU, FSDP2 pads uneven gradients inside of an operator.
        assert first.at_peak[Role.OPTIMIZER] == measured[0].state_bytes[2]
        assert last.at_peak[Role.OPTIMIZER] == measured[1].state_bytes[2] < measured[0].state_bytes[2]


@pytest.mark.parametrize(
    ("ranks", "shown"),
    [
        ([3], "3"),
        ([0, 1, 2], "0-2"),
        ([0, 1, 3, 5], "0-1, 3, 5"),
        ([0, 2, 4, 6], "0, 2, 4 and others, 4 in all"),
    ],
)
def test_ranks_are_shown_in_few_words(ranks: list[int], shown: str) -> None:
    assert rank_range(ranks) == shown
