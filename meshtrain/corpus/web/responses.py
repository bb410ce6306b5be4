"""Responses of a server: a page, or an error that is final or may pass."""

from email.utils import parsedate_to_datetime
from time import time
from typing import NamedTuple

import aiohttp

REDIRECT_STATUSES = (301, 302, 303, 307, 308)
RETRYABLE_STATUSES = (408, 429, 500, 502, 503, 504)
"""Statuses that may change soon, so the page is requested again."""

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
    """A page that a server sent."""

    body: bytes
    content_type: str
    charset: str | None


class PageError(Exception):
    """The page cannot be fetched, and further attempts would not help.

    Args:
        reason: one of the constants above, or a class of statuses such as `HTTP 4xx`.
        detail: what was found.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


class RetryablePageError(PageError):
    """The page cannot be fetched now, but a later attempt may succeed.

    Args:
        reason: as for PageError.
        detail: as for PageError.
        retry_after: the wait that the server asks for, in seconds.
    """

    def __init__(self, reason: str, detail: str, retry_after: float = 0.0) -> None:
        super().__init__(reason, detail)
        self.retry_after = retry_after


def status_error(response: aiohttp.ClientResponse) -> PageError:
    """Return the error for a status other than 200 and the redirects."""
    reason = f"HTTP {response.status // 100}xx"
    detail = f"{response.status} {response.reason or ''}".strip()
    if response.status in RETRYABLE_STATUSES:
        return RetryablePageError(reason, detail, parse_retry_after(response.headers.get("Retry-After")))
    return PageError(reason, detail)


def parse_retry_after(retry_after: str | None) -> float:
    """Return the wait that a Retry-After header asks for, in seconds.

    The header holds a number of seconds or a date. A missing or malformed header counts as 0.
    """
    if retry_after is None:
        return 0.0
    if retry_after.strip().isdecimal():
        return float(retry_after)
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time())
    except ValueError:
        return 0.0
