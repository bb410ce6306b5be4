"""Draw docs/pictures/plan-page-*.png and report-*.png: the tops of two pages, in a browser.

Run `python -m docs.generate.pages PLAN REPORT` after the pages have changed. They are made by

    meshtrain plan launch/runs/llama-65b.toml --world-size 16 --gpu h100-80gb --html PLAN
    ./launch/quickstart.sh run_directory=runs/pages
    meshtrain report runs/pages --html REPORT
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.pictures.browser import screenshot

PICTURES = Path(__file__).parents[1] / "pictures"
WIDTH = 1120
HEIGHTS = {"plan-page": 1535, "report": 1350}


def main(plan: str, report: str) -> None:
    """Write a picture of each page for each theme."""
    for (name, height), page in zip(HEIGHTS.items(), (plan, report), strict=True):
        text = Path(page).read_text(encoding="utf-8")
        for theme in ("light", "dark"):
            with TemporaryDirectory() as directory:
                picture = screenshot(text, Path(directory), width=WIDTH, dark=theme == "dark")
            top = picture.crop((0, 0, WIDTH, min(height, picture.height)))
            top.save(PICTURES / f"{name}-{theme}.png", optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
