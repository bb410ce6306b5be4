"""Choose what the quick suite leaves out, from what each test reaches and how long it takes.

    python -m tests.suite.reach FOLDER
    python -m tests.suite.choose FOLDER --minutes 18

The quick suite keeps every line that the full one reaches: tests are taken in the order of new
lines per second until none is missing. Then it takes the quickest of the others until the time is
used up. The rest is written to `full_only.txt`. A test that is new belongs to the quick suite until
the next choice.
"""

import argparse
from pathlib import Path

FULL_ONLY = Path(__file__).with_name("full_only.txt")


def read_full_only() -> frozenset[str]:
    """Return the ids of the tests that only the full suite runs."""
    return frozenset(FULL_ONLY.read_text().splitlines())


def choose(lines: dict[str, set[int]], seconds: dict[str, float], budget: float) -> set[str]:
    """Return the tests of the quick suite.

    Args:
        lines: test -> numbers of the lines that it reaches.
        seconds: test -> its duration.
        budget: seconds that the quick suite may take.
    """
    missing = set[int]().union(*lines.values())
    chosen = set[str]()
    while missing:
        best = max(lines.keys() - chosen, key=lambda test: len(lines[test] & missing) / (seconds[test] + 0.05))
        chosen.add(best)
        missing -= lines[best]
    left = budget - sum(seconds[test] for test in chosen)
    for test in sorted(seconds.keys() - chosen, key=seconds.__getitem__):
        left -= seconds[test]
        if left < 0:
            break
        chosen.add(test)
    return chosen


def main() -> None:
    """Write `full_only.txt`."""
    from tests.suite.mutants import Reached

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, required=True)
    options = parser.parse_args()

    reached = Reached(options.folder)
    quick = choose(reached.lines(), reached.seconds, 60 * options.minutes)
    full_only = sorted(reached.seconds.keys() - quick)
    FULL_ONLY.write_text("".join(f"{test}\n" for test in full_only))
    total = sum(reached.seconds.values())
    print(f"quick: {len(quick)} tests, {sum(reached.seconds[test] for test in quick):.0f} s of {total:.0f} s")


if __name__ == "__main__":
    main()
