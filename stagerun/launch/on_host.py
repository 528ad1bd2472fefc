"""What `--hosts` starts on each host: it says what the host has, starts the workers there, and ends with the launcher.

The launcher's lines come over stdin as JSON: first what it knows, then the orders, later {"stop": SIGNAL}, and {"end": true} for an end at
once. The end of stdin is the end of the launcher: the workers save and end. What workers print goes through; this process's own
lines on stdout begin with MARK.
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
from stagerun.launch import addresses
from stagerun.launch.folder import Report
from stagerun.launch.local import Node, Orders, Outcome, Supervisor, supervised
from stagerun.launch.options import usual_workers
from stagerun.system import signals
from stagerun.system.typed import json_line

MARK = "\x1e"  # ASCII's record separator: nothing that workers print begins with it


@dataclass(frozen=True, slots=True)
class Hello:
    """What a host says first. `address`: its own, by which others reach it, '' if it knows none; `port`: one that is free."""

    workers: int
    address: str
    port: int


def main() -> None:
    """In the main thread, with which the workers die."""
    messages = map(json.loads, os.fdopen(os.dup(0), "rb"))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # the workers', too
    known = next(messages, None) or sys.exit(ExitCode.PEER)  # the launcher has ended
    os.environ.update(known["environment"])
    here = addresses.interfaces()
    # The way to another host says more than this one's own name, which may mean its loopback device. Where only the launcher's ssh knows
    # the other's name, the address counts by which ssh came.
    came_by = os.environ.get("SSH_CONNECTION", "").split()[2:3]
    device = addresses.towards(known["peer"], here) or (None if came_by else addresses.by_default(here))
    address = device.host if device is not None else "".join(came_by)
    _say(Hello(usual_workers(known["most"]), address, addresses.free_port()))
    told = next(messages, None) or sys.exit(ExitCode.PEER)
    node, orders = Node(**told["node"]), Orders(**told["orders"])
    address = node.endpoint.rpartition(":")[0]
    device = addresses.towards(address, here)
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
    """Do what the launcher says, in a thread, until its end."""
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
