"""The memory of a process over a step has every peak, at the right time."""

from collections import Counter

import numpy as np
import pytest

from meshtrain.pictures.memory import MemoryCurve
from meshtrain.pictures.timeline import Lane, Span
from meshtrain.planning.assembly.pipeline import simulate
from meshtrain.planning.memory import memory_use
from meshtrain.planning.page.curve import PARTS, memory_curve
from meshtrain.planning.simulation.profile import ROLES, ActionProfile, RankProfile
from meshtrain.planning.simulation.recorder import Role
from tests.planning.cases import PLANS, make_run


def action(phase: str, microbatch: int | None, *changes: tuple[int, Role]) -> ActionProfile:
    stage = None if microbatch is None else 0
    sizes = np.array([size for size, _ in changes], dtype=np.int64)
    return ActionProfile(
        phase, stage, microbatch, None, sizes, np.array([ROLES.index(role) for _, role in changes], dtype=np.int64), ()
    )


PROFILE = RankProfile.of_actions(
    (
        action("start", None, (100, Role.PARAMETERS), (50, Role.OPTIMIZER)),
        action("prepare", None),
        action("forward", 0, (7, Role.TEMPORARY), (-7, Role.TEMPORARY), (10, Role.ACTIVATIONS), (0, Role.BATCH)),
        action("after forward", 0),
        action("backward", 0, (30, Role.TEMPORARY), (-30, Role.TEMPORARY), (-10, Role.ACTIVATIONS)),
        action("optimizer", None, (20, Role.TEMPORARY), (-20, Role.TEMPORARY)),
    ),
    1,
    Counter(),
)
LANE = Lane(
    "rank 0",
    (
        Span("forward", 1.0, 2.0, 0, 0),
        Span("wait", 2.0, 8.0),
        Span("backward", 8.0, 9.0, 0, 0),
        Span("optimizer", 9.0, 10.0),
    ),
)


def curve(lane: Lane | None = LANE, *, offloads: bool = False) -> MemoryCurve:
    return memory_curve("rank 0", PROFILE, lane, (0,), seconds=10.0, offloads=offloads, limit_bytes=1000)


def level(found: MemoryCurve, position: float) -> int:
    """Return the bytes at a position."""
    return [moment.total for moment in found.moments if moment.position <= position][-1]


def test_memory_follows_the_timeline() -> None:
    found = curve()
    assert [level(found, at) for at in (0.5, 1.1, 1.4, 5.0, 8.1, 8.5, 8.9, 9.1, 9.9)] == [
        150, 157, 150, 160, 190, 160, 150, 170, 150,
    ]  # fmt: skip
    assert (found.peak.total, found.peak.name) == (190, "backward of microbatch 0, stage 0")
    assert found.peak.position == pytest.approx(8.0, abs=10 / PARTS)
    assert found.unit == "seconds"


def test_memory_follows_the_actions_where_times_are_not_known() -> None:
    found = curve(None)
    assert [level(found, at) for at in (0.5, 2.1, 2.6, 3.5, 4.1, 4.9, 5.2)] == [150, 157, 160, 160, 190, 150, 170]
    assert (found.end, found.unit) == (6.0, "actions")


def test_memory_in_the_host_is_left_out() -> None:
    assert curve(offloads=True).peak.parts == {
        **dict.fromkeys(curve().peak.parts, 0),
        "activations": 10,
        "temporary": 30,
    }


@pytest.mark.parametrize("name", ["one process", "pp, ZBV", "pp x fsdp"])
def test_peak_of_a_simulated_step_is_exact(name: str) -> None:
    simulation = simulate(make_run("llama", PLANS[name]))
    for profile in simulation.profiles:
        use = memory_use(profile)
        found = memory_curve("rank", profile, None, simulation.first_layers, offloads=False, limit_bytes=0)
        assert found.peak.total == use.peak_bytes
        assert found.peak.name == use.moment.described(simulation.first_layers)
        assert len(found.moments) <= PARTS
