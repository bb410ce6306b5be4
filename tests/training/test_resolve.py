"""A resolved run."""

import json
from pathlib import Path

import pytest

from meshtrain.config.plan import ParallelPlan
from meshtrain.config.run import ModelConfig, RunConfig
from meshtrain.training.resolve import resolve_run
from tests.training.runs import DRY, GPT2, VOCABULARY, build_run

VALUES = {"vocab_size": VOCABULARY, **GPT2, **DRY}


def run_of(directory: Path, model: ModelConfig) -> RunConfig:
    return build_run(directory / "out", "gpt2", ParallelPlan()).model_copy(update={"model": model})


@pytest.mark.parametrize(("own", "ends"), [({}, (63, 63)), ({"eos_token_id": 7}, (63, 7))])
def test_new_model_is_exported_with_the_end_token_of_its_tokenizer(
    tmp_path: Path, own: dict[str, int], ends: tuple[int, int]
) -> None:
    resolved = resolve_run(run_of(tmp_path, ModelConfig(type="gpt2", config={**VALUES, **own})))
    exported = resolved.exported_config(63)
    assert (exported.bos_token_id, exported.eos_token_id) == ends
    assert resolved.hf_config.bos_token_id != 63


def test_existing_model_keeps_its_end_token(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **VALUES, "eos_token_id": 2}))
    resolved = resolve_run(run_of(tmp_path, ModelConfig(path=str(tmp_path))))
    assert resolved.exported_config(63).eos_token_id == 2
