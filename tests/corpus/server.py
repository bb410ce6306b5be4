"""A local web site with every kind of page."""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

ROBOTS = "User-agent: *\nDisallow: /private\n\nUser-agent: rude\nDisallow: /\n"


def html(text: str) -> str:
    paragraphs = "".join(f"<p>{text} This is sentence {number} of a story that goes on.</p>" for number in range(5))
    return f"<html><head><title>T</title></head><body><nav>Home</nav><article>{paragraphs}</article></body></html>"


class Site:
    """A site that counts its requests, in total and at the same time."""

    def __init__(self) -> None:
        self.port = 0
        self.visits: Counter[str] = Counter()
        self.agents: set[str] = set()
        self.active = 0
        self.most_active = 0
        self.robots: tuple[int, str] = (200, ROBOTS)

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}/{path}"

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path[1:]
        self.visits[path] += 1
        self.agents.add(request.headers["User-Agent"])
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        try:
            return await self._answer(request, path, self.visits[path])
        finally:
            self.active -= 1

    async def _answer(self, request: web.Request, path: str, visit: int) -> web.StreamResponse:
        kind, _, rest = path.partition("/")
        match kind:
            case "robots.txt":
                return web.Response(status=self.robots[0], text=self.robots[1])
            case "page" | "private":
                await asyncio.sleep(0.02)
                return web.Response(text=html(f"Story {rest}."), content_type="text/html")
            case "slow":
                await asyncio.sleep(30)
            case "status":
                return web.Response(status=int(rest))
            case "temporary":
                if visit == 1:
                    return web.Response(status=int(rest), headers={"Retry-After": "0"})
                return web.Response(text=html(f"Story {rest}."), content_type="text/html")
            case "long-wait":
                return web.Response(status=429, headers={"Retry-After": "3600"})
            case "redirect":
                targets = {
                    "loop": "/redirect/loop2",
                    "loop2": "/redirect/loop",
                    "out": "ftp://x/",
                    "nowhere": "http://[::/",
                }
                return web.Response(status=302, headers={"Location": targets.get(rest, f"/{rest}")})
            case "hops":
                raise web.HTTPFound(f"/hops/{int(rest) - 1}" if int(rest) else "/page/hopped")
            case "type":
                return web.Response(body=b"%PDF", content_type="application/pdf")
            case "plain":
                return web.Response(text="Plain text, wie schön.", content_type="text/plain", charset="latin-1")
            case "latin":
                return web.Response(
                    body=html("Wie schön.").encode("latin-1"), headers={"Content-Type": "text/html; charset=latin-1"}
                )
            case "empty":
                return web.Response(text="<html><body></body></html>", content_type="text/html")
            case "broken":
                response = web.StreamResponse(headers={"Content-Type": "text/html", "Content-Length": "5000"})
                await response.prepare(request)
                await response.write(b"<html>")
                assert request.transport is not None
                request.transport.close()
                return response
            case "announced":
                response = web.StreamResponse(headers={"Content-Type": "text/html", "Content-Length": "50000000"})
                await response.prepare(request)
                return response
            case "huge":
                response = web.StreamResponse(headers={"Content-Type": "text/html"})
                if rest == "packed":
                    response.enable_compression(web.ContentCoding.gzip)
                await response.prepare(request)
                for _ in range(200):
                    await response.write(b"<p>" + b"x" * 10_000)
                return response
        return web.Response(status=404)


@contextmanager
def running_site() -> Iterator[Site]:
    """Run the site in a thread."""
    site = Site()
    loop = asyncio.new_event_loop()
    is_up = threading.Event()
    runner = web.ServerRunner(web.Server(site.answer, loop=loop), shutdown_timeout=0.1)

    async def start() -> None:
        await runner.setup()
        server = web.TCPSite(runner, "127.0.0.1", 0)
        await server.start()
        site.port = server._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        is_up.set()

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        pending = asyncio.all_tasks(loop)
        for task in pending:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    is_up.wait(10)
    try:
        yield site
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
