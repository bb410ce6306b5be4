"""Measure the speed of tokenization, beside others: `python -m tests.benchmarks.tokenizing`.

Python sources of this machine, as JSON lines in two files, become uint16 on the disk with an end
token per document, with two processes each. All contenders run in turn, repeatedly. Each run is a
process of its own, and its time counts from the end of its imports. `bare` is a loop of json.loads
and encode_batch_fast with one process per file: the limit. The memory is the peak of the main
process and of the largest of its children.
"""

import argparse
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from statistics import median

import numpy as np
from tokenizers import Tokenizer

from meshtrain import console
from meshtrain.data.cache import Cache
from meshtrain.data.text.corpus import Corpus
from meshtrain.data.text.sources import find_files
from meshtrain.data.tokens.journal import Job
from meshtrain.data.tokens.tokenizer import find_tokenizer
from meshtrain.data.tokens.tokenizer_training import train_tokenizer
from meshtrain.data.tokens.tokenizing import tokenize

PROCESSES = 2
VOCAB_SIZE = 8192
BATCH_DOCUMENTS = 256
END_ID = 0
MB = 1_000_000


def write_corpus(directory: Path, num_bytes: int) -> None:
    """Write Python sources as JSON lines, in PROCESSES files of about the same size."""
    texts = python_sources()
    for number in range(PROCESSES):
        left = num_bytes // PROCESSES
        with (directory / f"{number}.jsonl").open("w") as stream:
            while left > 0:
                text = next(texts)
                stream.write(json.dumps({"text": text}) + "\n")
                left -= len(text.encode())


def python_sources() -> Iterator[str]:
    """Yield the Python sources of the standard library and of all packages, repeated if need be."""
    paths = {path for name in ("stdlib", "purelib") for path in Path(sysconfig.get_path(name)).rglob("*.py")}
    while True:
        for path in sorted(paths):
            try:
                if text := path.read_text(encoding="utf-8"):
                    yield text
            except (OSError, UnicodeDecodeError):
                continue


def train(directory: Path) -> None:
    """Train the tokenizer that all contenders use."""
    files = tuple(find_files([str(directory / "0.jsonl")], key="data.train"))
    tokenizer = train_tokenizer([Corpus(files, ("",))], VOCAB_SIZE, Cache(directory / "cache"))
    (directory / "tokenizer").mkdir()
    tokenizer.copy(directory / "tokenizer")


def bare(files: list[Path], tokenizer: Path, out: Path) -> None:
    """Encode each file in a process of its own."""
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_bare_file, args=(files[number::PROCESSES], tokenizer, out / f"{number}.bin"))
        for number in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def _bare_file(files: list[Path], tokenizer: Path, out: Path) -> None:
    loaded = Tokenizer.from_file(str(tokenizer))
    with out.open("wb") as stream:
        for file in files:
            with file.open("rb") as lines:
                while batch := [json.loads(line)["text"] for line in islice(lines, BATCH_DOCUMENTS)]:
                    for encoding in loaded.encode_batch_fast(batch, add_special_tokens=False):
                        stream.write(np.array([*encoding.ids, END_ID], np.uint16).tobytes())


def meshtrain(files: list[Path], tokenizer: Path, out: Path) -> None:
    """Tokenize like `meshtrain tokenize` and the start of a training."""
    found = tuple(find_files([str(file) for file in files], key="data.train"))
    corpus = Corpus(found, tuple(map(str, files)))
    job = Job(corpus, find_tokenizer(str(tokenizer), Cache(out / "cache")), "Tokenizing", num_workers=PROCESSES)
    tokenize(out, job=job)


def datasets_map(files: list[Path], tokenizer: Path, out: Path) -> None:
    """Encode with datasets.map, and write what it returns."""
    import datasets

    loaded = Tokenizer.from_file(str(tokenizer))

    def encode(batch: dict) -> dict:
        encodings = loaded.encode_batch_fast(batch["text"], add_special_tokens=False)
        return {"ids": [np.array([*encoding.ids, END_ID], np.uint16) for encoding in encodings]}

    table = datasets.load_dataset("json", data_files=[str(file) for file in files], split="train", cache_dir=str(out))
    encoded = table.map(
        encode, batched=True, batch_size=BATCH_DOCUMENTS, num_proc=PROCESSES, remove_columns=table.column_names
    )
    with (out / "tokens.bin").open("wb") as stream:
        for chunk in encoded.data.column("ids").chunks:
            stream.write(chunk.flatten().to_numpy().astype(np.uint16).tobytes())


def datatrove(files: list[Path], tokenizer: Path, out: Path) -> None:
    """Encode with datatrove's tokenizer, one task per file, and merge what it writes."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer, DocumentTokenizerMerger

    tokens = DocumentTokenizer(
        str(out / "parts"), tokenizer_name_or_path=str(tokenizer), eos_token="<|endoftext|>", shuffle_documents=False
    )
    LocalPipelineExecutor(
        [JsonlReader(str(files[0].parent), glob_pattern="*.jsonl"), tokens],
        tasks=PROCESSES,
        workers=PROCESSES,
        logging_dir=str(out / "logs"),
        skip_completed=False,
        # Fork: the CPU seconds of children of a fork server are not counted.
        start_method="fork",
    ).run()
    merger = DocumentTokenizerMerger(str(out / "parts"), str(out / "merged"), save_filename="tokens", shuffle=False)
    LocalPipelineExecutor([merger], tasks=1, logging_dir=str(out / "merge-logs"), skip_completed=False).run()


CONTENDERS: dict[str, Callable[[list[Path], Path, Path], None]] = {
    "bare": bare,
    "meshtrain": meshtrain,
    "datasets": datasets_map,
    "datatrove": datatrove,
}


def installed() -> list[str]:
    """Return the contenders that are installed."""
    missing = [name for name in ("datasets", "datatrove") if find_spec(name) is None]
    for name in missing:
        console.warning(f"{name} is not installed, and not measured")
    return [name for name in CONTENDERS if name not in missing]


def measure_here(name: str, files: list[Path], tokenizer: Path) -> None:
    """Run a contender in this process, and print the measurements as JSON."""
    if name == "datasets":
        import datasets  # noqa: F401
    if name == "datatrove":
        import datatrove.executor
        import datatrove.pipeline.tokens  # noqa: F401
    with tempfile.TemporaryDirectory(dir=tokenizer.parents[1]) as out:
        spent_before = spent()
        started = time.perf_counter()
        CONTENDERS[name](files, tokenizer, Path(out))
        seconds = time.perf_counter() - started
        cpu_seconds = spent() - spent_before
        tokens = written(name, Path(out))
    peaks = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(
        json.dumps(
            {
                "seconds": seconds,
                "cpu_seconds": cpu_seconds,
                "tokens": tokens,
                "peak_mb": [peak * 1024 / MB for peak in peaks],
            }
        )
    )


def spent() -> float:
    """Return the CPU seconds of this process and its ended children."""
    spent_by = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in spent_by)


def written(name: str, out: Path) -> int:
    """Return the number of tokens that a contender wrote."""
    patterns = {"bare": "*.bin", "meshtrain": "train/tokens.bin", "datasets": "tokens.bin", "datatrove": "merged/*.ds"}
    return sum(path.stat().st_size for path in out.glob(patterns[name])) // 2


def measure(name: str, files: list[Path], tokenizer: Path) -> dict:
    """Run a contender in a process of its own."""
    command = [sys.executable, "-m", "tests.benchmarks.tokenizing", "--run", name, str(tokenizer), *map(str, files)]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure all contenders side by side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=100, help="of text")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, help="else all that are installed")
    parser.add_argument("--small", action="store_true", help="only see that everything runs")
    parser.add_argument("--run", nargs="+", metavar="WORD", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        name, *words = options.run
        if name == "train":
            train(Path(*words))
            return
        tokenizer, *files = words
        measure_here(name, list(map(Path, files)), Path(tokenizer))
        return
    num_bytes = int(3e6 if options.small else options.megabytes * MB)
    with tempfile.TemporaryDirectory() as directory_of_texts:
        write_corpus(Path(directory_of_texts), num_bytes)
        # In a new process: a process starts with the peak memory of its parent.
        subprocess.run(
            [sys.executable, "-m", "tests.benchmarks.tokenizing", "--run", "train", directory_of_texts], check=True
        )
        compare(Path(directory_of_texts), 1 if options.small else options.repeat, options.contenders or installed())


def compare(directory_of_texts: Path, repeat: int, contenders: list[str]) -> None:
    """Print all contenders, and the memory of meshtrain for one and four times the text."""
    files, tokenizer = sorted(directory_of_texts.glob("*.jsonl")), directory_of_texts / "tokenizer" / "tokenizer.json"
    num_bytes = sum(len(json.loads(line)["text"].encode()) for file in files for line in file.open())
    runs: dict[str, list[dict]] = {name: [] for name in contenders}
    for _ in range(repeat):
        for name, found in runs.items():
            found.append(measure(name, files, tokenizer))
    seconds = {name: [run["seconds"] for run in found] for name, found in runs.items()}

    def cpu(name: str) -> float:
        return min(run["cpu_seconds"] for run in runs[name])

    rows = [
        [
            name,
            f"{min(taken):.2f} s",
            f"{median(taken):.2f} s",
            f"{num_bytes / MB / min(taken):.2f} MB/s",
            f"{min(seconds['bare']) / min(taken):.3f}",
            f"{median(a / b for a, b in zip(seconds['bare'], taken, strict=True)):.3f}",
            f"{cpu(name):.2f} s",
            f"{cpu('bare') / cpu(name):.3f}",
            f"{runs[name][0]['tokens']:,}",
        ]
        for name, taken in seconds.items()
    ]
    columns = [
        "contender",
        "least",
        "median",
        "speed",
        "bare / it, least",
        "bare / it, pairs",
        "CPU, least",
        "bare / it, CPU",
        "tokens",
    ]
    console.table(f"{num_bytes / MB:,.1f} MB of text by {PROCESSES} processes, {repeat} times", columns, rows)
    once, four_times = runs["meshtrain"][0], measure("meshtrain", files * 4, tokenizer)
    for times, run in ((1, once), (4, four_times)):
        leader, worker = run["peak_mb"]
        size = f"{times * num_bytes / MB:,.0f} MB"
        console.line(f"peak memory of meshtrain for {size}: leader {leader:,.0f} MB, largest worker {worker:,.0f} MB")


if __name__ == "__main__":
    main()
