"""The command of `--hosts` on each host: it reports what the host has, starts its workers, and ends with the launcher.

The launcher's lines arrive on stdin as JSON: a greeting, the orders, later {"stop": SIGNAL}, and {"end": true} to end at once. When stdin
ends, the launcher has ended: the workers save and end. Their output passes through; this process's lines on stdout begin with MARK.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from stagerun.base.errors import ExitCode, StagerunError
from stagerun.launch.local import Node, Orders, Outcome, Supervisor, supervised
from stagerun.launch.options import usual_workers
from stagerun.launch.start import by_default, free_port, interfaces, towards
from stagerun.launch.stopping import Report
from stagerun.system import signals
from stagerun.system.typed import json_line

MARK = "\x1e"  # ASCII's record separator: nothing that workers print begins with it


@dataclass(frozen=True, slots=True)
class Hello:
    """A host's greeting. `workers`: its default number; `address`: where other hosts reach it, '' if unclear; `port`: a free port."""

    workers: int
    address: str
    port: int


def main() -> None:
    """Run in the main thread: the workers die with it."""
    messages = map(json.loads, os.fdopen(os.dup(0), "rb"))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # the workers', too
    greeting = next(messages, None) or sys.exit(ExitCode.PEER)  # the launcher has ended
    os.environ.update(greeting["environment"])
    here = interfaces()
    # The route to the other host, since this one's name may resolve to its loopback device; else, where only the launcher's ssh resolves
    # the other's name, the address that ssh connected to.
    came_by = os.environ.get("SSH_CONNECTION", "").split()[2:3]
    device = towards(greeting["peer"], here) or (None if came_by else by_default(here))
    address = device.host if device is not None else "".join(came_by)
    _say(Hello(usual_workers(greeting["most"]), address, free_port()))
    start = next(messages, None) or sys.exit(ExitCode.PEER)
    node, orders = Node(**start["node"]), Orders(**start["orders"])
    address = node.endpoint.rpartition(":")[0]
    device = towards(address, here)
    if device is not None or address.startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", device.name if device is not None else "lo")
    try:
        with supervised(orders) as supervisor:
            with signals.held():
                threading.Thread(target=_listen, args=(messages, supervisor), daemon=True).start()
            outcome = supervisor.run(node)
    except StagerunError as error:
        outcome = Outcome([Report(node.first, int(error.exit_code), error.render())], {})
    _say(outcome)


def _listen(messages: Iterator[dict[str, Any]], supervisor: Supervisor) -> None:
    """Follow the launcher's messages, in a thread, until its end."""
    for message in messages:
        match message:
            case {"stop": int(number)}:
                supervisor.request(number)
            case {"end": True}:
                supervisor.kill()
    supervisor.request(signal.SIGHUP)


def _say(words: Hello | Outcome) -> None:
    with suppress(OSError):  # the launcher is gone
        sys.stdout.write(f"{MARK}{json_line(words).decode()}")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
