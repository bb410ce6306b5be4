"""Sources: what a run file may name, and the messages for anything else."""

import sysconfig
import tempfile
from pathlib import Path

import pytest

from meshtrain.data.text.sources import PYTHON_STDLIB, find_files, find_python_files
from meshtrain.errors import DataError
from tests.data.corpora import without_privileges


def problems_of(*sources: Path | str) -> tuple[str, ...]:
    with pytest.raises(DataError) as caught:
        find_files([str(source) for source in sources], key="data.train")
    return caught.value.lines


@pytest.fixture
def corpus(tmp_path) -> Path:
    for name in ("b.jsonl", "a.jsonl", "c.jsonl.gz", "sub/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    return tmp_path


def test_files_come_in_the_order_of_the_sources_and_globs_sorted_by_name(corpus):
    files = find_files([f"{corpus}/sub/d.txt", f"{corpus}/*.jsonl*", f"{corpus}/**/*.txt"], key="data.train")

    assert [file.path.name for file in files] == ["d.txt", "a.jsonl", "b.jsonl", "c.jsonl.gz", "d.txt"]
    assert [file.kind for file in files] == ["txt", "jsonl", "jsonl", "jsonl.gz", "txt"]
    assert {file.num_bytes for file in files} == {4}


def test_name_with_brackets_may_be_a_file(tmp_path):
    (tmp_path / "part[1].txt").write_text("text")

    (file,) = find_files([f"{tmp_path}/part[1].txt"], key="data.train")

    assert file.path.name == "part[1].txt"


def test_standard_library_is_read_without_its_tests():
    files = find_files([PYTHON_STDLIB], key="data.train")

    root = Path(sysconfig.get_path("stdlib"))
    names = [file.path.relative_to(root).as_posix() for file in files]
    assert {"argparse.py", "json/decoder.py", "unittest/case.py"} < set(names)
    assert names == [path.relative_to(root).as_posix() for path in sorted(file.path for file in files)]
    assert len(names) > 400
    parts = {part for name in names for part in name.split("/")}
    assert not parts & {"test", "tests", "idle_test", "site-packages", "__pycache__"}
    assert all(file.num_bytes and file.kind == "python" for file in files)


def test_python_without_source_files_is_reported(tmp_path):
    for name in ("test/test_json.py", "site-packages/numpy.py", "json/__pycache__/decoder.py", "os.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    (tmp_path / "json/__init__.py").touch()

    with pytest.raises(DataError) as caught:
        find_python_files(str(tmp_path))

    assert str(caught.value) == (f"python-stdlib: this Python has no .py files in {tmp_path}; name your own files")


def test_a_missing_file_shows_the_nearest_name(corpus):
    assert problems_of(corpus / "aa.jsonl") == (
        f'data.train: "{corpus}/aa.jsonl" does not exist; did you mean "a.jsonl"?',
    )


def test_mistyped_built_in_source_is_corrected(corpus):
    (problem,) = problems_of(corpus / "python-stdlb")

    assert problem.endswith('does not exist; did you mean "python-stdlib"?')


def test_missing_file_shows_the_files_of_its_directory(corpus):
    assert problems_of(corpus / "wiki.txt") == (
        f'data.train: "{corpus}/wiki.txt" does not exist; {corpus} holds a.jsonl, b.jsonl, c.jsonl.gz, sub/',
    )


def test_missing_directory_shows_the_nearest_existing_one(corpus):
    (problem,) = problems_of(corpus / "data/new/wiki.txt")

    assert problem.endswith(
        f"does not exist, nor does its directory; {corpus} holds a.jsonl, b.jsonl, c.jsonl.gz, sub/"
    )


def test_glob_without_a_match_shows_the_files_there(corpus):
    assert problems_of(corpus / "sub/*.jsonl", corpus / "none/*/x.txt") == (
        f'data.train: "{corpus}/sub/*.jsonl" matches no file; {corpus}/sub holds d.txt',
        f'data.train: "{corpus}/none/*/x.txt" matches no file; {corpus} holds a.jsonl, b.jsonl, c.jsonl.gz, sub/',
    )


def test_a_directory_stands_for_the_texts_below_it(corpus):
    for name in ("sub/e.parquet", "sub/.hidden.txt", ".git/f.txt", "sub/dataset_info.json", "README.md", "z.json.gz"):
        (corpus / name).parent.mkdir(exist_ok=True)
        (corpus / name).write_text("text")
    (corpus / "empty.txt").touch()

    files = find_files([str(corpus)], key="data.train")

    names = [file.path.relative_to(corpus).as_posix() for file in files]
    assert names == ["a.jsonl", "b.jsonl", "c.jsonl.gz", "sub/d.txt", "sub/e.parquet", "z.json.gz"]


def test_directory_without_texts_shows_its_files(corpus):
    (corpus / "other").mkdir()
    (corpus / "other/info.json").write_text("{}")

    assert problems_of(corpus / "other") == (
        f'data.train: "{corpus}/other" is a directory without a file of a known kind that holds anything; '
        f"{corpus}/other holds info.json; use one of .jsonl, .jsonl.gz, .jsonl.zst, .json.gz, .json.zst, .txt, "
        ".txt.gz, .txt.zst, .parquet",
    )


def test_an_unknown_kind_shows_the_known_ones(corpus):
    (corpus / "table.csv").write_text("a,b")

    for source in ("table.csv", "t*.csv"):
        assert problems_of(corpus / source) == (
            f'data.train: "{corpus}/table.csv" is not of a known kind; '
            "use one of .jsonl, .jsonl.gz, .jsonl.zst, .json, .json.gz, .json.zst, .txt, .txt.gz, .txt.zst, .parquet, "
            "or the built-in source python-stdlib",
        )


def test_broken_link_is_reported_as_one(corpus):
    (corpus / "sub/link.txt").symlink_to("gone/there.txt")
    message = (
        f'data.train: "{corpus}/sub/link.txt" is a broken link: it points to "gone/there.txt", and there is no such '
        "file; fix the link, or leave it out"
    )
    assert problems_of(corpus, corpus / "sub/link.txt", corpus / "sub/*.txt") == (message,) * 3
    (corpus / "sub/link.txt").unlink()
    (corpus / "sub/link.txt").symlink_to("link.txt")
    (problem,) = problems_of(corpus / "sub")
    assert ' is a broken link: it points to "link.txt", ' in problem


def test_an_empty_file_is_refused_by_name_and_left_out_of_a_glob(corpus):
    (corpus / "empty.jsonl").touch()

    assert problems_of(corpus / "empty.jsonl") == (
        f'data.train: "{corpus}/empty.jsonl" is empty; leave it out, or write documents into it',
    )
    assert len(find_files([f"{corpus}/*.jsonl"], key="data.train")) == 2


def test_a_glob_of_empty_files_is_refused(tmp_path):
    (tmp_path / "a.txt").touch()
    (tmp_path / "b.txt").touch()

    assert problems_of(tmp_path / "*.txt") == (
        f'data.train: "{tmp_path}/*.txt" matches only empty files; the first is {tmp_path}/a.txt',
    )


def test_url_is_refused_without_streaming():
    (problem,) = problems_of("https://somewhere/a.jsonl")
    assert problem.startswith('data.train: "https://somewhere/a.jsonl" is a URL, but only training sources with')


def test_all_wrong_sources_are_reported_at_once(corpus):
    assert len(problems_of("/nowhere/a.txt", corpus / "b.jsonl", corpus / "*.csv", corpus / "sub/x")) == 3


def test_inaccessible_directory_is_reported():
    with without_privileges(), tempfile.TemporaryDirectory() as directory:
        closed = Path(directory, "closed")
        closed.mkdir(mode=0o000)

        assert problems_of(closed / "a.txt") == (
            f'data.train: cannot read "{closed}/a.txt": Permission denied; fix its permissions',
        )


def test_file_without_read_permission_is_reported():
    with without_privileges(), tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "a.txt")
        path.write_text("text")
        path.chmod(0o000)

        assert (
            problems_of(path, Path(directory, "*.txt"))
            == (f'data.train: "{path}" may not be read by this user; fix its permissions or leave it out',) * 2
        )
