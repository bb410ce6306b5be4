"""Files that are missing, broken, or extend each other in a circle are refused."""

from pathlib import Path

import pytest

from meshtrain.config.toml import load_plan, load_run
from meshtrain.errors import ConfigError


def problems_of(load, *arguments) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load(*arguments)
    return caught.value.lines


def test_missing_run_is_named_with_the_most_similar_file(write, tmp_path):
    write("quickstart.toml")

    assert problems_of(load_run, "quikstart.toml") == (
        f"no file 'quikstart.toml' in {tmp_path}; did you mean 'quickstart.toml'?",
    )


def test_missing_run_lists_the_existing_files(write, tmp_path):
    write("a.toml")
    write("b.toml")

    assert problems_of(load_run, "something.toml") == (
        f"no file 'something.toml' in {tmp_path}; there is: a.toml, b.toml",
    )


def test_missing_directory_is_named(write, tmp_path):
    write()

    assert problems_of(load_run, "there/run.toml") == (
        f"no file 'run.toml': there is no directory {tmp_path / 'there'}",
    )


def test_missing_base_is_attributed_to_the_file_that_names_it(write, tmp_path):
    path = write(text='extends = "bsae.toml"')
    write("base.toml")

    assert problems_of(load_run, path) == (
        f"run.toml: extends: no file 'bsae.toml' in {tmp_path}; did you mean 'base.toml'?",
    )


def test_missing_shipped_plan_is_attributed_to_the_file_that_names_it(write):
    path = write(text='plan = "my.toml"')
    write("my.toml", 'extends = "families/lama"', whole=False)

    assert problems_of(load_run, path) == (
        "my.toml: extends: no shipped plan 'families/lama'; did you mean 'families/llama'?",
    )
    (line,) = problems_of(load_plan, "nothing-of-the-kind")
    assert line.startswith("no shipped plan 'nothing-of-the-kind'; shipped are: families/codegen, ")


def test_circular_extends_is_refused(write):
    write("a.toml", 'extends = "b.toml"', whole=False)
    write("b.toml", 'extends = "deep/../a.toml"', whole=False)
    Path("deep").mkdir()

    assert problems_of(load_plan, "a.toml") == (
        "b.toml: extends: goes in a circle: a.toml -> b.toml -> a.toml; leave out one `extends`",
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("steps = ten", "line 1, column 9: invalid value"),
        ("steps = 1\nsteps = 2\n", "line 2, column 10: cannot overwrite a value"),
        ('run_directory = "out', "end of document: unterminated string"),
    ],
)
def test_file_that_is_not_toml_is_refused(write, text, reason):
    assert problems_of(load_run, write(text=text, whole=False)) == (f"run.toml: {reason}",)


def test_file_that_is_not_text_is_refused(write):
    write().write_bytes(b"steps = 1 # \xff")

    assert problems_of(load_run, "run.toml") == ("run.toml: not a TOML file: byte 12 is not UTF-8 text",)


def test_directory_is_refused_as_a_file(write):
    write("runs/run.toml")

    assert problems_of(load_run, "runs") == ("runs: cannot be read: Is a directory",)


def test_problems_of_all_files_are_reported_together(write):
    write("plan.toml", 'extends = "families/gpt2"\nmesh.pp = 0\nmesh.dp_shard = 0\ncompile = true', whole=False)
    write("base.toml", 'plan = "plan.toml"\n[model]\ntyp = "gpt2"', whole=False)
    path = write(text='extends = "base.toml"\nsteps = "ten"', whole=False)

    assert problems_of(load_run, path, ["optimizer.beta1=2.0", "seed"]) == (
        "command line: cannot read 'seed'; expected key=value, as in plan.mesh.tp=4",
        "run.toml: steps: expected a whole number from 1, found the string 'ten'",
        "base.toml: model.typ: unknown key; did you mean 'type'?",
        "command line: optimizer.beta1: expected a number from 0 below 1, found 2.0",
        "plan.toml: mesh.pp: expected a whole number from 1, found 0",
        "plan.toml: mesh.dp_shard: expected -1 (whatever is left) or a whole number from 1, found 0",
        "plan.toml: compile: expected a table, found true",
    )


def test_unreadable_base_hides_errors_about_missing_keys(write, tmp_path):
    path = write(text='extends = "gone.toml"\n[model]\nconfig.n_layer = 2\ntyp = "gpt2"', whole=False)

    assert problems_of(load_run, path) == (
        f"run.toml: extends: no file 'gone.toml' in {tmp_path}; there is: run.toml",
        "run.toml: model.typ: unknown key; did you mean 'type'?",
    )
