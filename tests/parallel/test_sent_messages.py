"""What a stage has sent is dropped when it has arrived."""

import time
import weakref

import pytest
import torch
import torch.distributed as dist

from meshtrain.compat import fake
from meshtrain.parallel.sent_messages import SentMessages
from tests.ranks import run_on_ranks


def number_alive(sent: SentMessages) -> list[int]:
    """Send messages to the other rank, and return how many are kept while more are sent."""
    if dist.get_rank() == 1:
        for _ in range(4):
            dist.recv(torch.empty(8), 0)
        return []
    found, tensors = [], []
    with sent:
        for _ in range(4):
            tensor = torch.ones(8)
            tensors.append(weakref.ref(tensor.untyped_storage()))
            sent.add([dist.isend(tensor, 1)])
            del tensor
            time.sleep(0.2)
            found.append(sum(it() is not None for it in tensors))
    return [*found, sum(it() is not None for it in tensors)]


def numbers_kept(backend: str) -> list[int]:
    sent = SentMessages(dist.new_group(backend=backend), torch.device("cpu"))
    # A second step is like the first one.
    return number_alive(sent) + number_alive(sent)


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo"])
def test_messages_that_have_arrived_are_dropped(backend: str) -> None:
    found, _ = run_on_ranks(2, numbers_kept, backend)
    assert len(found) == 10
    # The latest message may still be kept.
    assert max(found) <= 1
    assert found[4] == found[9] == 0


def number_kept_by_torch() -> int:
    if dist.get_rank() == 1:
        for _ in range(4):
            dist.recv(torch.empty(8), 0)
        return 0
    tensors = [torch.ones(8) for _ in range(4)]
    kept = [weakref.ref(it.untyped_storage()) for it in tensors]
    works = [dist.isend(it, 1) for it in tensors]
    tensors.clear()
    time.sleep(0.5)
    number = sum(it() is not None for it in kept)
    for work in works:
        assert work is not None
        work.wait()
    return number


def test_torch_keeps_messages_that_have_arrived() -> None:
    assert run_on_ranks(2, number_kept_by_torch)[0] == 4


class Broken:
    """A message that cannot be sent."""

    def wait(self) -> None:
        raise RuntimeError("connection closed")


def errors_of_messages() -> None:
    assert dist.group.WORLD is not None
    sent = SentMessages(dist.group.WORLD, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="connection closed"), sent:
        sent.add([Broken()])  # type: ignore[list-item]
    with pytest.raises(KeyError), sent:
        fail(sent)
    dist.barrier()


def fail(sent: SentMessages) -> None:
    """Fail in a step. It waits for nothing, and the other process receives no message."""
    if dist.get_rank() == 0:
        sent.add([dist.isend(torch.ones(1), 1)])
    raise KeyError


def test_a_message_that_cannot_be_sent_ends_the_step() -> None:
    run_on_ranks(2, errors_of_messages)


class Message:
    """A message of a process group that tells whether it has arrived."""

    def __init__(self, *, has_arrived: bool) -> None:
        self.has_arrived, self.waited = has_arrived, 0

    def is_completed(self) -> bool:
        return self.has_arrived

    def wait(self) -> None:
        self.waited += 1


def waits() -> list[list[int]]:
    sent = SentMessages(dist.new_group([0], backend="fake"), torch.device("cpu"))
    messages = [Message(has_arrived=True), Message(has_arrived=False), Message(has_arrived=True)]
    found = []
    with sent:
        for it in messages:
            sent.add([it])  # type: ignore[list-item]
            found.append([message.waited for message in messages])
        messages[1].has_arrived = True
        sent.add([last := Message(has_arrived=False)])  # type: ignore[list-item]
        found.append([message.waited for message in [*messages, last]])
    return [*found, [message.waited for message in [*messages, last]]]


def test_only_messages_that_have_arrived_are_awaited_in_a_step() -> None:
    # Its module makes the backend known to torch.
    assert fake.fake_process_group
    assert run_on_ranks(1, waits) == [[[1, 0, 0], [1, 0, 0], [1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]]
