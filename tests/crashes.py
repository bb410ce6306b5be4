"""What a rank that crashes leaves on stderr, for a person to read."""

import re

_STACK = re.compile(r"SIG\w+\(\d+\), PID: \d+, Thread \d+: ?\n(?:[ <]*(?:frame|omitting) .*\n)*\n?")


def has_stacks(text: str) -> bool:
    """Whether there are C++ stacks of a process that crashed."""
    return bool(_STACK.search(text))


def without_waiting_threads(text: str) -> str:
    """Leave out the C++ stacks of all threads but the one that crashed: a rank has dozens that wait for work."""
    return _STACK.sub(lambda stack: stack[0] if "fatalSignalHandler(int" in stack[0] else "", text)
