"""The benchmarks run at a small size that does not measure speed."""

import os
import re
import subprocess
import sys
from itertools import combinations, islice
from pathlib import Path

from meshtrain import planning
from meshtrain.config.optimizer import OPTIMIZERS
from tests.benchmarks.bare import LAYOUTS
from tests.benchmarks.duplicates_corpus import plain_shingles, python_documents, similar_pairs, with_near_duplicates
from tests.benchmarks.tokenizing import installed


def run_benchmark(*arguments: str) -> list[list[str]]:
    # In processes without the checks that the test suite enables, with which DDP crashes (2.13).
    environment = {**os.environ, "TORCH_DISTRIBUTED_DEBUG": "OFF"}
    command = [sys.executable, "-m", *arguments, "--small"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def test_throughput_benchmark_trains_both_sides_in_every_layout() -> None:
    _, *rows = run_benchmark("tests.benchmarks.throughput", "--steps", "1")
    assert [" ".join(row[:2]) for row in rows] == list(LAYOUTS)
    assert all(float(row[-1]) > 0 for row in rows)


def test_throughput_benchmark_compiles_both_sides() -> None:
    options = ("--steps", "1", "--layout", "dp_shard 2", "--compile")
    _, row = run_benchmark("tests.benchmarks.throughput", *options)
    assert row[:2] == ["dp_shard", "2"]
    assert float(row[-1]) > 0


def test_startup_benchmark_starts_both_sides_in_every_layout_of_two_ranks() -> None:
    _, *rows = run_benchmark("tests.benchmarks.startup", "--repeat", "1")
    sides = [(layout, side) for layout in LAYOUTS if layout != "1 rank" for side in ("bare", "meshtrain")]
    assert [(" ".join(row[:-3]), row[-3]) for row in rows] == sides
    assert all(0 < float(before) < float(after) for *_, before, after in rows)


def test_collectives_benchmark_counts_both_rules() -> None:
    _, *rows = run_benchmark("tests.benchmarks.collectives")
    assert [" ".join(row) for row in rows] == ["GPT-2 4 2 + 2 = 4 2 + 2 = 4"]


MACHINE = str(Path(planning.__file__).parent / "machines" / "h100-80gb.toml")


def test_prediction_benchmark_compares_predicted_and_measured_seconds() -> None:
    plans = ["gpt2, tp", "llama, 1F1B"]
    lines = run_benchmark("tests.benchmarks.prediction", "--rounds", "1", "--machine", MACHINE, "--only", *plans)
    *rows, last = [" ".join(row) for row in lines]
    assert [row.partition(" predicted")[0] for row in rows] == ["llama, 1F1B", "gpt2, tp"]
    assert re.fullmatch(r"2 plans: median [\d.]+%, worst [\d.]+%", last)


def test_ranking_benchmark_runs_what_a_search_puts_first() -> None:
    lines = run_benchmark("tests.benchmarks.ranking", "--rounds", "1", "--seconds", "0", "--machine", MACHINE)
    first, *rows, last = [" ".join(row) for row in lines]
    assert re.fullmatch(r"\d+ plans, \d simulated, \d run", first)
    assert all("predicted" in row and "measured" in row for row in rows)
    assert last.startswith("the first one takes +")


def test_tokenizing_benchmark_measures_every_contender() -> None:
    lines = run_benchmark("tests.benchmarks.tokenizing")
    rows = {row[0]: row for row in lines if row and row[0] in installed()}
    assert {"bare", "meshtrain"} <= rows.keys() == set(installed())
    # All contenders write the same number of tokens.
    assert len({row[-1] for row in rows.values()}) == 1
    assert [row[:4] for row in lines[-2:]] == [["peak", "memory", "of", "meshtrain"]] * 2


def test_loading_benchmark_measures_access_and_waits() -> None:
    lines = [" ".join(row) for row in run_benchmark("tests.benchmarks.loading")]
    for begin in (
        "found in one source",
        "found in a mixture of 5",
        "found and read, 2048 tokens each",
        "streams median",
    ):
        assert any(line.startswith(begin) for line in lines), lines


def test_weight_loading_benchmark_measures_time_and_memory() -> None:
    _, tp, shard, *bounds = run_benchmark("tests.benchmarks.loading_weights")
    assert [" ".join(row[:2]) for row in (tp, shard)] == ["meshtrain tp=2", "meshtrain dp_shard=2"]
    assert all(float(number) > 0 for row in (tp, shard) for number in row[2:])
    assert [row[-1] for row in bounds] == ["within", "within"]


def test_checkpoint_benchmark_measures_every_contender() -> None:
    _, *rows, hashing, stall = run_benchmark("tests.benchmarks.checkpoints", "--repeat", "1")
    names = [" ".join(word for word in row if word.isalpha()) for row in rows]
    save, load = (
        ["disk write s", "dcp save s", "save s", "stall s"],
        ["disk read s", "dcp load s", "verify s", "load s"],
    )
    assert names == save + load
    assert (hashing[:2], stall[:2]) == (["hashing", "and"], ["training", "stands"])


def test_deduplication_benchmark_compares_with_the_exact_pairs() -> None:
    *_, header, ours, datatrove, rensa = run_benchmark("tests.benchmarks.deduplication")
    assert header == ["decided/s", "docs/s", "recall", "-0.9", "precision", "removed", "wrong", "missed"]
    assert [row[0] for row in (ours, datatrove, rensa)] == ["meshtrain", "datatrove", "rensa"]
    found = dict(zip(header, ours[1:], strict=True))
    # The recall of so few pairs is not reliable, but no document may be wrongly removed.
    assert (found["precision"], found["wrong"]) == ("1.0000", "0")
    assert int(found["removed"]) > 20


def test_exact_pairs_of_the_deduplication_benchmark_equal_those_of_comparing_all() -> None:
    texts = with_near_duplicates(list(islice(python_documents(), 150)), 100)
    # Copies count as pairs, also many of one document.
    texts += texts[:20] * 3
    sets = [set(plain_shingles(text)) for text in texts]
    pairs = combinations(range(len(texts)), 2)
    found = ((one, other, len(sets[one] & sets[other]) / len(sets[one] | sets[other])) for one, other in pairs)
    expected = [pair for pair in found if pair[2] >= 0.7]
    assert len(expected) > 150
    assert list(zip(*(values.tolist() for values in similar_pairs(texts, 0.7)), strict=True)) == expected


def test_cleaning_benchmark_compares_equal_results() -> None:
    _, ours, ftfy, ratio = run_benchmark("tests.benchmarks.cleaning")
    assert (ours[0], ftfy[0]) == ("meshtrain", "ftfy")
    assert ratio[2:] == ["same", "True"]


def test_head_benchmark_compares_chunks_with_all_logits() -> None:
    header, whole, off, parts = run_benchmark("tests.benchmarks.head", "--repeat", "1", "--chunks", "auto", "256")
    assert header[:4] == ["chunk", "tokens", "peak", "MiB"]
    # The small vocabulary needs no chunks.
    assert [row[0] for row in (whole, off, parts)] == ["0", "auto", "256"]
    assert off[2] == "0"
    assert all(float(number) > 0 for number in (whole[-1], off[-1], parts[-1]))


def test_precision_benchmark_compares_losses_with_bfloat16() -> None:
    (name, _), *rows = run_benchmark("tests.benchmarks.precision")
    assert [name, *(row[0] for row in rows)] == ["llama-bfloat16", "llama-tensorwise", "llama-moments"]
    assert all(abs(float(row[2]) - 1) < 0.01 for row in rows)


def test_documents_benchmark_compares_both_ways() -> None:
    header, row = run_benchmark("tests.benchmarks.documents", "--repeat", "1", "--lengths", "1024")
    assert header[:4] == ["tokens", "documents", "mask", "s"]
    # 190 tokens each.
    assert row[:2] == ["1,024", "5"]
    # Seconds are not compared, but losses are.
    assert float(row[-1]) < 1e-5


def test_optimizers_benchmark_measures_every_optimizer() -> None:
    _, *rows = run_benchmark("tests.benchmarks.optimizers", "--repeat", "1", "--tokens", "512", "--ranks", "2")
    assert [row[1] for row in rows] == list(OPTIMIZERS)
    assert all(float(number) > 0 for row in rows for number in row[2:])


def test_axes_benchmark_compares_both_sides() -> None:
    rows = [" ".join(row) for row in run_benchmark("tests.benchmarks.axes", "--repeat", "1")]
    assert [row.partition(":")[0] for row in rows] == ["context", "experts"]
    assert all(re.search(r" s / .* s = \d\.\d{3} \(", row) for row in rows)


def test_longest_benchmark_finds_longer_sequences_with_more_processes() -> None:
    rows = run_benchmark("tests.benchmarks.longest", "--gib", "0.1", "--cp", "1", "2", "--measure")
    alone, two = (int(row[2].replace(",", "")) for row in rows)
    assert 1.6 * alone < two
    assert all("measured" in row for row in rows)
