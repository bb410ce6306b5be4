"""The chaos scripts at a small size; docs/guides/checkpoints.md shows the large versions."""

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


def test_checkpoint_returns_unchanged_from_another_mesh(tmp_path: Path) -> None:
    """The tied weight is on one rank, then on two that hold two stages each."""
    home, away = (
        Case("gpt2-tied", (1, 1, 2, 1)),
        Case("gpt2-tied", (2, 1, 1, 1), schedule="ZBVZeroBubble", stages_per_rank=2),
    )
    same, every = reshard.round_trip(home, away, tmp_path)
    assert same == every > 200


@pytest.mark.skipif(not disk.may_mount(), reason="needs the right to mount")
def test_full_disk_is_named_and_the_run_resumes(tmp_path: Path) -> None:
    assert "No space left on device" in disk.fill_and_resume(tmp_path, taken=0, in_background=True)
