"""The process of each stage, and the messages of a forward pass without a backward pass."""

from collections import defaultdict, deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from meshtrain.config.plan import PipelinePlan
from meshtrain.config.schedules import SCHEDULES


def stage_owners(plan: PipelinePlan, pp: int) -> list[int]:
    """Return the pp rank of each stage on a pp axis of size `pp`."""
    num_stages = pp * plan.stages_per_rank
    if SCHEDULES[plan.schedule].is_v and pp > 1:
        return [min(stage, num_stages - 1 - stage) for stage in range(num_stages)]
    return [stage % pp for stage in range(num_stages)]


class ForwardMessages:
    """The messages of a process that runs its stages one after the other, in ascending order.

    Any two processes exchange their messages in the same order, because NCCL handles the messages
    between two processes strictly one after another. So no process waits for a message that it
    blocks itself.

    Args:
        plan: defines which process holds which stage.
        peers: the processes of this pipeline; None without a pipeline.
        pp: the number of these processes.
        sends_shapes: whether shapes are sent too, since the receiver knows only the number of
            dimensions.
    """

    def __init__(self, plan: PipelinePlan, peers: ProcessGroup | None, pp: int, *, sends_shapes: bool = False) -> None:
        self._owners, self._peers, self._sends_shapes = stage_owners(plan, pp), peers, sends_shapes
        self._here: dict[int, deque[Sequence[Tensor]]] = defaultdict(deque)
        self._held_back: list[tuple[Sequence[Tensor], int]] = []
        # The tensor is stored with its work, because it must exist until it is sent.
        self._sends: list[tuple[dist.Work, Tensor]] = []

    def receive(self, stage: int, buffers: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the next inputs of a stage; in `buffers`, if they come from another process."""
        if self._owners[stage - 1] == self._owners[stage]:
            return self._here[stage].popleft()
        if self._sends_shapes:
            buffers = self._of_received_shapes(stage, buffers)
        for buffer in buffers:
            dist.recv(buffer, group=self._peers, group_src=self._owners[stage - 1])
        return buffers

    def _of_received_shapes(self, stage: int, buffers: Sequence[Tensor]) -> Sequence[Tensor]:
        sizes = torch.tensor([size for buffer in buffers for size in buffer.shape], device=buffers[0].device)
        dist.recv(sizes, group=self._peers, group_src=self._owners[stage - 1])
        received = iter(sizes.tolist())
        return [buffer.new_empty([next(received) for _ in buffer.shape]) for buffer in buffers]

    def send(self, stage: int, outputs: Sequence[Tensor]) -> None:
        """Pass the outputs of a stage, which are contiguous, to the next stage."""
        to = self._owners[stage + 1]
        if to == self._owners[stage]:
            self._here[stage + 1].append(outputs)
        elif stage > 0 and to == self._owners[stage - 1]:
            # That process still sends inputs to this stage, and receives nothing before the last
            # of them is sent.
            self._held_back.append((outputs, to))
        else:
            self._send(outputs, to)

    def end_stage(self) -> None:
        """Send the outputs that had to wait until a stage had received all its inputs."""
        for outputs, to in self._held_back:
            self._send(outputs, to)
        self._held_back.clear()

    def wait(self) -> None:
        """Wait until all outputs are sent."""
        for work, _ in self._sends:
            work.wait()

    def _send(self, outputs: Sequence[Tensor], to: int) -> None:
        if self._sends_shapes:
            sizes = torch.tensor([size for output in outputs for size in output.shape], device=outputs[0].device)
            outputs = [sizes, *outputs]
        for output in outputs:
            work = dist.isend(output, group=self._peers, group_dst=to)
            assert work is not None
            self._sends.append((work, output))
