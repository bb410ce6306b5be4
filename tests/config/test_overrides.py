"""`key=value` on the command line."""

from pathlib import Path

import pytest

from meshtrain.config.toml import load_plan, load_run
from meshtrain.errors import ConfigError


def problems_of(path: Path, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_run(path, overrides)
    return caught.value.lines


def test_values_are_parsed_as_toml(write):
    config = load_run(
        write(),
        [
            "steps=20",
            "plan.mesh.tp=4",
            "model.config.n_layer=2",
            "optimizer.learning_rate=1e-3",
            "data.shuffle=false",
            'plan.tensor.styles."transformer.h.*.mlp.c_fc"="colwise"',
            "model.config={n_head = 4}",
        ],
    )

    assert (config.steps, config.plan.mesh.tp, config.optimizer.learning_rate) == (20, 4, 1e-3)
    assert config.model.config == {"n_layer": 2, "n_head": 4}
    assert config.data.shuffle is False
    assert config.plan.tensor.styles == {"transformer.h.*.mlp.c_fc": "colwise"}


def test_bare_word_is_a_string(write, tmp_path):
    config = load_run(write(), ["run_directory=somewhere/else", "plan.pipeline.schedule=1F1B", "model.type=llama"])

    assert config.run_directory == str(tmp_path / "somewhere/else")
    assert (config.plan.pipeline.schedule, config.model.type) == ("1F1B", "llama")


def test_later_override_wins(write):
    assert load_run(write(), ["steps=20", "steps=30"]).steps == 30


def test_empty_value_removes_a_key(write):
    config = load_run(write(text='plan = "families/gpt2"'), ["steps=", "epochs=2", "plan="])

    assert (config.steps, config.epochs) == (None, 2)
    assert not config.plan.tensor.styles


def test_removing_an_unknown_key_is_refused(write):
    assert problems_of(write(), "epoch=", "plan.mesh.tq=", "model.config.n_layer.x=") == (
        "command line: epoch: unknown key; did you mean 'epochs'?",
        "command line: plan.mesh.tq: unknown key; did you mean 'tp'?",
    )


@pytest.mark.parametrize("name", ["plan=families/gpt2", "plan.extends=families/gpt2", 'plan={extends="families/gpt2"}'])
def test_overriding_plan_replaces_that_of_the_run_in_any_order(write, name):
    path = write(text="plan.mesh.pp = 2")

    config = load_run(path, ["plan.mesh.tp=4", name])

    assert config == load_run(path, [name, "plan.mesh.tp=4"])
    assert config.plan == load_plan("families/gpt2", ["mesh.tp=4"])


def test_plan_path_in_an_override_is_relative_to_the_current_directory(write, tmp_path, monkeypatch):
    path = write("runs/run.toml")
    write("here/my.toml", "mesh.pp = 2", whole=False)
    monkeypatch.chdir(tmp_path / "here")

    assert load_run(path, ["plan=my.toml"]).plan.mesh.pp == 2


@pytest.mark.parametrize("override", ["steps", "steps 10", "[plan.mesh]", "# steps=10", "a b=3", "=3", ""])
def test_malformed_override_is_refused(write, override):
    assert problems_of(write(), override) == (
        f"command line: cannot read {override!r}; expected key=value, as in plan.mesh.tp=4",
    )


def test_list_without_its_quotes_is_refused_with_advice(write):
    assert problems_of(write(), "data.train=[a.jsonl]") == (
        "command line: cannot read 'data.train=[a.jsonl]'; "
        """quote lists and tables for the shell, as in 'data.train=["a.jsonl"]'""",
    )


def test_extends_in_an_override_is_refused(write):
    assert problems_of(write(), "extends=other.toml") == (
        "command line: extends: only a file can extend another; name that file instead",
    )


def test_wrong_values_are_attributed_to_the_command_line(write):
    assert problems_of(write(), "plan.mesh.tq=4", "steps=1O", "plan.pipeline.schedule=1F1b") == (
        "command line: steps: expected a whole number from 1, found the string '1O'",
        "command line: plan.mesh.tq: unknown key; did you mean 'tp'?",
        "command line: plan.pipeline.schedule: expected 'GPipe', '1F1B', 'Interleaved1F1B', 'LoopedBFS', "
        "'InterleavedZeroBubble', 'ZBVZeroBubble' or 'DualPipeV', found the string '1F1b'; "
        "did you mean '1F1B'?",
    )


def test_missing_plan_is_refused(write):
    (line,) = problems_of(write(), "plan=families/gpt22")

    assert line == "command line: plan: no shipped plan 'families/gpt22'; did you mean 'families/gpt2'?"
