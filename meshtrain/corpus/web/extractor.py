"""Extraction of text in a process of its own.

The extractor starts the process, sends it one page after another, and replaces it when a page makes
it hang or crash.
"""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

from meshtrain.corpus.web.extraction import LENGTH_BYTES, READY
from meshtrain.corpus.web.responses import Page, PageError
from meshtrain.errors import DataError

START_SECONDS = 120.0
NO_TEXT = "no text"
EXTRACTION_TIME_OUT = "extraction time-out"
EXTRACTION_CRASH = "extraction crash"
EXTRACTION = (sys.executable, "-m", "meshtrain.corpus.web.extraction")


class Extractor:
    """Extracts the text of pages; an asynchronous context manager.

    Args:
        seconds: the longest time that one page may take.
        log: the file for the standard error of the process.
        command: the command that starts the process.
    """

    def __init__(self, seconds: float, log: Path, command: tuple[str, ...] = EXTRACTION) -> None:
        self._seconds = seconds
        self._log = log
        self._command = command
        self._lock = asyncio.Lock()
        self._process: Process | None = None

    async def __aenter__(self) -> "Extractor":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._end()

    async def text_of(self, page: Page) -> str:
        """Return the text of a page.

        Raises:
            PageError: if the page has no text, or the process hung or crashed on it.
            DataError: if the process cannot be started.
        """
        if page.content_type == "text/plain":
            text: str | None = _decode(page)
        else:
            async with self._lock:
                text = await self._extract(page)
        if text is None or not text.strip():
            raise PageError(NO_TEXT, f"{len(page.body):,} bytes of {page.content_type}")
        return text

    async def _extract(self, page: Page) -> str | None:
        process = self._process or await self._start()
        try:
            return json.loads(await asyncio.wait_for(_request(process, page), self._seconds))
        except TimeoutError:
            await self._end()
            raise PageError(EXTRACTION_TIME_OUT, f"{self._seconds:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await self._end()
            raise PageError(EXTRACTION_CRASH, f"exit code {code}, see {self._log}") from None

    async def _start(self) -> Process:
        with self._log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(*self._command, stdin=PIPE, stdout=PIPE, stderr=log)
        self._process = process
        try:
            first = await asyncio.wait_for(_receive(process), START_SECONDS)
        except (asyncio.IncompleteReadError, TimeoutError):
            first = b""
        if first != READY:
            await self._end()
            raise DataError("the process that extracts text does not start", f"see {self._log}")
        return process

    async def _end(self) -> int | None:
        process, self._process = self._process, None
        if process is None:
            return None
        if process.returncode is None:
            try:
                # A crashed process has ended by itself. Its exit code is reported.
                return await asyncio.wait_for(process.wait(), 0.1)
            except TimeoutError:
                process.kill()
        return await process.wait()


async def _request(process: Process, page: Page) -> bytes:
    assert process.stdin is not None
    for message in ((page.charset or "").encode(), page.body):
        process.stdin.write(len(message).to_bytes(LENGTH_BYTES, "big"))
        process.stdin.write(message)
    await process.stdin.drain()
    return await _receive(process)


async def _receive(process: Process) -> bytes:
    assert process.stdout is not None
    length = await process.stdout.readexactly(LENGTH_BYTES)
    return await process.stdout.readexactly(int.from_bytes(length, "big"))


def _decode(page: Page) -> str:
    try:
        text = page.body.decode(page.charset or "utf-8", "replace")
    except (LookupError, ValueError):
        # Some codecs of Python do not decode text (base64) or ignore `replace` (idna, undefined).
        return page.body.decode("utf-8", "replace")
    # A character set can encode an unpaired surrogate by its number. UTF-8 cannot encode it.
    return text.encode("utf-8", "replace").decode()
