"""Similar documents, and a plain comparison of all pairs."""

import gzip
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

from datatrove.executor.local import LocalPipelineExecutor

from meshtrain.config.corpus import DeduplicateConfig
from meshtrain.corpus.duplicates.deduplication import deduplication_passes

Documents = list[dict[str, object]]


def write_shards(directory: Path, documents: Sequence[dict[str, object]], sizes: Sequence[int]) -> None:
    """Write documents to shards of given sizes."""
    directory.mkdir(parents=True)
    rest = iter(documents)
    for number, size in enumerate(sizes):
        with gzip.open(directory / f"{number:05d}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(next(rest), ensure_ascii=False) + "\n" for _ in range(size))
    assert next(rest, None) is None


def read_shards(directory: Path) -> Documents:
    """Return the documents of all shards, in order."""
    documents = []
    for path in sorted(directory.glob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            documents += [json.loads(line) for line in file]
    return documents


def deduplicate(directory: Path, config: DeduplicateConfig, tasks: int = 1, workers: int = 1) -> None:
    """Deduplicate `directory / "source"` into `target` and `dropped` beside it."""
    directories = [directory / name for name in ("source", "target", "dropped", "work")]
    for number, shard_pass in enumerate(deduplication_passes(*directories, config, tasks)):
        logs = str(directory / "logs" / f"{number}-{shard_pass.name}")
        LocalPipelineExecutor(list(shard_pass.pipeline), shard_pass.tasks, min(workers, shard_pass.tasks), logs).run()


def similar_documents(number: int, seed: int) -> Documents:
    """Return documents of 3 to 120 words: originals, and copies with some changed words."""
    source = random.Random(seed)
    vocabulary = [f"word{number}" for number in range(400)] + ["Grüße", "ΝΑΙ", "naïve", "天地"]
    texts = [source.choices(vocabulary, k=source.randint(3, 120)) for _ in range(number // 3)]
    while len(texts) < number:
        words = list(source.choice(texts))
        for _ in range(source.choice((0, 1, 1, 2, 3, 5))):
            position = source.randrange(len(words))
            words[position : position + source.randint(0, 1)] = source.choices(vocabulary, k=source.randint(0, 2))
        texts.append(words or ["nothing"])
    source.shuffle(texts)
    return [{"text": " ".join(words), "id": f"{number}", "url": "ä"} for number, words in enumerate(texts)]


def plain_words(text: str) -> list[str]:
    """Return the words of a text."""
    return re.findall(r"\w+", text.lower())


def plain_shingles(text: str, ngram: int) -> set[tuple[str, ...]]:
    """Return the runs of n words, or all words if there are fewer."""
    words = plain_words(text)
    num_runs = max(1, len(words) - ngram + 1) if words else 0
    return {tuple(words[start : start + ngram]) for start in range(num_runs)}


def plain_jaccard(first: str, second: str, ngram: int) -> float:
    """Return the similarity of two texts."""
    return _jaccard(plain_shingles(first, ngram), plain_shingles(second, ngram))


def plain_duplicates(documents: Documents, similarity: float, ngram: int) -> set[object]:
    """Return the ids of the documents that are similar to an earlier kept one."""
    kept: list[set[tuple[str, ...]]] = []
    removed = set()
    for document in documents:
        shingles = plain_shingles(str(document["text"]), ngram)
        if any(_jaccard(shingles, other) >= similarity for other in kept):
            removed.add(document["id"])
        else:
            kept.append(shingles)
    return removed


def _jaccard(first: set[tuple[str, ...]], second: set[tuple[str, ...]]) -> float:
    return len(first & second) / max(1, len(first | second))
