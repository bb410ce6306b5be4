"""torch's flight recorder: the latest collectives of this process, to find the one that hangs."""

import os
import shutil
from pathlib import Path

from meshtrain.compat.distributed import flight_records

FLIGHT_NAME = "flight_recorder"
RECORDER_SIZE = "TORCH_FR_BUFFER_SIZE"
"""Environment variable with the number of collectives that torch records."""
COLLECTIVES_KEPT = "2000"


def switch_on_recorder() -> None:
    """Make torch record the latest collectives.

    It must be called before any process group is created. If the environment sets the number of
    collectives, that is kept.
    """
    os.environ.setdefault(RECORDER_SIZE, COLLECTIVES_KEPT)


def write_recorder(directory: Path, rank: int) -> None:
    """Write the record as RUN/flight_recorder/rank_N, which torch's `torchfrtrace` reads."""
    if os.environ.get(RECORDER_SIZE) == "0":
        return
    folder = directory / FLIGHT_NAME
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank_{rank}").write_bytes(flight_records())


def forget_recorders(directory: Path) -> None:
    """Remove the records of an earlier failure."""
    if (directory / FLIGHT_NAME).exists():
        shutil.rmtree(directory / FLIGHT_NAME)
