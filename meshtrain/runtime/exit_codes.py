"""Exit codes. `meshtrain.cli` describes each of them."""

BUG = NOT_PROVEN = DOES_NOT_FIT = RUN_FAILED = 1
USER_MISTAKE = 2
PEER_FAILED = 3
"""Exit code of a process that stops because another process failed."""
RESTART = 75
INTERRUPTED = 130
