"""The process of each stage, and the messages of a forward pass without a backward pass."""

from collections import defaultdict, deque

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
    """

    def __init__(self, plan: PipelinePlan, peers: ProcessGroup | None, pp: int) -> None:
        self._owners, self._peers = stage_owners(plan, pp), peers
        self._here: dict[int, deque[Tensor]] = defaultdict(deque)
        self._held_back: list[tuple[Tensor, int]] = []
        # The tensor is stored with its work, because it must exist until it is sent.
        self._sends: list[tuple[dist.Work, Tensor]] = []

    def receive(self, stage: int, buffer: Tensor) -> Tensor:
        """Return the next input of a stage; it is in `buffer` if it comes from another process."""
        if self._owners[stage - 1] == self._owners[stage]:
            return self._here[stage].popleft()
        dist.recv(buffer, group=self._peers, group_src=self._owners[stage - 1])
        return buffer

    def send(self, stage: int, output: Tensor) -> None:
        """Pass the output of a stage to the next stage."""
        to = self._owners[stage + 1]
        if to == self._owners[stage]:
            self._here[stage + 1].append(output)
        elif stage > 0 and to == self._owners[stage - 1]:
            # That process still sends inputs to this stage, and receives nothing before the last
            # of them is sent.
            self._held_back.append((output.contiguous(), to))
        else:
            self._send(output.contiguous(), to)

    def end_stage(self) -> None:
        """Send the outputs that had to wait until a stage had received all its inputs."""
        for output, to in self._held_back:
            self._send(output, to)
        self._held_back.clear()

    def wait(self) -> None:
        """Wait until all outputs are sent."""
        for work, _ in self._sends:
            work.wait()

    def _send(self, output: Tensor, to: int) -> None:
        work = dist.isend(output, group=self._peers, group_dst=to)
        assert work is not None
        self._sends.append((work, output))
