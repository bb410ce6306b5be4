"""How a case is asked for, and how it ends."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.host_cuda.build import LIBRARY

Numbers = dict[str, float]


@dataclass(frozen=True)
class Setting:
    """What all cases are told.

    Attributes:
        device: "cuda" or "cpu".
        small: whether sizes are tiny, to see that the cases work.
        folder: for what the cases write.
    """

    device: str
    small: bool
    folder: Path

    @property
    def torch_device(self) -> torch.device:
        """Return the device."""
        return torch.device(self.device)

    @property
    def on_host(self) -> bool:
        """Return whether the CUDA device is that of the host, see tests/host_cuda."""
        return LIBRARY in os.environ


class Failed(Exception):
    """A case is not as it should be."""

    def __init__(self, reason: str, numbers: Numbers | None = None) -> None:
        super().__init__(reason)
        self.numbers = numbers or {}


class Skipped(Failed):
    """A case cannot be checked here."""


def check_close(what: str, found: Sequence[float], wanted: Sequence[float], tolerance: float) -> float:
    """Return the largest relative difference.

    Raises:
        Failed: if it is larger than the tolerance, or not a number.
    """
    differences = [abs(one - other) / abs(other) for one, other in zip(found, wanted, strict=True)]
    if not all(difference <= tolerance for difference in differences):
        shown = " ".join(f"{value:.6g}" for value in found), " ".join(f"{value:.6g}" for value in wanted)
        raise Failed(
            f"{what} {shown[0]}, expected {shown[1]} within {tolerance:g}", {f"{what}_difference": max(differences)}
        )
    return max(differences)
