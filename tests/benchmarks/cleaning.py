"""Measure documents per second of cleaning on one core, beside plain ftfy, with equal results.

python -m tests.benchmarks.cleaning [--documents 4000] [--repeat 3]

The documents are Python sources of this machine. They are mostly ASCII, like most of the English
web, and have some lines that ftfy must examine. Both sides repair the text, identify the language
of the first 2000 characters and count words. They take turns, and the best time of each counts.
"""

import argparse
import time
from itertools import islice

import ftfy
from datatrove.data import Document

from meshtrain.config.corpus import CleanConfig
from meshtrain.corpus.steps import clean
from meshtrain.corpus.steps.clean import fix_text
from tests.benchmarks.duplicates_corpus import python_documents

WORDS = CleanConfig(languages=["en"])


def main() -> None:
    """Run both sides in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=4000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="a few documents, to see that it works")
    arguments = parser.parse_args()
    texts = list(islice(python_documents(), 100 if arguments.small else arguments.documents))
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    print(f"{len(texts)} documents, {megabytes:.1f} MB", flush=True)
    seconds: dict[str, list[float]] = {"meshtrain": [], "ftfy": []}
    results: dict[str, list[tuple[str, str | None]]] = {}
    for _ in range(1 if arguments.small else arguments.repeat):
        for name, fix in (("meshtrain", fix_text), ("ftfy", ftfy.fix_text)):
            taken, results[name] = cleaned(texts, fix)
            seconds[name].append(taken)
    best = {name: min(times) for name, times in seconds.items()}
    for name, taken in best.items():
        print(f"{name} {len(texts) / taken:.0f} documents/s {megabytes / taken:.1f} MB/s")
    print(f"ratio {best['ftfy'] / best['meshtrain']:.2f} same {results['meshtrain'] == results['ftfy']}")


def cleaned(texts: list[str], fix: object) -> tuple[float, list[tuple[str, str | None]]]:
    """Return the seconds and the result of every document."""
    clean.fix_text = fix  # type: ignore[assignment]
    drop_reason = clean.build_filter(WORDS)
    documents = [Document(text=text, id="") for text in texts]
    begin = time.process_time()
    reasons = [drop_reason(document) for document in documents]
    taken = time.process_time() - begin
    return taken, [(document.text, reason) for document, reason in zip(documents, reasons, strict=True)]


if __name__ == "__main__":
    main()
