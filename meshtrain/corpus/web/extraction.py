"""The process that extracts the text of pages: `python -m meshtrain.corpus.web.extraction`.

It reads pages from its standard input and writes their text to its standard output. It can be
killed at any time, so a page that makes the parser hang or crash costs only this page. A message is
its length in 8 bytes, and then its bytes.
"""

import json
import os
import sys
from typing import BinaryIO

from trafilatura import extract

from meshtrain.runtime.lifetime import die_with_parent

LENGTH_BYTES = 8
READY = b"ready"


def main() -> None:
    """Extract text until the standard input ends."""
    die_with_parent()
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # Whatever a library prints goes to standard error, so that it is not read as a message.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    send(output, READY)
    while (charset := receive(sys.stdin.buffer)) is not None:
        body = receive(sys.stdin.buffer)
        assert body is not None
        send(output, json.dumps(page_text(body, charset.decode() or None)).encode())


def page_text(body: bytes, charset: str | None) -> str | None:
    """Return the main text of an HTML page, or None if it has none.

    Args:
        body: the bytes of the page.
        charset: the character set that the server names. If it is missing or wrong, trafilatura
            detects the character set.
    """
    text = extract(_decode(body, charset) or body, include_comments=False)
    # A page can contain an unpaired surrogate by its number. UTF-8 cannot encode it.
    return None if text is None else text.encode("utf-8", "replace").decode()


def _decode(body: bytes, charset: str | None) -> str | None:
    try:
        return body.decode(charset) if charset else None
    except (LookupError, ValueError):
        return None


def send(stream: BinaryIO, message: bytes) -> None:
    """Write one message."""
    stream.write(len(message).to_bytes(LENGTH_BYTES, "big") + message)
    stream.flush()


def receive(stream: BinaryIO) -> bytes | None:
    """Return the next message, or None if the stream has ended."""
    length = stream.read(LENGTH_BYTES)
    return stream.read(int.from_bytes(length, "big")) if length else None


if __name__ == "__main__":
    main()
