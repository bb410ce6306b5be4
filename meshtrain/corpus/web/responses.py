"""What a server may answer, and what it means: a page, none at all, or none yet."""

from email.utils import parsedate_to_datetime
from time import time
from typing import NamedTuple

import aiohttp

REDIRECT_STATUSES = (301, 302, 303, 307, 308)
RETRYABLE_STATUSES = (408, 429, 500, 502, 503, 504)
"""Statuses that may be another one soon."""

TIME_OUT = "time-out"
CONNECTION = "connection"
TOO_LARGE = "too large"
WRONG_TYPE = "wrong type"
ROBOTS = "robots.txt"
REDIRECT_LOOP = "redirect loop"
TOO_MANY_REDIRECTS = "too many redirects"
BAD_REDIRECT = "bad redirect"
ASKED_TO_WAIT = "asked to wait too long"


class Page(NamedTuple):
    """What a server answered."""

    body: bytes
    content_type: str
    charset: str | None


class PageError(Exception):
    """There is no page, and there will be none.

    Args:
        reason: one of the names above, or `HTTP 4xx` and the like.
        detail: what was found.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


class RetryablePageError(PageError):
    """There is no page, but there may be one later.

    Args:
        retry_after: the seconds that the server asks to wait.
    """

    def __init__(self, reason: str, detail: str, retry_after: float = 0.0) -> None:
        super().__init__(reason, detail)
        self.retry_after = retry_after


def status_error(response: aiohttp.ClientResponse) -> PageError:
    """Return what a status says that stands for no page."""
    reason = f"HTTP {response.status // 100}xx"
    detail = f"{response.status} {response.reason or ''}".strip()
    if response.status in RETRYABLE_STATUSES:
        return RetryablePageError(reason, detail, parse_retry_after(response.headers.get("Retry-After")))
    return PageError(reason, detail)


def parse_retry_after(retry_after: str | None) -> float:
    """Return what a Retry-After header asks for: seconds, or a date; one that is neither asks for nothing."""
    if retry_after is None:
        return 0.0
    if retry_after.strip().isdecimal():
        return float(retry_after)
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time())
    except ValueError:
        return 0.0
