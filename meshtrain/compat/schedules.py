"""The order in which torch's pipeline schedules compute, send and wait."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    _Action,
    _ComputationType,
    get_schedule_class,
)

FORWARD, BACKWARD, WEIGHTS = "forward", "backward", "backward of weights"
_PASSES = {
    _ComputationType.FORWARD: FORWARD,
    _ComputationType.FULL_BACKWARD: BACKWARD,
    _ComputationType.BACKWARD_INPUT: BACKWARD,
    _ComputationType.BACKWARD_WEIGHT: WEIGHTS,
}


class Pass(NamedTuple):
    """One pass of a microbatch through a stage.

    Attributes:
        phase: forward, backward, or backward of weights if that is separate.
        stage: its index.
        microbatch: counted from 0.

    Why: the action of torch's schedules is private.
    Holds: torch 2.11 to 2.13.
    """

    phase: str
    stage: int
    microbatch: int


class Border(NamedTuple):
    """What crosses a border between stages for one microbatch.

    Attributes:
        phase: forward or backward.
        stage: index of the stage that sends it.
        microbatch: counted from 0.

    Why: the actions of torch's schedules that send and receive are private.
    Holds: torch 2.11 to 2.13.
    """

    phase: str
    stage: int
    microbatch: int

    @property
    def receiver(self) -> int:
        """Return the index of the stage that receives it."""
        return self.stage + (1 if self.phase == FORWARD else -1)


class Instruction(NamedTuple):
    """One instruction of a process in a step: a pass, or messages to post or to await.

    Attributes:
        do: `compute`, `send`, `receive` or `await`.
        computed: the pass.
        messages: that are sent, received or awaited.

    Why: the actions of torch's schedules are private, and 1F1B and GPipe have none.
    Holds: torch 2.11 to 2.13.
    """

    do: Literal["compute", "send", "receive", "await"]
    computed: Pass | None = None
    messages: tuple[Border, ...] = ()


class _Stage:
    """What a schedule asks of a stage before it runs."""

    def __init__(self, index: int, number: int, pp: int) -> None:
        self.stage_index, self.num_stages, self.group_rank, self.group_size = index, number, 0, pp
        self.is_first, self.is_last, self.has_backward = index == 0, index == number - 1, True
        self.device, self.group, self.dw_builder = torch.device("cpu"), None, None
        self.submod = nn.Identity()


def pass_orders(schedule: str, owners: Sequence[int], num_microbatches: int) -> list[list[Pass]]:
    """Return the passes of every process of a pipeline, in order.

    Why: only a private attribute of torch's schedules has the order. The one of 1F1B is wrong for
    the last process; its code, which runs it, is not.
    Holds: torch 2.11 to 2.13.

    Args:
        schedule: its name.
        owners: the process of each stage.
        num_microbatches: of a step.

    Raises:
        ValueError: if the schedule refuses this number.
    """
    built = _built(schedule, owners, num_microbatches, with_messages=False)
    if built is not None:
        return [_passes(actions) for _, actions in sorted(built.pipeline_order.items())]
    programs = instructions(schedule, owners, num_microbatches)
    return [[it.computed for it in program if it.computed is not None] for program in programs]


def instructions(schedule: str, owners: Sequence[int], num_microbatches: int) -> list[list[Instruction]]:
    """Return what every process of a pipeline computes, sends and awaits in a step, in order.

    The last results are kept, because torch takes seconds for long pipelines. They must not be
    changed.

    The arguments are those of `pass_orders`.

    Why: only a private attribute of torch's schedules has it, and 1F1B and GPipe only have code.
    Holds: torch 2.11 to 2.13.

    Raises:
        ValueError: if the schedule refuses this number.
    """
    return _instructions(schedule, tuple(owners), num_microbatches)


@lru_cache(maxsize=4)
def _instructions(schedule: str, owners: tuple[int, ...], num_microbatches: int) -> list[list[Instruction]]:
    pp = max(owners) + 1
    built = _built(schedule, owners, num_microbatches)
    if built is not None:
        return [_lowered(built.pipeline_order_with_comms[rank], owners) for rank in range(pp)]
    make = _gpipe if schedule == "GPipe" else _one_forward_one_backward
    return [make(rank, pp, num_microbatches) for rank in range(pp)]


def build_schedule(kind: Any, *args: Any, **kwargs: Any) -> Any:
    """Build a schedule that gathers no parameters, so that FSDP2 gathers each layer itself.

    Why: the schedules of several stages on a process gather whole stages ahead, at most three, and
    free others, whatever `reshard_after_forward` says. So "never" gathered parameters again and
    again, and "always" held those of three stages. Torch also looks for those stages once for each
    pass among all that follow, which takes seconds for many microbatches.
    Holds: torch 2.11 to 2.13.

    Args:
        kind: class of the schedule, of torch.
        args: of the class.
        kwargs: of the class.
    """
    private: Any = schedules
    original = private._add_unshard_reshard
    private._add_unshard_reshard = lambda actions: [it for it in actions if it is not None]
    try:
        schedule = kind(*args, **kwargs)
    finally:
        private._add_unshard_reshard = original
    if isinstance(schedule, PipelineScheduleMulti):
        # The schedule asks whether a stage is gathered before it computes.
        runtime: Any = schedule
        runtime.unsharded_stages = {stage.stage_index for stage in schedule._stages}
    return schedule


def _built(schedule: str, owners: Sequence[int], num_microbatches: int, *, with_messages: bool = True) -> Any:
    """Return torch's schedule if it has several stages on a process, otherwise None.

    Args:
        schedule: its name.
        owners: the process of each stage.
        num_microbatches: of a step.
        with_messages: whether to find out when it sends and receives, which takes longest.
    """
    kind: Any = get_schedule_class(schedule)
    if not issubclass(kind, PipelineScheduleMulti):
        return None
    pp = max(owners) + 1
    stages = [_Stage(stage, len(owners), pp) for stage, owner in enumerate(owners) if owner == 0]
    if not with_messages:
        kind = type(kind.__name__, (kind,), {"_prepare_schedule_with_comms": lambda self, *args, **kwargs: None})
    return build_schedule(kind, stages, num_microbatches, loss_fn=lambda output, target: output)


class _Program:
    """The instructions of a process with one stage."""

    def __init__(self, stage: int, num_stages: int) -> None:
        self.done: list[Instruction] = []
        self._stage, self._num_stages = stage, num_stages

    def received(self, phase: str, microbatch: int) -> tuple[Border, ...]:
        """Return what the stage needs for a pass."""
        sender = self._stage + (-1 if phase == FORWARD else 1)
        return (Border(phase, sender, microbatch),) if 0 <= sender < self._num_stages else ()

    def sent(self, phase: str, microbatch: int) -> tuple[Border, ...]:
        """Return what the stage hands on after a pass."""
        message = Border(phase, self._stage, microbatch)
        return (message,) if 0 <= message.receiver < self._num_stages else ()

    def compute(self, phase: str, microbatch: int) -> None:
        """Add a pass."""
        self.done.append(Instruction("compute", Pass(phase, self._stage, microbatch)))

    def post(self, sent: tuple[Border, ...], received: tuple[Border, ...] = ()) -> tuple[Border, ...]:
        """Add messages to send and to receive, and return all of them."""
        self.done += [Instruction("send", messages=sent)] if sent else []
        self.done += [Instruction("receive", messages=received)] if received else []
        return sent + received

    def wait(self, messages: tuple[Border, ...]) -> None:
        """Add the wait for messages."""
        self.done += [Instruction("await", messages=messages)] if messages else []


def _gpipe(rank: int, pp: int, num_microbatches: int) -> list[Instruction]:
    """Return the instructions of `ScheduleGPipe._step_microbatches`.

    It waits for what it has sent at the end only, because `StaticStage` sends its messages itself.
    """
    program = _Program(rank, pp)
    sent: tuple[Border, ...] = ()
    for phase in (FORWARD, BACKWARD):
        for microbatch in range(num_microbatches):
            program.wait(program.post((), program.received(phase, microbatch)))
            program.compute(phase, microbatch)
            sent += program.post(program.sent(phase, microbatch))
    program.wait(sent)
    return program.done


def _one_forward_one_backward(rank: int, pp: int, num_microbatches: int) -> list[Instruction]:
    """Return the instructions of `Schedule1F1B._step_microbatches`."""
    program = _Program(rank, pp)
    ahead = min(num_microbatches, pp - rank)
    posted: tuple[Border, ...] = ()
    for microbatch in range(ahead):
        program.wait(program.post((), program.received(FORWARD, microbatch)))
        program.compute(FORWARD, microbatch)
        program.wait(posted)
        posted = program.post(program.sent(FORWARD, microbatch)) if microbatch < ahead - 1 else ()
    for microbatch in range(num_microbatches - ahead + 1):
        # Send and receive are posted together.
        program.wait(
            program.post(program.sent(FORWARD, microbatch + ahead - 1), program.received(BACKWARD, microbatch))
        )
        program.compute(BACKWARD, microbatch)
        if microbatch + ahead < num_microbatches:
            following = program.received(FORWARD, microbatch + ahead)
            program.wait(program.post(program.sent(BACKWARD, microbatch), following))
            program.compute(FORWARD, microbatch + ahead)
    posted = program.post(program.sent(BACKWARD, num_microbatches - ahead))
    for microbatch in range(num_microbatches - ahead + 1, num_microbatches):
        program.wait(program.post((), program.received(BACKWARD, microbatch)))
        program.compute(BACKWARD, microbatch)
        program.wait(posted)
        posted = program.post(program.sent(BACKWARD, microbatch))
    program.wait(posted)
    return program.done


# Action of torch -> what to do, phase, and the stage that sends relative to that of the action.
_MESSAGES: dict[_ComputationType, tuple[Literal["send", "receive"], str, int]] = {
    _ComputationType.SEND_F: ("send", FORWARD, 0),
    _ComputationType.RECV_F: ("receive", FORWARD, -1),
    _ComputationType.SEND_B: ("send", BACKWARD, 0),
    _ComputationType.RECV_B: ("receive", BACKWARD, 1),
}


def _lowered(actions: list[_Action | None], owners: Sequence[int]) -> list[Instruction]:
    """Return the instructions of `_PipelineScheduleRuntime._step_microbatches`."""
    found: list[Instruction] = []
    sent: tuple[Border, ...] = ()
    for action in actions:
        for part in (action.sub_actions or (action,)) if action is not None else ():
            stage, microbatch, kind = part.stage_index, part.microbatch_index, part.computation_type
            if kind in _MESSAGES:
                assert microbatch is not None
                do, phase, distance = _MESSAGES[kind]
                message = Border(phase, stage + distance, microbatch)
                sent += (message,) if do == "send" else ()
                found.append(Instruction(do, messages=(message,)))
            elif kind in _PASSES:
                assert microbatch is not None
                computed = Pass(_PASSES[kind], stage, microbatch)
                sender = stage + {FORWARD: -1, BACKWARD: 1, WEIGHTS: 0}[computed.phase]
                if 0 <= sender < len(owners) and owners[sender] != owners[stage]:
                    found.append(Instruction("await", messages=(Border(computed.phase, sender, microbatch),)))
                found.append(Instruction("compute", computed))
    return [*found, Instruction("await", messages=sent)] if sent else found


def _passes(actions: list[_Action | None]) -> list[Pass]:
    found = []
    for action in actions:
        for part in (action.sub_actions or (action,)) if action is not None else ():
            if part.computation_type in _PASSES:
                assert part.microbatch_index is not None
                found.append(Pass(_PASSES[part.computation_type], part.stage_index, part.microbatch_index))
    return found
