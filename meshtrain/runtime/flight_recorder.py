"""torch's flight recorder: the latest collectives of this process, for who wants to know which one never ended."""

import os
import shutil
from pathlib import Path

from meshtrain.compat.distributed import flight_records

FLIGHT_NAME = "flight_recorder"
COLLECTIVES_KEPT = "2000"


def switch_on_recorder() -> None:
    """Let torch keep the latest collectives, unless the environment says how many; before any process group."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", COLLECTIVES_KEPT)


def write_recorder(directory: Path, rank: int) -> None:
    """Write what was kept as RUN/flight_recorder/rank_N, which torch's `torchfrtrace` reads."""
    if os.environ.get("TORCH_FR_BUFFER_SIZE") == "0":
        return
    folder = directory / FLIGHT_NAME
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank_{rank}").write_bytes(flight_records())


def forget_recorders(directory: Path) -> None:
    """Remove what an earlier failure left."""
    if (directory / FLIGHT_NAME).exists():
        shutil.rmtree(directory / FLIGHT_NAME)
