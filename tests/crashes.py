"""The output of a crashed rank on stderr, shortened for readers."""

import re

_STACK = re.compile(r"SIG\w+\(\d+\), PID: \d+, Thread \d+: ?\n(?:[ <]*(?:frame|omitting) .*\n)*\n?")


def has_stacks(text: str) -> bool:
    """Return whether a text has the C++ stacks of a crashed process."""
    return bool(_STACK.search(text))


def without_waiting_threads(text: str) -> str:
    """Remove the C++ stacks of dozens of waiting threads, and keep that of the crashed one."""
    return _STACK.sub(lambda stack: stack[0] if "fatalSignalHandler(int" in stack[0] else "", text)
