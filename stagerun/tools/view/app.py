"""The server: the page, its style and script, news of it, a stage. It answers GET alone, to those who know the token."""

import asyncio
import hmac
import ipaddress
import socket
from collections.abc import Callable
from contextlib import nullcontext, suppress

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from stagerun.system import signals
from stagerun.tools.view import page
from stagerun.tools.view.hub import Hub

HEADERS = {
    "content-security-policy": page.POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class Guard:
    """Lets nothing through but GET, by a name that this server is called by (a page elsewhere may have its own name point here), below
    the token."""

    def __init__(self, app: ASGIApp, token: str, hosts: frozenset[str]) -> None:
        self._app, self._token, self._hosts = app, token.encode(), hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: dict) -> None:  # type: ignore[type-arg]
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in HEADERS.items())]
            await send(message)  # type: ignore[arg-type]

        refused = self._refused(scope)
        await (refused or self._app)(scope, receive, with_headers)  # type: ignore[arg-type]

    def _refused(self, scope: Scope) -> Response | None:
        # No one else can make the address itself, which was connected to, point here: it is not a name.
        if host_of(Request(scope).headers.get("host", "")) not in {*self._hosts, scope["server"][0]}:
            return PlainTextResponse("this server has another name\n", 400)
        first = str(scope["path"]).removeprefix("/").partition("/")[0]
        if not hmac.compare_digest(first.encode(errors="replace"), self._token):
            return PlainTextResponse("not found\n", 404)
        if scope["method"] != "GET":
            return PlainTextResponse("GET alone\n", 405, {"allow": "GET"})
        return None


def host_of(header: str) -> str:
    """The name in a Host header, without the port: through `ssh -L` that is another.

    >>> host_of("localhost:8080"), host_of("[::1]:80"), host_of("127.0.0.1")
    ('localhost', '::1', '127.0.0.1')
    """
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()


def hosts_of(host: str) -> frozenset[str]:
    """The names by which a server that is bound to `host` may be called."""
    names = {"127.0.0.1", "localhost", "::1", host.lower()}
    with suppress(ValueError):
        if ipaddress.ip_address(host).is_unspecified:  # all of this machine's addresses
            names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
    return frozenset(names)


def make_app(hub: Hub, token: str, hosts: frozenset[str]) -> ASGIApp:
    async def whole(request: Request) -> Response:
        await hub.look()
        return HTMLResponse(encoded(page.document(page.title(hub.looker), hub.sections, hub.version)))

    async def events(request: Request) -> Response:
        since = request.headers.get("last-event-id") or request.query_params.get("since", "")
        return StreamingResponse(hub.events(since), media_type="text/event-stream")

    async def stage(request: Request) -> Response:
        await hub.seen()
        html = await asyncio.to_thread(hub.detail, request.path_params["name"])
        return PlainTextResponse("no such stage\n", 404) if html is None else HTMLResponse(encoded(html))

    def fixed(content: str, kind: str) -> Callable[[Request], Response]:
        return lambda request: Response(content, media_type=kind)

    below = f"/{token}"
    routes = [
        Route(f"{below}/", whole),
        Route(f"{below}/page.css", fixed(page.stylesheet(), "text/css")),
        Route(f"{below}/page.js", fixed(page.script(), "text/javascript")),
        Route(f"{below}/events", events),
        Route(f"{below}/stage/{{name:path}}", stage),
    ]
    return Guard(Starlette(routes=routes), token, hosts)


def encoded(html: str) -> bytes:
    """A path may hold bytes that are not text."""
    return html.encode(errors="replace")


# -- serving


class Server(uvicorn.Server):
    """uvicorn's, which looks ten times a second whether it should end; this one waits until it is asked to."""

    def __init__(self, config: uvicorn.Config, hub: Hub) -> None:
        super().__init__(config)
        self._hub, self._end = hub, asyncio.Event()

    async def main_loop(self) -> None:
        loop = asyncio.get_running_loop()
        for number in signals.stop_signals():
            loop.add_signal_handler(number, self._end.set)
        await self.on_tick(0)
        await self._end.wait()
        await self._hub.close()

    def capture_signals(self):  # type: ignore[no-untyped-def]
        return nullcontext()  # they are answered above


def serve(hub_of: Callable[[], Hub], token: str, listening: socket.socket, host: str) -> None:
    """Until a signal asks to end."""

    async def main() -> None:
        hub = hub_of()
        config = uvicorn.Config(
            make_app(hub, token, hosts_of(host)),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            http="h11",
            loop="asyncio",
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=1,
        )
        await Server(config, hub).serve(sockets=[listening])

    asyncio.run(main())
