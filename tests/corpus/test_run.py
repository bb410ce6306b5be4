"""Runs of a corpus file: skipped, redone, interrupted, and shared among workers."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from meshtrain.cli import data_commands
from meshtrain.errors import UserError
from tests.corpus.preparations import (
    contents,
    counts_of,
    prepare,
    read_shards,
    texts,
    write_corpus_file,
    write_records,
)

STEPS = {"clean": {"minimum_tokens": 20}, "shuffle": {}, "split": {"validation": 0.2}}


@pytest.fixture
def file(tmp_path):
    """Return a corpus file with good, short, near-duplicate and empty documents in two sources."""
    good = [{"text": text, "url": f"http://example.org/{number}"} for number, text in enumerate(texts(60))]
    short = [{"text": "too short"}] * 5
    copies = [{"text": f"{record['text']} Copied!"} for record in good[:7]]
    write_records(tmp_path / "in" / "a.jsonl", good[:30] + short)
    write_records(tmp_path / "in" / "b.jsonl", good[30:] + copies + [{"text": " \n"}] * 2)
    return write_corpus_file(tmp_path, sources=["in/*.jsonl"], shard_megabytes=0.006, **STEPS)


def command(file, *overrides: str) -> list[str]:
    # The run gets a process of its own, because workers of pytest would import pytest again.
    return [sys.executable, "-m", "meshtrain", "corpus", "run", str(file), *overrides]


def problem(*arguments, **options) -> str:
    with pytest.raises(UserError) as caught:
        prepare(*arguments, **options)
    return str(caught.value)


def test_every_document_is_accounted_for(tmp_path, file, capsys):
    prepare(file, "deduplicate={}")
    out = tmp_path / "out"

    counts = {step.name: counts_of(step) for step in sorted(out.glob("*-*"))}
    assert {name: (step["in"], step["out"], step["dropped"]) for name, step in counts.items()} == {
        "01-read": (74, 72, {"empty": 2}),
        "02-clean": (72, 67, {"too short": 5}),
        "03-deduplicate": (67, 60, {"near duplicate": 7}),
        "04-shuffle": (60, 60, {}),
        "05-split": (60, 60, {}),
    }
    train, validation = (read_shards(out / "05-split" / part) for part in ("train", "validation"))
    assert counts["05-split"]["parts"] == {"train": len(train), "validation": len(validation)}
    assert sorted(record["text"] for record in train + validation) == sorted(texts(60))
    assert {record["id"]: record["url"] for record in train + validation}["a.jsonl:1"] == "http://example.org/0"
    assert not list(out.rglob("work"))
    shown = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0].strip() for line in shown if " in " in line] == [
        "read",
        "clean",
        "deduplicate",
        "shuffle",
        "split",
    ]
    assert shown[-1] == (
        f"Done. Train on it: meshtrain train RUN 'data.train=[\"{out}/05-split/train/*.jsonl.gz\"]' "
        f"'data.validation=[\"{out}/05-split/validation/*.jsonl.gz\"]'"
    )


def test_the_result_does_not_depend_on_the_number_of_workers(tmp_path, file):
    prepare(file)
    again = command(file, "workers=3", f"directory={tmp_path}/again")
    subprocess.run(again, stdout=subprocess.DEVNULL, check=True)

    assert contents(tmp_path / "out") == contents(tmp_path / "again")
    assert len(contents(tmp_path / "out")) > 20


def test_complete_steps_are_skipped(tmp_path, file, capsys):
    prepare(file)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.jsonl.*")}
    capsys.readouterr()
    prepare(file)

    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.jsonl.*")} == before
    assert sum(line.endswith("(done before)") for line in capsys.readouterr().out.splitlines()) == 4


def test_changed_settings_are_refused_until_the_step_is_redone(tmp_path, file, capsys):
    prepare(file)
    first = contents(tmp_path / "out")
    out = tmp_path / "out" / "02-clean"

    assert problem(file, "clean.minimum_tokens=30") == (
        f"clean: {out} was made with other settings: minimum_tokens was 20 and is 30; add --redo clean to remove it "
        "and the steps after it, or set directory to a new location"
    )
    assert contents(tmp_path / "out") == first
    prepare(file, "clean.minimum_tokens=30", redo="clean")
    assert json.loads((out / "step.json").read_text())["minimum_tokens"] == 30
    assert f"Removing {tmp_path}/out/04-split" in capsys.readouterr().out
    prepare(file, redo="clean")
    assert contents(tmp_path / "out") == first


def test_changed_sources_are_refused(tmp_path, file):
    prepare(file)
    write_records(tmp_path / "in" / "c.jsonl", [{"text": "more"}])

    assert problem(file).startswith(
        f"read: {tmp_path}/out/01-read was made with other settings: its input has changed; add --redo read to "
    )


def test_sources_that_change_while_they_are_read_are_an_error(tmp_path, file, monkeypatch):
    from meshtrain.corpus import preparation

    run_pass = preparation.run_pass

    def write_to_a_source(*arguments, **options):
        run_pass(*arguments, **options)
        with (tmp_path / "in" / "b.jsonl").open("a") as stream:
            stream.write('{"text": "late"}\n')

    monkeypatch.setattr(preparation, "run_pass", write_to_a_source)
    assert problem(file) == (
        f"{tmp_path}/in/b.jsonl changed while it was read; when nothing writes to it any more, run again with "
        "--redo read"
    )


def test_the_directory_of_a_removed_step_is_an_error(tmp_path, file):
    prepare(file)

    assert problem(file, "shuffle=") == (
        f"{tmp_path}/out holds 03-shuffle, which is not a step of this file (it has 01-read, 02-clean, 03-split); "
        "remove it, or set directory to a new location"
    )
    prepare(file, "shuffle=", redo="clean")
    assert sorted(path.name for path in (tmp_path / "out").glob("*-*")) == ["01-read", "02-clean", "03-split"]


def test_single_steps_make_the_same_result_as_all_steps(tmp_path, file, capsys):
    assert problem(file, only="split") == f"{tmp_path}/out/02-clean is not complete; run `meshtrain corpus clean` first"
    for step in STEPS:
        prepare(file, only=step)
        if step == "clean":
            assert capsys.readouterr().out.endswith("\nDone. The next step: meshtrain corpus shuffle FILE\n")
    stepwise = contents(tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    prepare(file)

    assert contents(tmp_path / "out") == stepwise
    assert problem(file, only="download") == (
        "cannot run download: the file has no such step; it has read, clean, shuffle, split"
    )
    assert problem(file, redo="urls").startswith("cannot redo urls: the file has no such step; it has read, clean, ")


def test_a_broken_record_ends_the_step_or_is_dropped(tmp_path, file):
    lines = (tmp_path / "in" / "b.jsonl").read_bytes()
    (tmp_path / "in" / "b.jsonl").write_bytes(lines.replace(b'{"text"', b'{"txt"', 1))
    (tmp_path / "in" / "c.jsonl").write_bytes(b'{"text": ')

    assert problem(file) == (
        f'{tmp_path}/in/b.jsonl, line 1: broken record: no key "text" (text_key); the keys are "txt", "url"; fix it, '
        'or drop such records with on_bad_record = "skip"'
    )
    prepare(file, "on_bad_record=skip", redo="read")
    assert counts_of(tmp_path / "out" / "01-read")["dropped"] == {"broken record": 2, "empty": 2}
    dropped = read_shards(tmp_path / "out" / "01-read" / "dropped")
    assert [record["id"] for record in dropped if record["reason"] == "broken record"] == [
        f"{tmp_path}/in/b.jsonl, line 1",
        f"{tmp_path}/in/c.jsonl, line 1",
    ]


def test_a_step_that_keeps_no_document_is_an_error(tmp_path, file):
    for _ in range(2):
        assert problem(file, "clean.minimum_tokens=1000") == (
            f"clean kept none of 72 documents; see the reasons in {tmp_path}/out/02-clean/dropped"
        )


@pytest.mark.parametrize(("compression", "suffix"), [("zstd", ".zst"), ("none", ".jsonl")])
def test_every_compression_stores_the_same_documents(tmp_path, file, compression, suffix):
    prepare(file, only="clean")
    prepare(file, f"compression={compression}", "deduplicate={}", f"directory={tmp_path}/packed")

    gz, other = (read_shards(tmp_path / name) for name in ("out/02-clean", "packed/02-clean"))
    assert gz == other
    assert len(read_shards(tmp_path / "packed" / "04-shuffle")) == 60
    assert {path.suffix for path in (tmp_path / "packed").rglob("0*.jsonl*")} == {suffix}


def test_a_second_run_in_the_same_directory_is_refused(tmp_path, file, monkeypatch):
    from meshtrain.corpus import preparation

    build_chain, errors = preparation.build_chain, []

    def build_while_another_run_starts(config):
        if not errors:
            errors.append("")
            errors.append(problem(file))
        return build_chain(config)

    monkeypatch.setattr(preparation, "build_chain", build_while_another_run_starts)
    prepare(file, only="clean")
    assert errors[1].startswith(f"directory = {tmp_path}/out is in use by process {os.getpid()} on ")
    assert errors[1].endswith("; wait until it ends, end it, or choose another location")
    assert not list((tmp_path / "out").glob(".lock*"))


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path, file):
    (tmp_path / "out").write_text("a file")
    assert problem(file) == f"directory: cannot write into {tmp_path}/out: File exists; choose another location"


def test_a_shard_that_vanishes_is_an_error(tmp_path, file, monkeypatch):
    from meshtrain.corpus import preparation

    counting_pass = preparation.counting_pass

    def lose_a_shard(directory):
        directory.shards()[0].unlink()
        return counting_pass(directory)

    monkeypatch.setattr(preparation, "counting_pass", lose_a_shard)
    message = problem(file)
    assert message.startswith("read: 74 documents came in, but ")
    assert message.endswith(
        f"something else writes into {tmp_path}/out/01-read, or a disk lost files; run again with --redo read"
    )


def test_a_damaged_shard_is_an_error(tmp_path, file):
    prepare(file, only="clean")
    shard = sorted((tmp_path / "out" / "02-clean").glob("*.gz"))[0]
    shard.write_bytes(shard.read_bytes()[:-20])

    assert problem(file).startswith(f"cannot read {shard}: the gzip file is damaged: ")


def test_a_corpus_file_may_end_with_links(tmp_path, capsys):
    (tmp_path / "links.txt.gz").write_bytes(
        gzip.compress(b"http://example.org/a\n\nhttp://example.org/a#b\nhttp://imgur.com/\n\xff\xff\xff\xff\xff\n")
    )
    prepare(write_corpus_file(tmp_path, urls={"lists": ["links.txt.gz"]}))

    counts = counts_of(tmp_path / "out" / "01-urls")
    assert (counts["in"], counts["out"]) == (4, 1)
    assert counts["dropped"] == {"blacklisted domain": 1, "duplicate": 1, "malformed": 1}
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"Done. The links are in {tmp_path}/out/01-urls; add a table [download] to fetch them"
    )


def test_a_list_of_links_must_be_a_text_file(tmp_path):
    write_records(tmp_path / "links.jsonl", [{"url": "http://example.org"}])
    message = problem(write_corpus_file(tmp_path, urls={"lists": ["links.jsonl"]}))

    assert message == f"urls.lists: {tmp_path}/links.jsonl is not a .txt file; give files with one link per line"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return a corpus file of twenty shards, and the result of an undisturbed run."""
    directory = tmp_path_factory.mktemp("corpus")
    write_records(directory / "in.jsonl", [{"text": text} for text in texts(400)])
    file = write_corpus_file(directory, sources=["in.jsonl"], shard_megabytes=0.012, **STEPS)
    prepare(file)
    return file, contents(directory / "out")


@pytest.mark.parametrize("shard_pass", ["02-clean/logs/0-clean", "03-shuffle/logs/0-scatter"])
def test_a_killed_run_resumes_to_the_same_result(tmp_path, undisturbed, shard_pass):
    file, expected = undisturbed
    again = command(file, "workers=2", f"directory={tmp_path}/out")
    process = subprocess.Popen(again, stdout=subprocess.DEVNULL)
    completions = tmp_path / "out" / shard_pass / "completions"
    while process.poll() is None and not (completions.exists() and len(os.listdir(completions)) >= 2):
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()

    assert 2 <= len(os.listdir(completions)) < sum(name.startswith("02-clean/0") for name in expected)
    # The next run starts at once: what the killed run left must not disturb it.
    subprocess.run(again, stdout=subprocess.DEVNULL, check=True)
    assert subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True).stdout == b""
    assert contents(tmp_path / "out") == expected


def test_control_c_ends_all_processes_silently(tmp_path, undisturbed):
    file, expected = undisturbed
    again = command(file, "workers=2", f"directory={tmp_path}/out")
    process = subprocess.Popen(again, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
    completions = tmp_path / "out" / "02-clean" / "logs" / "0-clean" / "completions"
    while process.poll() is None and not (completions.exists() and len(os.listdir(completions)) >= 5):
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=60)

    assert (process.returncode, error) == (130, b"")
    subprocess.run(again, stdout=subprocess.DEVNULL, check=True)
    assert contents(tmp_path / "out") == expected


def test_a_full_disk_is_reported_in_one_line(tmp_path):
    write_records(tmp_path / "in.jsonl", [{"text": text} for text in texts(300, words=400)])
    file = write_corpus_file(tmp_path, sources=["in.jsonl"], clean={})
    limited = 'ulimit -f 100 && exec "$@"'
    run = command(file, "workers=2")
    stopped = subprocess.run(["bash", "-c", limited, "bash", *run], capture_output=True, text=True)

    assert (stopped.returncode, len(stopped.stderr.splitlines())) == (2, 1), stopped.stderr
    assert stopped.stderr.endswith(
        "File too large; fix it, then run the same command again; finished tasks are not repeated\n"
    )
    done = subprocess.run(run, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_package_of_the_extra_is_checked():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {*extras["corpus"], *extras["data"]} - {"meshtrain[data]"}
    assert {package.partition(">")[0] for package in wanted} == {*data_commands.CORPUS_PACKAGES}


def test_missing_packages_of_the_extra_are_named(monkeypatch, file):
    monkeypatch.setattr(data_commands, "CORPUS_PACKAGES", ("ftfy", "no_such_package"))
    with pytest.raises(UserError) as caught:
        data_commands.corpus("run", file)
    assert str(caught.value) == (
        'meshtrain corpus needs packages that are not installed (no_such_package); run pip install "meshtrain[corpus]"'
    )


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ('clean.languages=["klingon"]', "clean.languages: klingon cannot be identified; use one of "),
        ('clean.tokenizer="{}/no"', "clean.tokenizer: there is no {}/no; name a local tokenizer.json or "),
        ('clean.tokenizer="{}/corpus.toml"', "clean.tokenizer: {}/corpus.toml is not a tokenizer ("),
    ],
)
def test_settings_that_need_a_model_are_checked_before_sources_are_read(tmp_path, file, setting, message):
    assert problem(file, setting.format(tmp_path)).startswith(message.format(tmp_path))
    assert not list((tmp_path / "out").glob("*-*"))

    prepare(file)


def test_a_missing_blacklist_is_reported_before_anything_is_written(tmp_path):
    (tmp_path / "links.txt").write_text("http://a.example/page\n")
    file = write_corpus_file(tmp_path, urls={"lists": ["links.txt"], "blacklisted_domains": "domains.txt"})
    assert problem(file).startswith("urls.blacklisted_domains: cannot read ")

    (tmp_path / "domains.txt").write_text("imgur\n")
    prepare(file)


def test_incomplete_sketches_of_a_killed_run_are_replaced(tmp_path, file):
    prepare(file, "deduplicate={}")
    expected = contents(tmp_path / "out")
    step = tmp_path / "out" / "03-deduplicate"
    # A killed task leaves these files.
    (step / "counts.json").unlink()
    shutil.rmtree(step / "logs" / "0-sketch")
    left_behind = step / "work" / "sketches" / "00000-00000.jsonl.gz.partial"
    left_behind.mkdir(parents=True)
    (left_behind / "shingles.bin.partial").write_bytes(b"half")

    prepare(file, "deduplicate={}")

    assert contents(tmp_path / "out") == expected


def test_an_error_in_a_worker_is_reported_in_one_line(tmp_path, file):
    (tmp_path / "in" / "b.jsonl").write_text("{\n" * 1000)

    ended = subprocess.run(command(file, "workers=2"), capture_output=True, text=True)

    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"error: {tmp_path}/in/b.jsonl, line 1: broken record: not JSON")
