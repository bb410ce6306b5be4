"""The scripts of misfortune, small. docs/guides/checkpoints.md says how their large versions are run."""

import sys
from pathlib import Path

import pytest

from tests.chaos import damage, disk, reshard
from tests.parity import Case


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], script, *arguments: str) -> str:
    """Run a script and return its last line."""
    monkeypatch.setattr(sys, "argv", [script.__name__, *arguments])
    script.main()
    return capsys.readouterr().out.splitlines()[-1]


def test_every_damage_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = run(monkeypatch, capsys, damage, "--times", "8", "--seed", "1").split()
    assert words[:4] == ["all", "8", "8", "8"]


def test_there_and_back(tmp_path: Path) -> None:
    """The tie lies on one rank, then on two that hold two stages each."""
    home, away = (
        Case("gpt2-tied", (1, 1, 2, 1)),
        Case("gpt2-tied", (2, 1, 1, 1), schedule="ZBVZeroBubble", stages_per_rank=2),
    )
    same, every = reshard.round_trip(home, away, tmp_path)
    assert same == every > 200


@pytest.mark.skipif(not disk.may_mount(), reason="needs the right to mount")
def test_a_full_disk(tmp_path: Path) -> None:
    assert "No space left on device" in disk.fill_and_resume(tmp_path, taken=0, in_background=True)
