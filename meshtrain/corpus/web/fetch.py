"""Fetching pages: bounds on everything, patience where it helps, and manners.

A page is either there, or refused with a reason: every way in which a fetch can end has a name that is counted.
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
"""RFC 9309, section 2.5: at least so much of a robots.txt must be read."""


class Fetcher:
    """Fetches pages within the bounds of a configuration; a context manager.

    Args:
        config: the bounds.
        concurrent: requests under way at the same time, over all hosts.
    """

    def __init__(self, config: DownloadConfig, concurrent: int) -> None:
        self._config = config
        self._slots = asyncio.Semaphore(concurrent)
        self._turns: defaultdict[str, asyncio.Semaphore] = defaultdict(self._new_turns)
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
        """Fetch a page, again and again while there is hope.

        Raises:
            PageError: why there is none.
        """
        attempt = 0
        while True:
            try:
                return await self._follow(url)
            except RetryablePageError as trouble:
                if attempt == self._config.max_retries:
                    raise
                longest = self._config.longest_wait_seconds
                if trouble.retry_after > longest:
                    raise PageError(ASKED_TO_WAIT, f"{trouble.retry_after:.0f} s ({trouble.detail})") from None
                wait = min(self._config.first_retry_seconds * 2**attempt, longest)
                await asyncio.sleep(max(wait, trouble.retry_after))
                attempt += 1

    async def _follow(self, url: str) -> Page:
        visited = [url]
        while True:
            parts = urlsplit(visited[-1])
            if self._config.respect_robots:
                await self._obey(parts)
            answer = await self._get(parts)
            if isinstance(answer, Page):
                return answer
            try:
                following = urljoin(visited[-1], answer)
                scheme = urlsplit(following).scheme
            except ValueError as error:
                raise PageError(BAD_REDIRECT, f"{answer} ({error})") from None
            if scheme not in ("http", "https"):
                raise PageError(BAD_REDIRECT, following)
            if following in visited:
                raise PageError(REDIRECT_LOOP, following)
            if len(visited) > self._config.max_redirects:
                raise PageError(TOO_MANY_REDIRECTS, f"{len(visited)}, the last one to {following}")
            visited.append(following)

    async def _get(self, parts: SplitResult) -> Page | str:
        """Return the page, or where it has gone."""
        async with self._asked(parts) as response:
            if response.status in REDIRECT_STATUSES and (place := response.headers.get("Location")):
                return place
            if response.status != HTTPStatus.OK:
                raise status_error(response)
            if response.content_type not in self._config.content_types:
                raise PageError(WRONG_TYPE, response.content_type)
            most_bytes = int(self._config.max_megabytes * 1_000_000)
            if (response.content_length or 0) > most_bytes:
                raise PageError(TOO_LARGE, f"{response.content_length:,} bytes")
            body = await _read(response, most_bytes)
            if body is None:
                raise PageError(TOO_LARGE, f"more than {most_bytes:,} bytes")
            return Page(body, response.content_type, response.charset)

    @asynccontextmanager
    async def _asked(self, parts: SplitResult) -> AsyncIterator[aiohttp.ClientResponse]:
        # The host first: who waits for a slow host must not take a slot from the others.
        async with self._turns[parts.netloc], self._slots:
            await self._keep_distance(parts.netloc)
            try:
                async with self._session.get(parts.geturl(), allow_redirects=False) as response:
                    yield response
            except TimeoutError as error:
                raise RetryablePageError(TIME_OUT, str(error) or f"{self._config.total_seconds:g} s") from error
            except aiohttp.InvalidURL as error:
                raise PageError(BAD_REDIRECT, parts.geturl()) from error
            except (aiohttp.ClientError, OSError, ValueError) as error:
                # aiohttp raises a ValueError for header lines that are none.
                raise RetryablePageError(CONNECTION, f"{type(error).__name__}: {error}") from error

    async def _keep_distance(self, host: str) -> None:
        if host not in self._next_visit:
            return
        now = asyncio.get_running_loop().time()
        visit = max(now, self._next_visit[host])
        self._next_visit[host] = visit + self._crawl_delay(host)
        await asyncio.sleep(visit - now)

    def _crawl_delay(self, host: str) -> float:
        delays = (self._robots[place].crawl_delay(self._config.user_agent) for place in _places(host, self._robots))
        return max((delay or 0.0 for delay in delays), default=0.0)

    async def _obey(self, parts: SplitResult) -> None:
        """Check that robots.txt allows a page; it is read once for each host.

        Raises:
            PageError: if it does not, or if it asks for longer waits than we have time for.
            RetryablePageError: if it cannot be read.
        """
        place = f"{parts.scheme}://{parts.netloc}"
        async with self._robots_locks[place]:
            if place not in self._robots:
                self._robots[place] = await self._read_robots(place)
                if self._crawl_delay(parts.netloc):
                    self._next_visit[parts.netloc] = asyncio.get_running_loop().time()
        if not self._robots[place].can_fetch(parts.geturl(), self._config.user_agent):
            raise PageError(ROBOTS, f"{place}/robots.txt does not allow it")
        if (delay := self._crawl_delay(parts.netloc)) > self._config.longest_wait_seconds:
            raise PageError(ASKED_TO_WAIT, f"{delay:g} s between pages ({place}/robots.txt)")

    async def _read_robots(self, place: str) -> Protego:
        """Read a robots.txt as RFC 9309 (section 2.3.1) says: there is none, all is allowed; no answer, nothing is."""
        address = f"{place}/robots.txt"
        for _ in range(self._config.max_redirects + 1):
            async with self._asked(urlsplit(address)) as response:
                if response.status in REDIRECT_STATUSES and (following := response.headers.get("Location")):
                    address = urljoin(address, following)
                    continue
                if response.status in RETRYABLE_STATUSES or response.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                    trouble = status_error(response)
                    raise RetryablePageError(
                        ROBOTS, f"{address}: {trouble.detail}", getattr(trouble, "retry_after", 0.0)
                    )
                if response.status != HTTPStatus.OK:
                    break
                text = await response.content.read(LARGEST_ROBOTS_BYTES)
                return Protego.parse(text.decode("utf-8", "replace"))
        return Protego.parse("")

    def _new_turns(self) -> asyncio.Semaphore:
        return asyncio.Semaphore(self._config.concurrent_per_host)


def _places(host: str, robots: dict[str, Protego]) -> list[str]:
    return [place for place in (f"http://{host}", f"https://{host}") if place in robots]


async def _read(response: aiohttp.ClientResponse, most_bytes: int) -> bytes | None:
    """Read a body that may unpack to any size; None: it is too large."""
    body = bytearray()
    async for chunk in response.content.iter_chunked(CHUNK_BYTES):
        body += chunk
        if len(body) > most_bytes:
            return None
    return bytes(body)
