"""Fetching of pages within limits, with retries, and according to robots.txt.

The result is a page or an error with a reason. The reasons are counted for the report.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from urllib.parse import SplitResult, urljoin, urlsplit

import aiohttp
from protego import Protego

from meshtrain.config.corpus import DownloadConfig
from meshtrain.console import BYTES_PER_MB
from meshtrain.corpus.web.responses import (
    ASKED_TO_WAIT,
    BAD_REDIRECT,
    CONNECTION,
    REDIRECT_LOOP,
    REDIRECT_STATUSES,
    RETRYABLE_STATUSES,
    ROBOTS,
    TIME_OUT,
    TOO_LARGE,
    TOO_MANY_REDIRECTS,
    WRONG_TYPE,
    Page,
    PageError,
    RetryablePageError,
    status_error,
)

CHUNK_BYTES = 1 << 16
LARGEST_ROBOTS_BYTES = 500 * 1024
"""A crawler must read at least this much of a robots.txt (RFC 9309, section 2.5)."""


class Fetcher:
    """Fetches pages within the limits of a configuration; an asynchronous context manager.

    Args:
        config: the limits.
        concurrent: the number of simultaneous requests, over all hosts.
    """

    def __init__(self, config: DownloadConfig, concurrent: int) -> None:
        self._config = config
        self._slots = asyncio.Semaphore(concurrent)
        self._host_slots: defaultdict[str, asyncio.Semaphore] = defaultdict(self._new_host_slots)
        self._next_visit: dict[str, float] = {}
        self._robots: dict[str, Protego] = {}
        self._robots_locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> "Fetcher":
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self._config.total_seconds, sock_connect=self._config.connect_seconds),
            headers={"User-Agent": self._config.user_agent},
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._session.close()

    async def fetch(self, url: str) -> Page:
        """Fetch a page, and try again after errors that may pass.

        Raises:
            PageError: with the reason why the page cannot be fetched.
        """
        attempt = 0
        while True:
            try:
                return await self._follow_redirects(url)
            except RetryablePageError as error:
                if attempt == self._config.max_retries:
                    raise
                longest = self._config.longest_wait_seconds
                if error.retry_after > longest:
                    raise PageError(ASKED_TO_WAIT, f"{error.retry_after:.0f} s ({error.detail})") from None
                wait = min(self._config.first_retry_seconds * 2**attempt, longest)
                await asyncio.sleep(max(wait, error.retry_after))
                attempt += 1

    async def _follow_redirects(self, url: str) -> Page:
        visited = [url]
        while True:
            parts = urlsplit(visited[-1])
            if self._config.respect_robots:
                await self._check_robots(parts)
            response = await self._get(parts)
            if isinstance(response, Page):
                return response
            try:
                following = urljoin(visited[-1], response)
                scheme = urlsplit(following).scheme
            except ValueError as error:
                raise PageError(BAD_REDIRECT, f"{response} ({error})") from None
            if scheme not in ("http", "https"):
                raise PageError(BAD_REDIRECT, following)
            if following in visited:
                raise PageError(REDIRECT_LOOP, following)
            if len(visited) > self._config.max_redirects:
                raise PageError(TOO_MANY_REDIRECTS, f"{len(visited)}, the last one to {following}")
            visited.append(following)

    async def _get(self, parts: SplitResult) -> Page | str:
        """Return the page, or the target of a redirect."""
        async with self._request(parts) as response:
            if response.status in REDIRECT_STATUSES and (target := response.headers.get("Location")):
                return target
            if response.status != HTTPStatus.OK:
                raise status_error(response)
            if response.content_type not in self._config.content_types:
                raise PageError(WRONG_TYPE, response.content_type)
            most_bytes = int(self._config.max_megabytes * BYTES_PER_MB)
            if (response.content_length or 0) > most_bytes:
                raise PageError(TOO_LARGE, f"{response.content_length:,} bytes")
            body = await _read(response, most_bytes)
            if body is None:
                raise PageError(TOO_LARGE, f"more than {most_bytes:,} bytes")
            return Page(body, response.content_type, response.charset)

    @asynccontextmanager
    async def _request(self, parts: SplitResult) -> AsyncIterator[aiohttp.ClientResponse]:
        # The slot of the host is taken first. A request that waits for a slow host then takes no
        # slot from requests to other hosts.
        async with self._host_slots[parts.netloc], self._slots:
            await self._wait_for_crawl_delay(parts.netloc)
            try:
                async with self._session.get(parts.geturl(), allow_redirects=False) as response:
                    yield response
            except TimeoutError as error:
                raise RetryablePageError(TIME_OUT, str(error) or f"{self._config.total_seconds:g} s") from error
            except aiohttp.InvalidURL as error:
                raise PageError(BAD_REDIRECT, parts.geturl()) from error
            except (aiohttp.ClientError, OSError, ValueError) as error:
                # aiohttp raises a ValueError for malformed header lines.
                raise RetryablePageError(CONNECTION, f"{type(error).__name__}: {error}") from error

    async def _wait_for_crawl_delay(self, host: str) -> None:
        if host not in self._next_visit:
            return
        now = asyncio.get_running_loop().time()
        visit = max(now, self._next_visit[host])
        self._next_visit[host] = visit + self._crawl_delay(host)
        await asyncio.sleep(visit - now)

    def _crawl_delay(self, host: str) -> float:
        """Return the longest delay that a robots.txt of the host asks for, in seconds."""
        origins = [origin for origin in (f"http://{host}", f"https://{host}") if origin in self._robots]
        delays = (self._robots[origin].crawl_delay(self._config.user_agent) for origin in origins)
        return max((delay or 0.0 for delay in delays), default=0.0)

    async def _check_robots(self, parts: SplitResult) -> None:
        """Check that robots.txt allows a page. The file is read once for each origin.

        Raises:
            PageError: if robots.txt forbids the page, or asks for too long waits.
            RetryablePageError: if robots.txt cannot be read.
        """
        origin = f"{parts.scheme}://{parts.netloc}"
        async with self._robots_locks[origin]:
            if origin not in self._robots:
                self._robots[origin] = await self._read_robots(origin)
                if self._crawl_delay(parts.netloc):
                    self._next_visit[parts.netloc] = asyncio.get_running_loop().time()
        if not self._robots[origin].can_fetch(parts.geturl(), self._config.user_agent):
            raise PageError(ROBOTS, f"{origin}/robots.txt does not allow it")
        if (delay := self._crawl_delay(parts.netloc)) > self._config.longest_wait_seconds:
            raise PageError(ASKED_TO_WAIT, f"{delay:g} s between pages ({origin}/robots.txt)")

    async def _read_robots(self, origin: str) -> Protego:
        """Read the robots.txt of an origin.

        If the file does not exist, all pages are allowed. If it cannot be reached, no page is.

        Source: RFC 9309, section 2.3.1.
        """
        address = f"{origin}/robots.txt"
        for _ in range(self._config.max_redirects + 1):
            async with self._request(urlsplit(address)) as response:
                if response.status in REDIRECT_STATUSES and (following := response.headers.get("Location")):
                    address = urljoin(address, following)
                    continue
                if response.status in RETRYABLE_STATUSES or response.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                    error = status_error(response)
                    retry_after = getattr(error, "retry_after", 0.0)
                    raise RetryablePageError(ROBOTS, f"{address}: {error.detail}", retry_after)
                if response.status != HTTPStatus.OK:
                    break
                text = await response.content.read(LARGEST_ROBOTS_BYTES)
                return Protego.parse(text.decode("utf-8", "replace"))
        return Protego.parse("")

    def _new_host_slots(self) -> asyncio.Semaphore:
        return asyncio.Semaphore(self._config.concurrent_per_host)


async def _read(response: aiohttp.ClientResponse, most_bytes: int) -> bytes | None:
    """Return a body, or None if it is too large. A compressed body may unpack to any size."""
    body = bytearray()
    async for chunk in response.content.iter_chunked(CHUNK_BYTES):
        body += chunk
        if len(body) > most_bytes:
            return None
    return bytes(body)
