"""The page of `stagerun view`, asked without a network, and read by a parser that notes what could run."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from html.parser import HTMLParser
from typing import Any, NamedTuple

from stagerun.drawing.picture import Unit
from stagerun.tools.view.app import hosts_of, make_app
from stagerun.tools.view.hub import Hub
from stagerun.tools.view.looking import Looker, asked

TOKEN = "a-token"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: str


def hub_of(*paths: object, **options: object) -> Hub:
    return Hub(Looker(asked([str(path) for path in paths], **options)), Unit.EPOCHS)


async def ask(
    hub: Hub, path: str, method: str = "GET", host: str = "127.0.0.1:8000", server: str = "127.0.0.1"
) -> Answer:
    """`path`: below the token, or with a `/` of its own. `server`: the address that was connected to."""
    app = make_app(hub, TOKEN, hosts_of("127.0.0.1"))
    whole, _, query = (path if path.startswith("/") else f"/{TOKEN}/{path}").partition("?")
    sent: list[dict[str, Any]] = []
    gone = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if not sent:
            return {"type": "http.request", "body": b"", "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", host.encode())] if host else []
    scope = {
        "type": "http", "method": method, "path": whole, "raw_path": whole.encode(), "query_string": query.encode(), "root_path": "",
        "headers": headers, "scheme": "http", "server": (server, 8000), "client": ("127.0.0.1", 1), "http_version": "1.1",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
    }  # fmt: skip
    await app(scope, receive, send)
    body = b"".join(message.get("body", b"") for message in sent[1:]).decode()
    return Answer(sent[0]["status"], {k.decode(): v.decode() for k, v in sent[0]["headers"]}, body)


def asking(hub: Hub, *paths: str, **how: str) -> list[Answer]:
    """One after the other."""

    async def all_of_them() -> list[Answer]:
        return [await ask(hub, path, **how) for path in paths]

    return asyncio.run(all_of_them())


async def changes(
    hub: Hub, since: str, edit: Callable[[], object], holds: Callable[[dict[str, str]], bool]
) -> dict[str, str]:
    """The sections of the first event after `edit` that hold what is looked for."""
    stream = hub.events(since)
    edited = False

    async def first() -> dict[str, str]:
        nonlocal edited
        async for block in stream:
            if not edited:
                asyncio.get_running_loop().call_later(0.3, edit)  # once someone watches
                edited = True
            for line in block.decode().splitlines():
                if line.startswith("data: ") and holds(found := json.loads(line[6:])):
                    return found  # type: ignore[no-any-return]
        raise AssertionError("the stream has ended")

    wanted: Awaitable[dict[str, str]] = first()
    try:
        return await asyncio.wait_for(wanted, 60)
    finally:
        await stream.aclose()  # type: ignore[attr-defined]


class Markup(HTMLParser):
    """What could run or load something: `risks`. `texts`: all that is shown."""

    LOADING = (
        "script",
        "iframe",
        "object",
        "embed",
        "base",
        "form",
        "img",
        "image",
        "style",
        "foreignobject",
        "animate",
        "set",
    )

    def __init__(self, html: str) -> None:
        super().__init__()
        self.risks: list[str] = []
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag in self.LOADING and dict(attributes) != {"src": "page.js", "defer": None}:
            self.risks.append(tag)
        for name, value in attributes:
            if name.startswith("on") or name == "style" or (value or "").strip().lower().startswith("javascript:"):
                self.risks.append(f"{tag} {name}")
            if name in ("href", "src", "action") and not (value or "").startswith(("#", "page.", "data:,")):
                self.risks.append(f"{tag} {name}={value}")

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).split())
