"""The first signal requests a stop and the second ends the process, even if blocked in C."""

import os
import signal
import subprocess
import sys
import time

import pytest

from meshtrain.runtime.signals import HOOK, TIME_IS_UP, StopRequest, catch_stop_signals, describe_reason

BLOCKED = """
import threading, time
import torch.distributed as dist
from meshtrain.runtime.signals import catch_stop_signals
with catch_stop_signals() as stop:
    def tell():
        print("ready", flush=True)
        while not stop.is_asked():
            time.sleep(0.01)
        print(stop.reason(), flush=True)
    threading.Thread(target=tell, daemon=True).start()
    dist.HashStore().get("never")
"""


def test_blocked_process_gets_the_first_signal_and_ends_at_the_second():
    with subprocess.Popen([sys.executable, "-c", BLOCKED], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == f"{signal.SIGTERM.value}\n"
        assert process.poll() is None
        process.send_signal(signal.SIGUSR1)
        assert process.wait(10) == 128 + signal.SIGUSR1


def test_previous_signal_handlers_are_restored():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    with catch_stop_signals() as stop:
        assert (stop.is_asked(), stop.reason()) == (False, 0)
        os.kill(os.getpid(), signal.SIGUSR1)
        while not stop.is_asked():
            time.sleep(0.01)
        assert stop.reason() == signal.SIGUSR1
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize(("late", "reason"), [(-1.0, TIME_IS_UP), (60.0, 0)])
def test_passed_deadline_is_a_reason_to_stop(late, reason):
    assert StopRequest(deadline=time.monotonic() + late).reason() == reason


def test_copy_of_a_signal_from_torchrun_is_not_a_second_signal():
    stop = StopRequest(copy_seconds=60.0)
    stop.take(signal.SIGTERM)
    stop.take(signal.SIGTERM)
    assert stop.reason() == signal.SIGTERM


def test_reasons_have_names():
    assert [describe_reason(reason) for reason in (TIME_IS_UP, signal.SIGTERM)] == ["stop_after", "SIGTERM"]


def test_hook_may_request_a_stop_and_a_signal_takes_precedence():
    request = StopRequest(deadline=time.monotonic())
    assert request.reason() == TIME_IS_UP
    request.ask()
    assert (request.reason(), request.is_asked()) == (HOOK, False)
    assert describe_reason(HOOK) == "a hook"
    assert HOOK > TIME_IS_UP
    request.take(signal.SIGUSR1)
    assert request.reason() == signal.SIGUSR1
