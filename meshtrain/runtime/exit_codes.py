"""What exit codes mean; `meshtrain.cli` describes each."""

BUG = NOT_PROVEN = 1
USER_MISTAKE = 2
PEER_FAILED = 3
"""Of a process that stops because of another one."""
COME_AGAIN = 75
INTERRUPTED = 130
