"""`stagerun view`: the command."""

import getpass
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import click

from stagerun.base.errors import UsageError
from stagerun.command.ending import show, tell
from stagerun.command.options import argument, command, option
from stagerun.command.shared import FASTEST, SLOWEST, Duration, FiniteRange, Overrides
from stagerun.drawing.picture import Unit
from stagerun.system import signals
from stagerun.system.files import writing
from stagerun.tools.view import page
from stagerun.tools.view.looking import Looker, asked

HERE = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class ViewOptions:
    folders: tuple[str, ...] = argument("DIR|OUT...", required=True)
    overrides: Overrides = ()
    x: str = option(
        "--x", "What the x axis counts.", type=click.Choice(("iterations", "epochs", "images")), default="epochs"
    )
    images_per_second: float | None = option(
        "--images-per-second N",
        "Speed of training of the whole job, for the hours.  [default: as the last run or rehearsal here]",
        type=FiniteRange(SLOWEST, FASTEST),
    )
    allocation: float | None = option(
        "--budget TIME", "Where an allocation of 4h, 90m or 2d would end.", type=Duration()
    )
    port: int = option(
        "--port N",
        "Of the server.  [default: any that is free]",
        type=click.IntRange(0, 65535),
        default=0,
        show_default=False,
    )
    host: str = option("--host NAME", "Address that the server is bound to: other machines may reach it.", default=HERE)
    saved: str | None = option(
        "--save FILE", "Write the page as one HTML file, and serve nothing.", type=click.Path(dir_okay=False)
    )


@command()
def view(options: ViewOptions) -> None:
    """Serves a page of a schedule's whole life: its mistakes, its plan, its run, its results. Ctrl-C ends it.

    DIR is a schedule's folder: the page is drawn again whenever a file is saved, and follows the run of it in ./out/NAME. OUT is an
    output folder; several are shown over each other. Only reads, and takes no lock.

    The page is for this machine alone, and for those who know its address, which has a random word in it. To see it from elsewhere,
    type the `ssh -L` line there.
    """
    wanted = asked(
        options.folders,
        overrides=options.overrides,
        images_per_second=options.images_per_second,
        allocation=options.allocation,
    )
    unit = Unit(options.x)
    if options.saved is not None:
        _save(Looker(wanted), unit, options.saved)
        return
    try:
        with signals.held():
            from stagerun.tools.view.app import serve
            from stagerun.tools.view.hub import Hub
    except ModuleNotFoundError as error:
        raise UsageError(
            f"the page needs the package {(error.name or 'starlette').partition('.')[0]}",
            "pip install 'stagerun[view]', or write a file with --save page.html",
        ) from None
    token = secrets.token_urlsafe(16)
    listening = _listen(options.host, options.port)
    port = listening.getsockname()[1]
    _say_where(options.host, port, token)
    serve(lambda: Hub(Looker(wanted), unit), token, listening, options.host)


def _save(looker: Looker, unit: Unit, file: str) -> None:
    looker.look()
    html = page.saved(page.title(looker), page.sections(looker, unit, time.time()), page.details(looker.before))
    with writing(file, "choose another file with --save"):
        Path(file).write_text(html, encoding="utf-8", errors="replace")
    tell(f"written to {file}")


def _listen(host: str, port: int) -> socket.socket:
    """UsageError where that address or port can't be had."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        if port and error.errno is not None and error.errno > 0:
            raise UsageError(
                f"--port {port} can't be had on {host}: {error.strerror}",
                "name another, or leave --port out for one that is free",
            ) from None
        raise UsageError(f"--host {host}: {error.strerror}", "name an address of this machine") from None
    except UnicodeError:
        raise UsageError(f"--host {host} is not a name of a machine", "name an address of this machine") from None


def _say_where(host: str, port: int, token: str) -> None:
    if host not in (HERE, "localhost", "::1"):
        tell(
            f"warning: --host {host}: whoever on the network learns the address sees the page, and it is sent unencrypted"
        )
    everywhere = host in ("0.0.0.0", "::")  # another machine can't connect to that
    name = socket.gethostname() if everywhere else f"[{host}]" if ":" in host else host
    show(f"http://{name}:{port}/{token}/")
    if host == HERE:
        there = f"{_user()}{socket.gethostname()}"
        tell(
            f"from another machine: ssh -N -L {port}:{HERE}:{port} {there}, and the same address there\nCtrl-C ends it"
        )


def _user() -> str:
    """`me@`; '' where the user has no name, as in a container that runs as any number."""
    try:
        return f"{getpass.getuser()}@"
    except (KeyError, OSError):
        return ""
