"""`stagerun view`: the command, and the server of its page. It answers GET only, and only those who have the token."""

import contextlib
import getpass
import hashlib
import hmac
import json
import re
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any
from urllib.parse import unquote

import click

from stagerun.base.errors import UsageError
from stagerun.command.ending import show, tell
from stagerun.command.options import argument, command, option
from stagerun.command.shared import Overrides
from stagerun.look import page
from stagerun.look.chart import stylesheet
from stagerun.look.folders import Folders, find_folders
from stagerun.system import signals
from stagerun.system.files import writing

LOOPBACK = "127.0.0.1"
RUNS_S = 2.0  # between two looks at runs
SHARE = 0.008  # of a core, for looks at runs
AGES_S = 60.0  # after which `3 min ago` has to be written again
IDLE_S = 30.0  # after which a connection without a request is closed
KINDS = {".css": "text/css", ".js": "text/javascript", ".json": "application/json"}
LINKS = '<link rel="stylesheet" href="page.css"><script src="page.js" data-live defer></script>'
HEADERS = {
    "content-security-policy": page.POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


@command()
def view(
    folders: tuple[str, ...] = argument("DIR|OUT...", required=True),
    overrides: Overrides = (),
    port: int = option(
        "--port N", "Of the server.  [default: any free one]", type=click.IntRange(0, 65535), default=0,
        show_default=False,
    ),
    host: str = option("--host NAME", "Address of the server: others than the default let other machines reach it.", default=LOOPBACK),
    file: str | None = option(
        "--save FILE", "Write the page as one HTML file instead.", type=click.Path(dir_okay=False)
    ),
) -> None:  # fmt: skip
    """Serves a page of a schedule's whole life: its mistakes, its plan, its run, its results. Ctrl-C ends it.

    DIR is a schedule's folder: the page follows each edit of a file, and the run of it in ./out/NAME. OUT is an output folder; several are
    shown over each other. Only reads, and takes no lock.

    Only this machine can reach the page, and only with its address, which has a random word in it. To see it from elsewhere, type the
    `ssh -L` line on the other machine.
    """
    subject = find_folders(folders, overrides)
    if file is not None:
        subject.read()
        with writing(file, "choose another file with --save"):
            Path(file).write_text(page.saved(subject), encoding="utf-8", errors="replace")
        return tell(f"written to {file}")
    token = secrets.token_urlsafe(16)
    try:
        server = Server(subject, token, host, port)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not the name of a machine"
        hint = "name an address of this machine, and leave --port out for a free one"
        raise UsageError(f"can't listen on --host {host}, --port {port}: {why}", hint) from None
    _print_address(host, server.server_address[1], token)
    with signals.held():  # threads inherit that stop signals are blocked
        threading.Thread(target=server.serve_forever, daemon=True).start()
        signal.sigwait(signals.stop_signals())


def _print_address(host: str, port: int, token: str) -> None:
    if host not in (LOOPBACK, "localhost", "::1"):
        tell(
            f"warning: --host {host}: anyone on the network who learns the address sees the page, and it is sent unencrypted"
        )
    name = f"[{host}]" if ":" in host else host
    if host in ("0.0.0.0", "::"):  # other machines can't connect to that
        name = socket.gethostname()
    show(f"http://{name}:{port}/{token}/")
    if host == LOOPBACK:
        user = ""
        with contextlib.suppress(KeyError, OSError):  # a container's user may have no name
            user = f"{getpass.getuser()}@"
        tell(
            f"from another machine: ssh -N -L {port}:{LOOPBACK}:{port} {user}{socket.gethostname()}, and the same address"
        )
        tell("Ctrl-C ends it")


class Server(ThreadingHTTPServer):
    """The sections of the page are rendered when a page asks and a file has changed. OSError, UnicodeError if the
    address can't be used."""

    daemon_threads = True

    def __init__(self, folders: Folders, token: str, host: str, port: int) -> None:
        self.folders, self.token = folders, token
        self._sections: dict[str, str] = {}
        self._lock, self._looked, self._pause = threading.Lock(), 0.0, 0.0
        self.hosts = {LOOPBACK, "localhost", "::1", host.lower(), socket.gethostname().lower()}
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        super().__init__((host, port), Handler)

    def sections(self) -> dict[str, str]:
        with self._lock:
            waited = time.monotonic() - self._looked
            runs_due = waited >= self._pause and (waited > AGES_S or self.folders.moved())
            if not self._sections or runs_due or self.folders.edited():
                began = time.thread_time()
                try:
                    self.folders.read()
                    self._sections |= page.render(self.folders)
                except Exception as error:
                    traceback.print_exc()
                    self._sections |= page.bug(error)
                self._looked, self._pause = time.monotonic(), max(RUNS_S, (time.thread_time() - began) / SHARE)
            return self._sections

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's looks up the name of the host, which may take long

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):  # a page was closed
            traceback.print_exc()


class Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = IDLE_S

    def do_GET(self) -> None:
        token, _, path = self.path.removeprefix("/").partition("/")
        host = (
            re.sub(r":\d+$", "", self.headers.get("host", "")).strip("[]").lower()
        )  # the port differs behind `ssh -L`
        # A page of another site may point its name here; only the address itself, which was connected to, it can't name.
        if host not in {*self.server.hosts, self.connection.getsockname()[0]}:
            self._answer(400, "this server has another name\n")
        elif not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._answer(404, "not found\n")
        elif self.command != "GET":
            self._answer(405, "only GET is allowed\n")
        elif (text := self._text(path)) is None:
            self._answer(404, "not found\n")
        else:
            self._answer(200, text, KINDS.get(Path(path).suffix, "text/html"))

    do_HEAD = do_POST = do_PUT = do_DELETE = do_OPTIONS = do_PATCH = do_GET

    def _text(self, path: str) -> str | None:
        """Return what is at a path below the token; `sections/VERSION.json`: the version, and the sections unless it is VERSION."""
        folders, (name, _, rest) = self.server.folders, path.partition("/")
        if path == "":
            return page.document(folders, self.server.sections(), LINKS)
        if path == "page.css":
            return stylesheet() + page.file_text(path)
        if path == "page.js":
            return page.file_text(path)
        if name == "sections":
            sections = self.server.sections()
            version = hashlib.sha256(repr(sections).encode(errors="replace")).hexdigest()
            return json.dumps([version, {} if rest == f"{version}.json" else sections])
        planned, stage = folders.planned, unquote(rest)
        if name == "stage" and planned is not None and stage in planned.picture.stages:
            return page.detail(planned, stage)
        return None

    def _answer(self, code: int, text: str, kind: str = "text/plain") -> None:
        self.send_response_only(code)
        for name, value in {"content-type": f"{kind}; charset=utf-8", **HEADERS}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text.encode(errors="replace"))  # a path may have bytes that are not text

    def log_message(self, format: str, *args: object) -> None:
        pass
