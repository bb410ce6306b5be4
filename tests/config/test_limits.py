"""Numbers, paths and URLs out of range are refused where they are written."""

import pytest

from meshtrain.config.toml import load_plan, load_run
from meshtrain.errors import ConfigError

BEYOND = "found 1000000000000000000"


def problems_of(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_run(path, overrides)
    return caught.value.lines


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.learning_rate=1e30", "expected a number above 0 up to 10, found 1e+30"),
        ("optimizer.learning_rate=3e4", "expected a number above 0 up to 10, found 30000.0"),
        ("optimizer.learning_rate=nan", "expected a number above 0 up to 10, found nan"),
        ("optimizer.beta1=nan", "expected a number from 0 below 1, found nan"),
        ("optimizer.weight_decay=inf", "expected a finite number from 0 to 10, found inf"),
        ("optimizer.max_gradient_norm=nan", "expected a number above 0, found nan"),
        ("watchdog.minimum_seconds=inf", "expected a finite number above 0 up to 100,000,000, found inf"),
        ("watchdog.minimum_seconds=1e9", "expected a number above 0 up to 100,000,000, found 1000000000.0"),
        ("data.validation=nan", "expected a number from 0 below 1 or a list of strings, found nan"),
        ("steps=1000000000000000000", f"expected a whole number from 1 to 1,000,000,000,000, {BEYOND}"),
        ("plan.mesh.tp=1000000000000000000", f"expected a whole number from 1 to 1,000,000, {BEYOND}"),
        ("plan.mesh.dp_shard=1000000000000000000", f"expected a whole number to 1,000,000, {BEYOND}"),
        ("seed=18446744073709551616", "a whole number of 65 bits, and TOML has at most 64; use a smaller one"),
    ],
)
def test_number_out_of_range_is_refused(write, override, message):
    assert problems_of(write(), override) == (f"command line: {override.partition('=')[0]}: {message}",)


def test_infinity_disables_gradient_clipping(write):
    assert load_run(write(), ["optimizer.max_gradient_norm=inf"]).optimizer.max_gradient_norm == float("inf")


@pytest.mark.parametrize(
    "key", ["run_directory", "checkpoint.directory", "data.cache_directory", "data.tokenizer.path"]
)
def test_control_characters_in_a_path_are_refused(write, key):
    reply = "has the character '\\x00', which no path should have; remove it"
    assert problems_of(write(), f'{key}="a\\u0000b"') == (f"command line: {key}: 'a\\x00b' {reply}",)


def test_control_characters_in_a_list_of_paths_are_refused(write):
    reply = "has the character '\\x1b', which no path should have; remove it"
    for key in ("data.train", "data.validation"):
        assert problems_of(write(), f'{key}=["a", "b\\u001b"]') == (f"command line: {key}: 'b\\x1b' {reply}",)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "nosuch://bucket/x",
            "fsspec knows no file system 'nosuch://'; use one that it has, such as 's3://', or a directory",
        ),
        ("s4://bucket", "fsspec knows no file system 's4://'; did you mean 's3://'?"),
        ("S3://bucket", "fsspec knows no file system 'S3://'; did you mean 's3://'?"),
        ("htps://host/x", "fsspec knows no file system 'htps://'; did you mean 'https://'?"),
        ("simplecache::gcss://x", "fsspec knows no file system 'gcss://'; did you mean 'gcs://'?"),
    ],
)
def test_wrong_url_scheme_is_refused(write, url, message):
    assert problems_of(write(), f"checkpoint.directory={url}") == (
        f"command line: checkpoint.directory: {url!r}: {message}",
    )


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://bucket", "memory://x", "simplecache::s3://bucket/x"])
def test_fsspec_scheme_is_accepted(write, url):
    assert load_run(write(), [f"checkpoint.directory={url}"]).checkpoint.directory == url


def test_too_long_file_name_is_refused(write):
    name = "x" * 300
    reply = f"'{'x' * 37}...' has 300 bytes, and a file name has at most 255; choose a shorter one"

    assert problems_of(write("a.toml", f'extends = "{name}"')) == (f"a.toml: extends: {reply}",)
    assert problems_of(write("b.toml", f'plan = "{name}"')) == (f"b.toml: plan: {reply}",)
    assert problems_of(name) == (reply,)
    with pytest.raises(ConfigError, match="has 300 bytes"):
        load_plan(name)


def test_device_is_refused_as_a_file(write):
    assert problems_of(write(text='extends = "/dev/zero"\n')) == (
        "run.toml: extends: '/dev/zero' is a device and not a file; name a .toml or .json file",
    )


def test_numbers_nesting_and_text_beyond_the_parser_are_refused(write):
    digits, deep = "9" * 5000, "[" * 5000 + "]" * 5000
    assert problems_of(write("a.toml", f"\nseed = {digits}\n")) == (
        "a.toml: line 2: a number has thousands of digits; integers have at most 64 bits",
    )
    too_deep = "tables and lists are nested more than 30 deep; write fewer levels"
    assert problems_of(write("b.toml", f"a = {deep}\n")) == (f"b.toml: {too_deep}",)
    assert problems_of(write("c.toml", f"a{'.a' * 500} = 1\n")) == (f"c.toml: a: {too_deep}",)
    assert problems_of(write("d.json", f'{{"a": {deep}}}', whole=False)) == (f"d.json: {too_deep}",)
    (line,) = problems_of(write("e.json", '{"seed": "\\ud800"}', whole=False))
    assert line == "e.json: seed: '\\ud800' is not UTF-8 text; fix it"


def test_keys_that_cannot_be_printed_are_escaped(write):
    (line,) = problems_of(write(text='"a\\n\\u001b[31m" = 1\n'))
    assert line.startswith('run.toml: "a\\n\\x1b[31m": unknown key')


@pytest.mark.parametrize("override", ["[a]\n#=1", "a" + ".b" * 600 + "=1", "\udcff=1"])
def test_unreadable_override_is_a_printable_error(write, override):
    (line,) = problems_of(write(), override)
    assert line.startswith("command line: ")
    assert line.isprintable()
