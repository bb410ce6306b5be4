"""Machines that cannot reach each other are named; here with real sockets on one machine."""

import os
import socket
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch.distributed as dist

from meshtrain.errors import HostError
from meshtrain.runtime import hosts, process
from meshtrain.runtime.environment import rank_from_environment
from meshtrain.runtime.hosts import Host, address_towards, check_hosts, interface_of
from meshtrain.runtime.process import open_store
from tests.ranks import run_on_ranks

Answer = tuple[tuple[str, ...], int | None] | None


def act_as_host(present: Callable[[Host], Host], timeout_seconds: float, absent: int | None) -> Answer:
    """Act as one of two machines; the second announces itself to the others with `present`."""
    rank = rank_from_environment()
    os.environ.update(GROUP_WORLD_SIZE="2", GROUP_RANK=str(rank), LOCAL_RANK="0")
    hosts.CONNECT_SECONDS = 1.0
    if rank == 1:
        hosts.Host = lambda *values, **named: present(Host(*values, **named))
    store = open_store(timeout_seconds)
    if rank == absent:
        return None
    try:
        check_hosts(store, timeout_seconds)
    except HostError as error:
        return error.lines, error.reporting_rank
    return None


def unchanged(host: Host) -> Host:
    return host


def at_a_closed_port(host: Host) -> Host:
    return replace(host, port=1) if host.number == 1 else host


def with_another_number(host: Host) -> Host:
    return replace(host, number=7) if host.number == 1 else host


def answers(present: Callable[[Host], Host], *, timeout_seconds: float = 20.0, absent: int | None = None) -> list:
    return run_on_ranks(2, act_as_host, present, timeout_seconds, absent, joins=False)


def test_reachable_hosts_pass() -> None:
    assert answers(unchanged) == [None, None]


def test_unreachable_host_is_named_on_all_and_printed_by_one() -> None:
    first, second = answers(at_a_closed_port)
    assert first == second
    (problem,), teller = first
    name = socket.gethostname()
    assert problem.startswith(f"{name} (")
    assert f" cannot reach {name} (" in problem
    assert "Connection refused; check the firewall between them" in problem
    assert teller == 0


def test_answer_of_another_machine_is_refused() -> None:
    (problem,), _ = answers(with_another_number)[0]
    assert "another machine answers there" in problem


def test_host_that_never_connects_is_named() -> None:
    first, second = answers(unchanged, timeout_seconds=1.0, absent=1)
    assert first == (("machine 1 (GROUP_RANK) of 2 did not join; check its log, or start it",), 0)
    assert second is None


def test_single_machine_has_nothing_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    check_hosts(dist.HashStore(), 0.0)


def test_unreachable_store_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(process, "CONNECT_SECONDS", 1.0)
    with pytest.raises(HostError, match=rf"rank 0 on \S+ cannot reach the store of the run at localhost:{port} within"):
        open_store(1.0)


def test_port_in_use_by_another_program_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun chooses a free port seconds before rank 0 listens on it."""
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "RANK": 0}.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(
            HostError, match=rf"^rank 0 on \S+ cannot host the store .*: another program took port {port}"
        ):
            open_store(1.0)


def test_addresses_have_interfaces() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.77") is None
    assert interface_of(address_towards(("localhost", 1))) is not None
