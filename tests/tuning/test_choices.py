"""Lists of values on the command line: what they combine to, and which are refused."""

import pytest

from meshtrain.config.toml import load_run
from meshtrain.errors import ConfigError
from meshtrain.tuning.sweep.choices import combinations, read_choices
from tests.training.runs import LLAMA_TEXT, RUN_TEXT


def names(*lines: str) -> list[str]:
    return [one.name for one in combinations(read_choices(lines))]


def test_lists_make_their_product_and_names_say_what_differs() -> None:
    assert names("optimizer.learning_rate=[1e-4, 3e-4]", "seed=[0,1]", "steps=[20]") == [
        "learning_rate=0.0001,seed=0",
        "learning_rate=0.0001,seed=1",
        "learning_rate=0.0003,seed=0",
        "learning_rate=0.0003,seed=1",
    ]
    assert names("steps=[20]") == ["steps=20"]
    assert names("seed=[0,1]", "optimizer.name=['adamw']") == ["seed=0", "seed=1"]


def test_names_are_safe_short_and_different() -> None:
    assert names('data.train=[["a b.jsonl"],["/x/../y.jsonl"]]') == ["train=a-b.jsonl", "train=x-..-y.jsonl"]
    assert names('plan=["a/b","a b"]') == ["plan=a-b-1", "plan=a-b-2"]
    assert names("a.b=[1,2]", "c.b=[true]", "d.b=[0.1,0.30000000000000004]")[1] == "a.b=1,d.b=0.30000000000000004"
    assert names('x=["", "y"]') == ["x=empty", "x=y"]
    (first, _) = names(f'x=["{"a" * 300}","b"]')
    assert len(first) == 42


@pytest.mark.parametrize(
    "value",
    [
        "1e-4",
        "inf",
        "true",
        '"text with \\" and é and \U0001f600"',
        '["a.jsonl", "b.jsonl"]',
        "{ vocab_size = 300, nested = [1, 2] }",
        "-3",
    ],
)
def test_values_are_passed_on_as_they_are(value: str) -> None:
    import tomllib

    (only,) = combinations(read_choices([f"key=[{value}]"]))
    assert tomllib.loads(only.overrides[0]) == tomllib.loads(f"key={value}")


def test_overrides_are_those_of_a_run(tmp_path) -> None:
    (tmp_path / "run.toml").write_text(RUN_TEXT + LLAMA_TEXT)
    found = combinations(read_choices(["optimizer.learning_rate=[1e-4,1e-5]", 'data.train=[["a.jsonl"]]']))
    runs = [load_run(tmp_path / "run.toml", one.overrides) for one in found]
    assert [run.optimizer.learning_rate for run in runs] == [1e-4, 1e-5]
    assert all(len(run.data.train) == 1 and run.data.train[0].endswith("/a.jsonl") for run in runs)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["seed=3"], "command line: seed: a single value and not a list; write 'seed=[3]' for the same value in all"),
        (
            ["model.type=llama"],
            "command line: model.type: a single value and not a list; write 'model.type=[\"llama\"]'",
        ),
        (["seed="], "command line: seed: expected a list of values; write one, as in 'seed=[0,1]'"),
        (["model.config={}"], "command line: model: expected a list of values; write one"),
        (["model.config={a=[1],b=[2]}"], "command line: model: expected a list of values; write one"),
        (["seed=[]"], "command line: seed: an empty list; write the values to try into it"),
        (["seed=[1,2,1]"], "command line: seed: 1 is in the list twice; write it once"),
        (["seed=[1]", "seed=[2]"], "command line: seed: given twice; write one list"),
        (["optimizer.name=[adamw,lion]"], "command line: cannot read 'optimizer.name=[adamw,lion]'; quote lists"),
        (["seed"], "command line: cannot read 'seed'; expected key=value"),
        (
            ["run_directory=['a','b']"],
            "command line: run_directory: the sweep names the run directories; pass --direct",
        ),
        ([], "a sweep needs a key with a list of values; add one, as in 'seed=[0,1]'"),
    ],
)
def test_what_is_no_list_is_refused_in_one_line(lines: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_choices(lines)
    (line,) = caught.value.lines
    assert line.startswith(message)


def test_too_many_runs_and_too_long_names_are_refused() -> None:
    many = str(list(range(40)))
    with pytest.raises(
        ConfigError, match=r"^these lists make 1,600 runs, and a sweep has at most 1,000; shorten them$"
    ):
        names(f"seed={many}", f"steps={many}")
    long = [f'key{number}=["{"a" * 40}","b"]' for number in range(6)]
    with pytest.raises(ConfigError, match=r"^the name of a run would have 275 characters; choose fewer keys at once$"):
        names(*long)
