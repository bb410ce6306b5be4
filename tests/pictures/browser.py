"""A headless browser that shows pages: what it measures in them, and pictures of them."""

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

NAMES = ("chromium", "chromium-browser", "google-chrome")
# A window cannot be narrower than 500 pixels, but a frame in it can.
FRAME = """<!doctype html><meta charset="utf-8"><style>:root{{color-scheme:light dark}}body{{margin:0}}
iframe{{border:0;display:block;width:{width}px;height:{height}px}}</style>
<iframe srcdoc="{page}"></iframe><pre id="found"></pre>
<script>document.querySelector("iframe").onload = ({{target}}) => {{
const page = target.contentDocument, window = target.contentWindow;
document.getElementById("found").textContent = JSON.stringify((() => {{{script}}})()) }}</script>"""

# The width of the page, and the elements outside boxes that are wider than the screen.
OVERFLOW = """
const wider = [...page.querySelectorAll("body *")].filter(part => !part.closest(".box *, svg *"))
  .filter(part => part.getBoundingClientRect().right > window.innerWidth + 0.5);
return [page.documentElement.scrollWidth, wider.map(part => part.outerHTML.slice(0, 200))]"""
# Texts of the visible drawings that are cut off at an edge, or that another text overlaps.
TEXTS = """
const found = [];
for (const svg of page.querySelectorAll("svg[role=img]")) {
  const edge = svg.getBoundingClientRect();
  if (!edge.width) continue;
  const texts = [...svg.querySelectorAll("text")].map(text => [text.textContent, text.getBoundingClientRect()])
    .filter(([text]) => text);
  for (const [text, one] of texts) {
    if (one.left < edge.left - 1 || one.right > edge.right + 1
        || one.top < edge.top - 1 || one.bottom > edge.bottom + 1)
      found.push(["cut", text]);
    for (const [other, two] of texts)
      if (one !== two && one.left < two.right - 1 && two.left < one.right - 1 && one.top < two.bottom - 4
          && two.top < one.bottom - 4) found.push([text, other]);
  }
}
return found"""
# The smallest size of a text in a drawing.
FONT_SIZES = """
return Math.min(...[...page.querySelectorAll("svg text")].filter(text => text.getBoundingClientRect().width)
  .map(text => parseFloat(window.getComputedStyle(text).fontSize) * text.getScreenCTM().a))"""


def measure(page: str, script: str, directory: Path, *, width: int, dark: bool = False) -> Any:
    """Return what a script returns that looks at `page`, the document, in `window`.

    Args:
        page: HTML.
        script: body of a function.
        directory: for files of the browser.
        width: of the viewport, in pixels.
        dark: whether the reader prefers dark pages.
    """
    frame = _write_frame(page, directory, width, height=900, script=script)
    dom = _run(["--dump-dom", frame.as_uri()], directory, width, 900, dark)
    (found,) = re.findall(r'<pre id="found">(.*?)</pre>', dom, flags=re.DOTALL)
    return json.loads(unescape(found))


def screenshot(page: str, directory: Path, *, width: int, dark: bool = False) -> Image.Image:
    """Return a picture of a whole page."""
    height = measure(page, "return page.documentElement.scrollHeight", directory, width=width)
    frame = _write_frame(page, directory, width, height=height, script="return 0")
    file = directory / "page.png"
    _run([f"--screenshot={file}", frame.as_uri()], directory, width, height, dark)
    with Image.open(file) as picture:
        return picture.convert("RGB").crop((0, 0, width, height))


def _write_frame(page: str, directory: Path, width: int, *, height: int, script: str) -> Path:
    frame = directory / "frame.html"
    frame.write_text(FRAME.format(page=escape(page), width=width, height=height, script=script), encoding="utf-8")
    return frame


def _run(arguments: list[str], directory: Path, width: int, height: int, dark: bool) -> str:
    command = [
        browser(),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--force-device-scale-factor=1",
        f"--user-data-dir={directory / 'profile'}",
        f"--window-size={max(500, width)},{height}",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def browser() -> str:
    """Return the path of a browser; without one, the test is skipped."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is on PATH")
    return found
