"""The run directory: what may change between a stop and a resume, and an edited run file."""

from pathlib import Path

import pytest

from meshtrain.config.plan import ParallelPlan
from meshtrain.errors import ConfigError
from meshtrain.training.directory import changed_length, check_directory, decisive
from meshtrain.training.files import RUN_NAME
from tests.training.runs import build_run


def test_keys_that_only_begin_like_a_free_key_decide() -> None:
    run = {
        "plan": {"mesh": {"tp": 2}},
        "steps": 5,
        "plan_search": 1,
        "data": {"cache_directory": "a", "form": "packed"},
    }
    assert decisive(run) == {"plan_search": 1, "data.form": "packed"}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"steps = ", "Invalid value (at end of document)"),
        (b"steps = '\xff'", "'utf-8' codec can't decode byte 0xff in position 9: invalid start byte"),
    ],
)
def test_broken_run_file_of_a_run_directory_is_one_line(tmp_path: Path, content: bytes, problem: str) -> None:
    config = build_run(tmp_path / "out", "gpt2", ParallelPlan())
    out = Path(config.run_directory)
    (out / "checkpoints").mkdir(parents=True)
    (out / RUN_NAME).write_bytes(content)
    (out / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    for check in (check_directory, changed_length):
        with pytest.raises(ConfigError) as caught:
            check(config)
        shown = f"{out / RUN_NAME} cannot be read: {problem}; correct it, or choose another run_directory"
        assert str(caught.value) == shown


def test_length_that_is_no_number_is_not_compared(tmp_path: Path) -> None:
    config = build_run(tmp_path / "out", "gpt2", ParallelPlan())
    Path(config.run_directory).mkdir()
    (Path(config.run_directory) / RUN_NAME).write_text('steps = "10"\n')
    assert changed_length(config) is None
