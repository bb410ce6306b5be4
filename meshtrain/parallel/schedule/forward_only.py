"""What passes from stage to stage in a forward pass without a backward pass."""

from collections import defaultdict, deque

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from meshtrain.config.plan import PipelinePlan
from meshtrain.parallel.schedule.schedules import stage_owners


class ForwardMessages:
    """Receives and hands on hidden states while a process runs its stages one after the other, in ascending order.

    Between any two processes the messages come in an order that both have, so nothing waits for itself: NCCL works off
    what two processes send each other strictly in turn.

    Args:
        plan: says which process holds which stage.
        peers: the processes of this pipeline; None without one.
        pp: how many there are.
    """

    def __init__(self, plan: PipelinePlan, peers: ProcessGroup | None, pp: int) -> None:
        self._owners, self._peers = stage_owners(plan, pp), peers
        self._here: dict[int, deque[Tensor]] = defaultdict(deque)
        self._held_back: list[tuple[Tensor, int]] = []
        # The tensor is kept beside the work: it must live until it is sent.
        self._sends: list[tuple[dist.Work, Tensor]] = []

    def receive(self, stage: int, buffer: Tensor) -> Tensor:
        """Return the next input of a stage, in `buffer` if it comes from another process."""
        if self._owners[stage - 1] == self._owners[stage]:
            return self._here[stage].popleft()
        dist.recv(buffer, group=self._peers, group_src=self._owners[stage - 1])
        return buffer

    def hand_on(self, stage: int, output: Tensor) -> None:
        """Give the output of a stage to the next."""
        to = self._owners[stage + 1]
        if to == self._owners[stage]:
            self._here[stage + 1].append(output)
        elif stage > 0 and to == self._owners[stage - 1]:
            # It still sends this stage its inputs, and takes nothing before the last of them is gone.
            self._held_back.append((output.contiguous(), to))
        else:
            self._send(output.contiguous(), to)

    def end_stage(self) -> None:
        """Send what had to wait until a stage had all its inputs."""
        for output, to in self._held_back:
            self._send(output, to)
        self._held_back.clear()

    def wait(self) -> None:
        """Wait until everything is sent."""
        for work, _ in self._sends:
            work.wait()

    def _send(self, output: Tensor, to: int) -> None:
        work = dist.isend(output, group=self._peers, group_dst=to)
        assert work is not None
        self._sends.append((work, output))
