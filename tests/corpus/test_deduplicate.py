"""Deduplication equals a comparison of all pairs, for any layout of shards and after a kill."""

import gzip
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from meshtrain.config.corpus import DeduplicateConfig
from meshtrain.corpus.duplicates.deduplication import deduplication_passes
from meshtrain.errors import DataError
from tests.corpus.near_duplicates import (
    Documents,
    deduplicate,
    plain_duplicates,
    plain_jaccard,
    read_shards,
    similar_documents,
    write_shards,
)


def documents(*texts: str) -> Documents:
    return [{"text": text, "id": f"{number}"} for number, text in enumerate(texts)]


def duplicates(directory: Path) -> dict[str, tuple[str, float]]:
    """Return the id of the kept document and the similarity, by the id of each removed document."""
    groups = [json.loads(line) for line in (directory / "dropped" / "groups.jsonl").read_text().splitlines()]
    return {removed["id"]: (group["kept"], removed["similarity"]) for group in groups for removed in group["removed"]}


def deduplicated(directory: Path, given: Documents, config: DeduplicateConfig | None = None) -> list[str]:
    """Return the ids of the documents that are kept."""
    write_shards(directory / "source", given, [len(given)])
    deduplicate(directory, config or DeduplicateConfig())
    return [str(document["id"]) for document in read_shards(directory / "target")]


@pytest.mark.parametrize("similarity", [0.4, 0.5, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("ngram", [1, 5])
def test_the_result_equals_that_of_comparing_all_pairs(tmp_path: Path, similarity: float, ngram: int) -> None:
    given = similar_documents(400, seed=int(10 * similarity) + ngram)
    # There are enough small buckets for every similar pair to share one.
    config = DeduplicateConfig(similarity=similarity, ngram=ngram, num_buckets=64, hashes_per_bucket=2)
    kept = deduplicated(tmp_path, given, config)
    expected = plain_duplicates(given, similarity, ngram)
    assert kept == [document["id"] for document in given if document["id"] not in expected]
    assert 20 < len(expected) < 380
    texts = {str(document["id"]): str(document["text"]) for document in given}
    for removed, (kept_id, found) in duplicates(tmp_path).items():
        assert kept_id in kept
        assert found == plain_jaccard(texts[removed], texts[kept_id], ngram) >= similarity


def test_default_settings_miss_at_most_two_percent_and_remove_nothing_wrongly(tmp_path: Path) -> None:
    given = similar_documents(1500, seed=1)
    kept = set(deduplicated(tmp_path, given))
    expected = plain_duplicates(given, 0.7, 5)
    missed = [removed for removed in expected if removed in kept]
    assert len(missed) <= 0.02 * len(expected)
    assert all(similarity >= 0.7 for _, similarity in duplicates(tmp_path).values())


def test_every_document_is_kept_byte_for_byte_or_dropped_with_a_reason(tmp_path: Path) -> None:
    given = similar_documents(300, seed=2)
    write_shards(tmp_path / "source", given, [100, 0, 200])
    deduplicate(tmp_path, DeduplicateConfig(), tasks=2)
    dropped = {document["id"]: document for document in read_shards(tmp_path / "dropped")}
    evidence = tmp_path / "dropped" / "groups.jsonl"
    found = duplicates(tmp_path)
    assert dropped.keys() == found.keys()
    groups = {json.loads(line)["kept"]: number for number, line in enumerate(evidence.read_text().splitlines())}
    for document in given:
        if document["id"] in dropped:
            kept_id, similarity = found[str(document["id"])]
            reason = {
                "reason": "near duplicate",
                "detail": f"of {kept_id}, similarity {similarity:.2f}",
                "similarity": similarity,
                "group": groups[kept_id],
            }
            assert dropped[document["id"]] == document | reason
    for path in sorted((tmp_path / "source").iterdir()):
        lines = gzip.decompress(path.read_bytes()).splitlines(keepends=True)
        kept = b"".join(line for line in lines if json.loads(line)["id"] not in dropped)
        found = tmp_path / "target" / path.name
        assert (gzip.decompress(found.read_bytes()) if kept else b"") == kept
    counts = json.loads((tmp_path / "logs" / "5-remove" / "stats.json").read_text())[0]["stats"]
    totals = {name: counts[name]["total"] for name in ("total", "forwarded", "dropped")}
    assert totals == {"total": 300, "forwarded": 300 - len(dropped), "dropped": len(dropped)}


def test_the_result_does_not_depend_on_tasks_workers_or_shards(tmp_path: Path) -> None:
    given = similar_documents(600, seed=3)
    layouts = [([600], 1, 1), ([100, 0, 1, 299, 200], 3, 1), ([300, 300], 2, 2)]
    results = []
    for number, (sizes, tasks, workers) in enumerate(layouts):
        directory = tmp_path / f"{number}"
        write_shards(directory / "source", given, sizes)
        deduplicate(directory, DeduplicateConfig(), tasks, workers)
        groups = (directory / "dropped" / "groups.jsonl").read_text()
        results.append((read_shards(directory / "target"), read_shards(directory / "dropped"), groups))
    assert len(results[0][1]) > 100
    assert all(result == results[0] for result in results[1:])


def test_a_document_is_kept_if_only_removed_ones_are_similar_to_it(tmp_path: Path) -> None:
    words = [f"word{number}" for number in range(100)]
    first, middle, last = (" ".join(words[begin : begin + 80]) for begin in (0, 10, 20))
    config = DeduplicateConfig(similarity=0.7, num_buckets=64, hashes_per_bucket=2)
    assert plain_jaccard(first, middle, 5) == plain_jaccard(middle, last, 5) > 0.7 > plain_jaccard(first, last, 5)
    assert deduplicated(tmp_path / "in order", documents(first, middle, last), config) == ["0", "2"]
    assert deduplicated(tmp_path / "middle first", documents(middle, first, last), config) == ["0"]
    assert duplicates(tmp_path / "middle first") == {
        "1": ("0", plain_jaccard(first, middle, 5)),
        "2": ("0", plain_jaccard(last, middle, 5)),
    }


@pytest.mark.parametrize("size", [11, 55, 80, 100])
def test_a_similarity_equal_to_the_threshold_makes_a_duplicate(tmp_path: Path, size: int) -> None:
    words = [f"word{number}" for number in range(100)]
    given = documents(" ".join(words), " ".join(words[:size]))
    # In floating point 0.55 * 100 is more than 55.
    config = DeduplicateConfig(similarity=size / 100, ngram=1, num_buckets=512, hashes_per_bucket=1)
    assert deduplicated(tmp_path, given, config) == ["0"]
    assert duplicates(tmp_path) == {"1": ("0", size / 100)}


def test_case_and_punctuation_are_ignored_and_words_are_not(tmp_path: Path) -> None:
    given = documents(
        "Über den Wolken, muß die Freiheit wohl grenzenlos sein",
        "über den wolken muß die freiheit wohl grenzenlos sein!",
        "天地玄黃 宇宙洪荒 日月盈昃 辰宿列張 寒來暑往 秋收冬藏",
        "天地玄黃,宇宙洪荒。日月盈昃,辰宿列張。寒來暑往,秋收冬藏。",
        "天地玄黃 宇宙洪荒 日月盈昃 辰宿列張 寒來暑往 閏餘成歲 律呂調陽",
    )
    assert deduplicated(tmp_path, given) == ["0", "2", "4"]


def test_short_documents_are_compared_in_full_and_empty_ones_are_kept(tmp_path: Path) -> None:
    given = documents("", "one two", "One, two.", "one two three", "...", "", "two one", "one", "one")
    assert deduplicated(tmp_path, given) == ["0", "1", "3", "4", "5", "6", "7"]
    assert duplicates(tmp_path) == {"2": ("1", 1.0), "8": ("7", 1.0)}


def test_thousands_of_copies_take_one_comparison_each(tmp_path: Path) -> None:
    license = [f"clause{number}" for number in range(200)]
    changed = [" ".join([*license[:position], f"year{position}", *license[position:]]) for position in range(200)]
    given = documents(*[" ".join(license)] * 4000, *changed * 5)
    assert deduplicated(tmp_path, given) == ["0"]
    stats = json.loads((tmp_path / "logs" / "3-compare" / "stats.json").read_text())[0]["stats"]
    assert stats["comparisons"]["total"] == len(given) - 1


KILLED = """
import os, signal, sys
from pathlib import Path
from meshtrain.config.corpus import DeduplicateConfig
from tests.corpus.near_duplicates import deduplicate

def die_before(event, arguments):
    if event == "os.rename" and str(arguments[1]).endswith(sys.argv[2]):
        os.killpg(0, signal.SIGKILL)

sys.addaudithook(die_before)
deduplicate(Path(sys.argv[1]), DeduplicateConfig(), tasks=4)
"""


@pytest.mark.parametrize("written", ["sketches/00002.jsonl.gz", "duplicates/00001.bin", "target/00001.jsonl.gz"])
def test_a_killed_deduplication_resumes_to_the_same_result(tmp_path: Path, written: str) -> None:
    given = similar_documents(800, seed=4)
    complete, killed = tmp_path / "complete", tmp_path / "killed"
    for directory in (complete, killed):
        write_shards(directory / "source", given, [200] * 4)
    deduplicate(complete, DeduplicateConfig(), tasks=4)
    command = [sys.executable, "-c", KILLED, str(killed), written]
    done = subprocess.run(command, start_new_session=True, capture_output=True, check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    before = {path: path.stat().st_mtime_ns for path in (killed / "logs").rglob("completions/*")}
    assert before
    deduplicate(killed, DeduplicateConfig(), tasks=4)
    assert all(path.stat().st_mtime_ns == then for path, then in before.items())
    for directory in ("target", "dropped"):
        paths = sorted((complete / directory).glob("*.jsonl*"))
        assert {path.name for path in paths} >= {f"0000{number}.jsonl.gz" for number in range(4)}
        assert all(path.read_bytes() == (killed / directory / path.name).read_bytes() for path in paths)


def error_message(directory: Path) -> str:
    with pytest.raises(DataError) as caught:
        deduplicate(directory, DeduplicateConfig())
    return str(caught.value).replace(str(directory), "")


def test_unreadable_shards_and_lines_are_named(tmp_path: Path) -> None:
    shard = tmp_path / "source" / "00000.jsonl.gz"
    assert (
        error_message(tmp_path)
        == "/source: there are no shards (*.jsonl.gz, *.jsonl.zst, *.jsonl); run the step before this one first"
    )
    write_shards(tmp_path / "source", documents("one", "two"), [2])
    good = gzip.decompress(shard.read_bytes())
    for bad, message in {
        b"{]": "not JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1)); "
        "redo the step that wrote it (--redo)",
        b"[]": "not a JSON object; redo the step that wrote it (--redo)",
        b'{"text": "three"}': 'no text under the key "id"; add one to every document',
        b'{"text": null, "id": "2"}': 'no text under the key "text"; add one to every document',
    }.items():
        shard.write_bytes(gzip.compress(good + bad))
        assert error_message(tmp_path) == f"/source/00000.jsonl.gz, line 3: {message}"
    shard.write_bytes(gzip.compress(good)[:-12])
    assert error_message(tmp_path).startswith(
        "cannot read /source/00000.jsonl.gz: the gzip file is damaged: Compressed file ended before"
    )
    shard.write_bytes(good)
    assert error_message(tmp_path).startswith(
        "cannot read /source/00000.jsonl.gz: the gzip file is damaged: Not a gzipped file"
    )


def test_shards_that_change_after_the_comparison_are_an_error(tmp_path: Path) -> None:
    write_shards(tmp_path / "source", documents("one", "two"), [2])
    directories = [tmp_path / name for name in ("source", "target", "dropped", "work")]
    *comparing, removing = deduplication_passes(*directories, DeduplicateConfig(), 1)
    for shard_pass in comparing:
        shard_pass.pipeline[0](None, 0, 1)
    (tmp_path / "source" / "00000.jsonl.gz").unlink()
    (tmp_path / "source").rmdir()
    write_shards(tmp_path / "source", documents("one", "two", "three"), [3])
    with pytest.raises(DataError, match="holds 3 documents, but held 2 when they were compared; run the step"):
        removing.pipeline[0](None, 0, 1)
    assert not (tmp_path / "target" / "00000.jsonl.gz").exists()
