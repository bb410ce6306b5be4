"""The seconds of a step: rates of a machine, the clock of a process, the replay of a schedule."""

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from meshtrain.compat.schedules import BACKWARD, FORWARD, WEIGHTS, instructions, pass_orders
from meshtrain.config.machine import SpeedConfig
from meshtrain.config.mesh import MeshPlan
from meshtrain.config.optimizer import OptimizerConfig
from meshtrain.config.plan import PipelinePlan
from meshtrain.config.schedules import SCHEDULES
from meshtrain.parallel.schedule import stage_owners
from meshtrain.planning.machine import find_machine, shipped_machines
from meshtrain.planning.search.update import touched_bytes
from meshtrain.planning.simulation.profile import AHEAD, ActionProfile, RankProfile
from meshtrain.planning.simulation.recorder import WAIT, Work
from meshtrain.planning.speed.clock import Clock
from meshtrain.planning.speed.rates import Rates, interpolate
from meshtrain.planning.speed.replay import Replay, replay

PP = 4
ONE_PROCESS = MeshPlan(dp_shard=1)
CONSTANTS: dict[str, Any] = {
    "processes_per_host": 4,
    "is_asynchronous": False,
    "operator_seconds": 0.0,
    "hook_seconds": 0.0,
    "peak_tflops": {"float32": 1.0},
    "matmul_efficiency": [(1.0, 1.0)],
    "attention_efficiency": [(1.0, 0.5)],
    "memory_gb_per_second": [(1.0, 1.0)],
    "within_host": {"gb_per_second": 10.0, "seconds": 0.0},
    "between_hosts": {"gb_per_second": 1.0, "seconds": 0.0},
    "host_memory_gb_per_second": 1.0,
    "host_link_gb_per_second": 1.0,
    "operators": {"work float32": [(1.0, 1.0), (10.0, 10.0)]},
}


def rates(mesh: MeshPlan = ONE_PROCESS, **changed: Any) -> Rates:
    return Rates(SpeedConfig.model_validate(CONSTANTS | changed), mesh)


def work(seconds: float) -> Counter[Work]:
    return Counter({Work("work", torch.float32, 0, int(seconds), None): 1})


def action(phase: str, stage: int | None, microbatch: int | None, *items: Counter[Work] | Work) -> ActionProfile:
    none = np.array([], dtype=np.int64)
    return ActionProfile(phase, stage, microbatch, None, none, none, items)


def replayed(schedule: str, number: int, *, forward: float = 1, backward: float = 2, teacher: float = 0) -> Replay:
    """Return the replay of a schedule whose passes all take the same time, without messages.

    Args:
        teacher: seconds of a pass of a teacher, which all microbatches take before; 0: none.
    """
    needed = SCHEDULES[schedule].stages_per_rank or 2
    stages = 1 if schedule in ("GPipe", "1F1B") else needed
    owners = stage_owners(PipelinePlan(schedule=schedule, stages_per_rank=stages), PP)
    profiles = []
    for passes in pass_orders(schedule, owners, number):
        separate = {(it.stage, it.microbatch) for it in passes if it.phase == WEIGHTS}
        seconds = {FORWARD: forward, WEIGHTS: backward / 2}
        actions = [action(AHEAD, None, None, work(teacher))] * (number if teacher else 0)
        for it in passes:
            of_input = backward / 2 if (it.stage, it.microbatch) in separate else backward
            actions.append(action(it.phase, it.stage, it.microbatch, work(seconds.get(it.phase, of_input))))
        profiles.append(RankProfile.of_actions(actions, number, Counter()))
    borders = {(phase, stage): 0 for phase in (FORWARD, BACKWARD) for stage in range(len(owners))}
    mesh = MeshPlan(pp=PP, dp_shard=1)
    return replay(profiles, instructions(schedule, owners, number), borders, rates(mesh), list("0123"))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_message_is_sent_received_and_awaited(schedule: str) -> None:
    stages = SCHEDULES[schedule].stages_per_rank or 2
    owners = stage_owners(PipelinePlan(schedule=schedule, stages_per_rank=stages), PP)
    programs = instructions(schedule, owners, 8)
    assert [[it.computed for it in program if it.computed is not None] for program in programs] == pass_orders(
        schedule, owners, 8
    )
    by = {
        do: Counter(message for program in programs for it in program if it.do == do for message in it.messages)
        for do in ("send", "receive", "await")
    }
    assert by["send"] == by["receive"]
    assert set(by["send"].values()) == {1}
    # By both sides.
    assert by["await"] == Counter(dict.fromkeys(by["send"], 2))
    crossings = sum(one != other for one, other in pairwise(owners))
    assert len(by["send"]) == 2 * crossings * 8


@pytest.mark.parametrize(
    ("schedule", "bubble"),
    [("GPipe", 3 / 11), ("1F1B", 3 / 11), ("Interleaved1F1B", 3 / 19), ("LoopedBFS", 3 / 19)],
)
def test_bubble_of_a_schedule_is_that_of_its_formula(schedule: str, bubble: float) -> None:
    found = replayed(schedule, 8)
    assert found.bubble == pytest.approx(bubble)
    stages = 1 if schedule in ("GPipe", "1F1B") else 2
    assert found.seconds == pytest.approx(8 * 3 * stages / (1 - bubble))


def test_stages_wait_for_the_first_microbatch_of_a_teacher() -> None:
    alone, taught = replayed("1F1B", 8), replayed("1F1B", 8, teacher=3)
    # Filled by forward passes of the model or of the teacher, and drained by backward passes.
    assert alone.seconds == pytest.approx(8 * 3 + 3 * 1 + 3 * 2)
    assert taught.seconds == pytest.approx(8 * 3 + 8 * 3 + 3 * 3 + 3 * 2)
    waits = [lane.spans[0].end_seconds if lane.spans[0].kind == "wait" else 0 for lane in taught.timeline.lanes]
    assert waits == pytest.approx([0, 3, 6, 9])


def test_separate_weight_gradients_fill_the_bubble() -> None:
    assert replayed("ZBVZeroBubble", 8).bubble < replayed("Interleaved1F1B", 8).bubble / 2


def test_spans_of_a_process_do_not_overlap_and_show_every_pass() -> None:
    found = replayed("ZBVZeroBubble", 8)
    for lane in found.timeline.lanes:
        for one, other in pairwise(lane.spans):
            assert one.end_seconds <= other.begin_seconds
        passes = [span for span in lane.spans if span.microbatch is not None]
        assert len(passes) == 2 * 8 * 2 + sum(span.kind == "weight gradient" for span in passes)


def test_curves_are_interpolated_on_logarithms() -> None:
    points = [(1e3, 1e-3), (1e5, 1e-1)]
    assert interpolate(points, 1e4) == pytest.approx(1e-2)
    assert interpolate(points, 1e7) == pytest.approx(1e1), "time grows in proportion"
    assert interpolate(points, 1e2) == pytest.approx(1e-4)
    assert interpolate(points, 1e-3) == pytest.approx(1e-6), "no operator takes no time"
    assert interpolate(points, 1e7, is_time=False) == 1e-1


def test_products_are_bound_by_rate_or_memory() -> None:
    heavy = Counter({Work("mm", torch.float32, 10**12, 10, None): 1})
    large = Counter({Work("mm", torch.float32, 10, 10**9, None): 1})
    attention = Counter({Work("_scaled_dot_product_flash_attention", torch.float32, 10**12, 10, None): 1})
    assert rates().compute_seconds(heavy) == pytest.approx(1.0)
    assert rates().compute_seconds(large) == pytest.approx(1.0)
    assert rates().compute_seconds(attention) == pytest.approx(2.0), "half as efficient"


def test_host_starts_operators_beside_a_gpu_and_before_a_cpu() -> None:
    two = Counter({Work("work", torch.float32, 0, 1, None): 2})
    assert rates(operator_seconds=0.5).compute_seconds(two) == pytest.approx(3.0)
    gpu = {"is_asynchronous": True}
    assert rates(operator_seconds=0.5, **gpu).compute_seconds(two) == pytest.approx(2.0)
    assert rates(operator_seconds=0.9, **gpu).compute_seconds(Counter(dict.fromkeys(two, 1))) == pytest.approx(1.0)
    tiny = Counter({Work("add", torch.float32, 0, 1, None): 4})
    assert rates(operator_seconds=0.5, **gpu).compute_seconds(tiny) == pytest.approx(2.0), "the host is slower"


def test_host_needs_time_for_the_hooks_of_fsdp() -> None:
    hooks = Counter({Work("_record_function_enter_new", None, 0, 0, None): 3})
    assert rates(operator_seconds=0.5).compute_seconds(hooks) == pytest.approx(1.5)
    assert rates(operator_seconds=0.5, hook_seconds=1.0).compute_seconds(hooks) == pytest.approx(4.5)


def test_messages_between_hosts_leave_through_all_cards_of_a_group() -> None:
    def seconds(axis: str, **degrees: int) -> float:
        return rates(MeshPlan(**degrees)).message_seconds(Work("allgather", torch.float32, 0, 8 * 10**9, axis))

    assert seconds("tp", tp=4, dp_shard=1) == pytest.approx(8 * 3 / 4 / 10), "inside a host"
    # Neighbors on dp_shard are 4 ranks apart, so each is on another host.
    assert seconds("dp_shard", tp=4, dp_shard=4) == pytest.approx(8 * 3 / 4 / 1)
    # 8 processes on 2 hosts: 4 cards a host.
    assert seconds("dp_shard", dp_shard=8) == pytest.approx(8 * 7 / 8 / 4)
    assert seconds("tp", dp_shard=1) == 0.0, "one process sends nothing"
    all_reduce = Work("all_reduce", torch.float32, 0, 8 * 10**9, "tp")
    assert rates(MeshPlan(tp=4, dp_shard=1)).message_seconds(all_reduce) == pytest.approx(8 * 2 * 3 / 4 / 10)


def test_measured_messages_replace_the_formula() -> None:
    measured = {"all_reduce": {"2": [(1.0, 7.0), (2.0, 14.0)]}}
    message = Work("allreduce_", torch.float32, 0, 1, "tp")
    assert rates(MeshPlan(tp=2, dp_shard=1), messages=measured).message_seconds(message) == 7.0


def test_sums_that_travel_beside_a_backward_pass_cost_what_was_measured_beside_products() -> None:
    measured = {"all_reduce": {"2": [(1.0, 7.0)]}, "posted_all_reduce": {"2": [(1.0, 4.0)]}}
    speed = SpeedConfig.model_validate(CONSTANTS | {"messages": measured})
    copies = MeshPlan(dp_replicate=2, dp_shard=1)
    message = Work("allreduce_", torch.float32, 0, 1, "dp_replicate")

    def seconds(phase: str, *, posts_sums: bool) -> float:
        clock = Clock(Rates(speed, copies, posts_sums=posts_sums))
        clock.run([action(phase, 0, 0, message)])
        return clock.now

    assert seconds("backward", posts_sums=True) == 4.0
    assert seconds("gradients", posts_sums=True) == 7.0, "the small ones are awaited at once"
    assert seconds("backward", posts_sums=False) == 7.0, "FSDP2 waits for them"
    over_tp = Work("allreduce_", torch.float32, 0, 1, "tp")
    clock = Clock(Rates(speed, MeshPlan(dp_shard=1, tp=2), posts_sums=True))
    clock.run([action("backward", 0, 0, over_tp)])
    assert clock.now == 7.0, "tp waits for its sums"


def clock_of(layer_seconds: float, gather_seconds: float, *, is_asynchronous: bool) -> Clock:
    """Return the clock of a process after 4 layers whose parameters are gathered before each."""
    gather = Work("_allgather_base_", torch.float32, 0, int(gather_seconds * 2e10), "dp_shard")
    layers = []
    for _ in range(4):
        copy = Work("split_with_sizes_copy", torch.float32, 0, 0, None)
        layers.append(action("forward", 0, 0, gather, Counter({copy: 1}) + work(layer_seconds)))
    clock = Clock(rates(MeshPlan(dp_shard=2), is_asynchronous=is_asynchronous))
    clock.run(layers)
    return clock


def test_gathers_hide_behind_layers_that_take_longer() -> None:
    assert clock_of(3, 1, is_asynchronous=False).now == pytest.approx(4 * (3 + 1))
    hidden = clock_of(3, 1, is_asynchronous=True)
    assert hidden.now == pytest.approx(1 + 4 * 3), "only the first one is awaited"
    assert hidden.axes["dp_shard"].exposed_seconds == pytest.approx(1.0)
    bound = clock_of(1, 3, is_asynchronous=True)
    assert bound.now == pytest.approx(4 * 3 + 1), "layers wait for their parameters"
    assert bound.axes["dp_shard"].seconds == pytest.approx(12.0)


def test_reductions_hide_behind_the_next_layer_and_end_before_the_norm() -> None:
    reduce = Work("_reduce_scatter_base_", torch.float32, 0, int(1 * 2e10), "dp_shard")
    layers = [action("backward", 0, 0, work(3), reduce) for _ in range(4)]
    clock = Clock(rates(MeshPlan(dp_shard=2), is_asynchronous=True))
    clock.run(layers)
    assert clock.now == pytest.approx(12.0)
    clock.run([action("gradients", None, None, work(1))])
    assert clock.now == pytest.approx(14.0), "the last reduction is awaited"


def test_messages_over_tp_are_awaited_at_once_or_after_what_is_computed_meanwhile() -> None:
    mesh, message = MeshPlan(tp=2, dp_shard=1), Work("all_reduce", torch.float32, 0, 3 * 10**10, "tp")

    def exposed(*items: Counter[Work] | Work, is_asynchronous: bool = True) -> float:
        clock = Clock(rates(mesh, is_asynchronous=is_asynchronous))
        clock.run([action("backward", 0, 0, work(1), message, *items)])
        assert clock.axes["tp"].seconds == pytest.approx(3.0)
        assert clock.axes["tp"].exposed_seconds == clock.now - 2, "two seconds are computed"
        assert clock.rates.seconds_of([work(1), message, *items]) == pytest.approx(clock.now)
        return clock.now - 2

    assert exposed(work(1)) == pytest.approx(3.0)
    assert exposed(work(1), WAIT) == pytest.approx(2.0)
    assert exposed(work(1), WAIT, is_asynchronous=False) == pytest.approx(3.0)
    of_copies = Work("allreduce_", torch.float32, 0, 0, "dp_replicate")
    assert exposed(work(1), of_copies, WAIT) == pytest.approx(2.0)
    split = Rates(SpeedConfig.model_validate(CONSTANTS | {"is_asynchronous": True}), mesh, splits_backward=True)
    assert split.seconds_of([work(1), message, work(1), WAIT]) == pytest.approx(5.0)
    long = Clock(rates(mesh, is_asynchronous=True))
    long.run([action("backward", 0, 0, message, work(4), WAIT, work(1))])
    assert long.now == pytest.approx(5.0)
    assert long.axes["tp"].exposed_seconds == 0.0


def test_sums_over_tp_that_travel_cost_what_was_measured_beside_products() -> None:
    measured = {"all_reduce": {"2": [(1.0, 7.0)]}, "posted_all_reduce": {"2": [(1.0, 4.0)]}}
    found = rates(MeshPlan(tp=2, dp_shard=1), messages=measured | {"reduce_scatter": {"2": [(1.0, 5.0)]}})
    message = Work("all_reduce_", torch.float32, 0, 1, "tp")
    assert found.seconds_of([message, work(1), WAIT]) == pytest.approx(4.0 + 1.0)
    assert found.seconds_of([message, work(1)]) == pytest.approx(7.0 + 1.0)
    scattered = message._replace(name="reduce_scatter_tensor")
    assert found.seconds_of([scattered, work(1), WAIT]) == pytest.approx(5.0 + 1.0), "not a sum for all"


def test_offloaded_optimizer_runs_in_host_memory() -> None:
    update = Counter({Work("_fused_adamw_", torch.float32, 0, 10**9, None): 1})
    speed = SpeedConfig.model_validate(CONSTANTS | {"memory_gb_per_second": [(1.0, 100.0)]})
    on_device, on_host = (Rates(speed, ONE_PROCESS, optimizer_on_host=it) for it in (False, True))
    assert on_device.compute_seconds(update, in_optimizer=True) == pytest.approx(0.01)
    assert on_host.compute_seconds(update, in_optimizer=True) == pytest.approx(1.0)
    assert on_host.compute_seconds(update) == pytest.approx(0.01)
    # Matrices are multiplied on the device.
    product = Counter({Work("bmm", torch.bfloat16, 10**12, 10**9, None): 1})
    assert on_host.compute_seconds(product, in_optimizer=True) == on_device.compute_seconds(product) > 0


def test_shipped_machines_say_where_each_rate_comes_from() -> None:
    for name in shipped_machines():
        config = find_machine(name, 8).config
        assert config.speed is not None
        told = {*config.sources, "memory_gib"}
        unset = {"speed.operators", "speed.messages"}
        assert set(config.constants()) - unset <= told, name
        assert config.measured == []


@pytest.mark.parametrize(("dtype", "num_bytes"), [(torch.float32, 28), (torch.bfloat16, 14)])
def test_update_of_adamw_reads_four_numbers_and_writes_three(dtype: torch.dtype, num_bytes: int) -> None:
    assert touched_bytes(OptimizerConfig(), dtype) == pytest.approx(num_bytes, rel=1e-6)
