"""Check before the first collective that all machines of a run reach each other.

One process per machine listens on the address that it uses to reach the others, and connects to all
others. Each listener answers with the number of its machine. The error names the machine that is
not reached. gloo and NCCL would wait for minutes and name none.
"""

import fcntl
import ipaddress
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import torch.distributed as dist

from meshtrain.errors import HostError, Problem, reason_of
from meshtrain.runtime.environment import (
    host_number_from_environment,
    local_rank_from_environment,
    num_hosts_from_environment,
    store_address_from_environment,
)

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable with the network interface of gloo."""
CONNECT_SECONDS = 5.0
ATTEMPTS = 2
POLL_SECONDS = 0.1
CONNECTIONS_AT_ONCE = 32
SIOCGIFADDR = 0x8915
# An address reserved for documentation. Nothing is sent to it; the system only selects which of its
# own addresses it would use.
ELSEWHERE = ("192.0.2.1", 9)


@dataclass(frozen=True)
class Host:
    """A machine of the run, as it describes itself.

    Attributes:
        number: its number among the machines.
        name: its hostname.
        address: where it listens.
        port: where it listens.
    """

    number: int
    name: str
    address: str
    port: int

    def described(self) -> str:
        """Return name and address for a message."""
        return f"{self.name} ({self.address})"


def check_hosts(store: dist.Store, timeout_seconds: float) -> None:
    """Check that all machines of a run reach each other. With one machine, do nothing.

    Also make gloo use this machine's interface where it would use the loopback, which other
    machines cannot reach.

    Args:
        store: of the run.
        timeout_seconds: how long to wait for all machines to start.

    Raises:
        HostError: the same on all machines, naming those that did not join or cannot reach each
            other.
    """
    num_hosts = num_hosts_from_environment()
    if num_hosts == 1:
        return
    address = address_towards(store_address_from_environment())
    _choose_interface(address)
    if local_rank_from_environment() == 0:
        _check_as_leader(store, address, num_hosts, timeout_seconds)


def _check_as_leader(store: dist.Store, address: str, num_hosts: int, timeout_seconds: float) -> None:
    number = host_number_from_environment()
    with socket.create_server((address, 0), backlog=num_hosts) as server:
        here = Host(number, socket.gethostname(), address, server.getsockname()[1])
        threading.Thread(target=_answer, args=(server, number), name="hosts", daemon=True).start()
        store.set(f"hosts/{number}", json.dumps(asdict(here)))
        hosts = _wait_for(store, "hosts", num_hosts, timeout_seconds)
        problems = _missing(hosts, num_hosts)
        others = [Host(**json.loads(text)) for other, text in hosts.items() if other != number]
        with ThreadPoolExecutor(CONNECTIONS_AT_ONCE) as pool:
            problems += filter(None, pool.map(lambda other: _problem_with(here, other), others))
        store.set(f"seen/{number}", json.dumps([asdict(problem) for problem in problems]))
        # A machine that is done must stay until all others have connected.
        answers = _wait_for(store, "seen", num_hosts, 2 * ATTEMPTS * CONNECT_SECONDS)
    found = dict.fromkeys(Problem(**fields) for text in answers.values() for fields in json.loads(text))
    if found:
        error = HostError(found)
        error.reporting_rank = 0 if 0 in answers else None
        raise error


def _wait_for(store: dist.Store, prefix: str, num_hosts: int, seconds: float) -> dict[int, bytes]:
    """Return number -> value of all machines that wrote a value in time."""
    keys = {number: f"{prefix}/{number}" for number in range(num_hosts)}
    end = time.monotonic() + seconds
    while not store.check(list(keys.values())) and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
    return {number: store.get(key) for number, key in keys.items() if store.check([key])}


def _missing(hosts: Collection[int], num_hosts: int) -> list[Problem]:
    missing = [number for number in range(num_hosts) if number not in hosts]
    return [
        Problem(f"machine {number} (GROUP_RANK) of {num_hosts} did not join", "check its log, or start it")
        for number in missing
    ]


def _answer(server: socket.socket, number: int) -> None:
    """Send the number of this machine over every connection."""
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            # The socket was closed, because all machines have connected.
            return
        with connection:
            connection.sendall(f"{number}\n".encode())


def _problem_with(here: Host, other: Host) -> Problem | None:
    """Return why another machine cannot be reached, or None if it can."""
    for attempt in range(ATTEMPTS):
        try:
            with socket.create_connection((other.address, other.port), timeout=CONNECT_SECONDS) as connection:
                answer = connection.makefile().readline().strip()
        except OSError as error:
            reason = reason_of(error)
            if attempt + 1 < ATTEMPTS:
                time.sleep(POLL_SECONDS)
            continue
        if answer == str(other.number):
            return None
        reason = "another machine answers there"
    return Problem(
        f"{here.described()} cannot reach {other.described()}: {reason}",
        "check the firewall between them and the address of the hostname, or set GLOO_SOCKET_IFNAME and "
        "NCCL_SOCKET_IFNAME to the interface that joins them",
    )


def address_towards(store: tuple[str, int]) -> str:
    """Return this machine's address towards the host of the store.

    It is the loopback only if the machine has no other address.
    """
    address = _own_address(store)
    if not ipaddress.ip_address(address).is_loopback:
        return address
    try:
        return _own_address(ELSEWHERE)
    except OSError:
        # The machine has no network, so all "machines" of the run are this one.
        return address


def _own_address(target: tuple[str, int]) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def _choose_interface(address: str) -> None:
    """Set GLOO_SOCKET_IFNAME where gloo would use the loopback.

    gloo uses the interface that has the address of the hostname.
    """
    is_chosen = GLOO_INTERFACE in os.environ or ipaddress.ip_address(address).is_loopback
    if not is_chosen and _hostname_is_loopback() and (name := interface_of(address)) is not None:
        os.environ[GLOO_INTERFACE] = name


def _hostname_is_loopback() -> bool:
    try:
        return ipaddress.ip_address(socket.gethostbyname(socket.gethostname())).is_loopback
    except OSError:
        # gloo also uses the loopback in this case.
        return True


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has an IPv4 address, such as eth0, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                packed = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                # The interface has no address.
                continue
            if socket.inet_ntoa(packed[20:24]) == address:
                return name
    return None
