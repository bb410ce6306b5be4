"""A process that extracts the text of pages: `python -m meshtrain.corpus.web.extraction`.

It reads pages from its standard input and answers on its standard output, and can be killed at any time: a page that
makes the parser hang or crash costs one page. A message is its length, 8 bytes, and so many bytes.
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
    """Answer until the standard input ends."""
    die_with_parent()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # What a library prints must not be taken for an answer.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    send(answers, READY)
    while (charset := receive(sys.stdin.buffer)) is not None:
        body = receive(sys.stdin.buffer)
        assert body is not None
        send(answers, json.dumps(page_text(body, charset.decode() or None)).encode())


def page_text(body: bytes, charset: str | None) -> str | None:
    """Return the text of an HTML page, without what surrounds it; None: there is none.

    Args:
        body: the page.
        charset: as the server says; where it is wrong, the page is looked at.
    """
    text = extract(_decoded(body, charset) or body, include_comments=False)
    # Half a surrogate pair stands for no character; a page can name one by its number.
    return None if text is None else text.encode("utf-8", "replace").decode()


def _decoded(body: bytes, charset: str | None) -> str | None:
    try:
        return body.decode(charset) if charset else None
    except (LookupError, ValueError):
        return None


def send(stream: BinaryIO, message: bytes) -> None:
    """Write one message."""
    stream.write(len(message).to_bytes(LENGTH_BYTES, "big") + message)
    stream.flush()


def receive(stream: BinaryIO) -> bytes | None:
    """Read one message; None: there are no more."""
    length = stream.read(LENGTH_BYTES)
    return stream.read(int.from_bytes(length, "big")) if length else None


if __name__ == "__main__":
    main()
