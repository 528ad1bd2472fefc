"""What `--hosts` starts on each host: it says what the host has, starts the workers there, and ends with the launcher.

The launcher's lines come over stdin as JSON: first what it knows, then the orders, later {"stop": SIGNAL}, {"gone": TEXT} when another host is
lost, and {"end": true} for an end at once. The end of stdin is the end of the launcher: the workers save and end. What workers
print goes through; this process's own lines on stdout begin with MARK.
"""

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from stagerun.base.errors import ExitCode, StagerunError
from stagerun.launch import addresses
from stagerun.launch.folder import Report, leave
from stagerun.launch.local import Node, Orders, Outcome, Supervisor, supervised
from stagerun.launch.options import usual_workers
from stagerun.system import signals
from stagerun.system.host import host_name
from stagerun.system.process import boot_id
from stagerun.system.typed import json_line

MARK = "\x1e"  # ASCII's record separator: nothing that workers print begins with it


@dataclass(frozen=True, slots=True)
class Hello:
    """What a host says first. `machine` tells it from all others; `addresses`: by which it knows the first host; `own`: its own; `port`: one that
    is free."""

    workers: int
    machine: str
    addresses: tuple[str, ...]
    own: tuple[str, ...]
    port: int


def main() -> None:
    """In the main thread, with which the workers die."""
    messages = map(json.loads, os.fdopen(os.dup(0), "rb"))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # the workers', too
    known = next(messages, None) or sys.exit(ExitCode.PEER)  # the launcher has ended
    names = [name for _, name in socket.if_nameindex()]
    for key, value in known["environment"].items():
        begins = tuple(value.lstrip("=").split(","))
        if key.endswith("_SOCKET_IFNAME") and value[:1] != "^" and not any(n.startswith(begins) for n in names):
            print(f"{key}={value} is left out: this host has no such interface", file=sys.stderr)
        else:
            os.environ[key] = value
    here = addresses.interfaces()
    # By which addresses this host knows the first one. That one itself knows by which one ssh came to it; its name may mean its own
    # loopback device there.
    seen = os.environ.get("SSH_CONNECTION", "").split()[2:3]
    with suppress(OSError, UnicodeError):
        seen.append(addresses.resolve(known["head"]))
    own = tuple(one.host for one in here)
    _say(Hello(usual_workers(known["most"]), f"{boot_id()} {host_name()}", tuple(seen), own, addresses.free_port()))
    told = next(messages, None) or sys.exit(ExitCode.PEER)
    node, orders = Node(**told["node"]), Orders(**told["orders"])
    address = node.endpoint.rpartition(":")[0]
    device = addresses.towards(address, here)
    if address.startswith("127.") or device is not None:
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
        if "stop" in message:
            supervisor.request(message["stop"])
        if "gone" in message:
            leave(supervisor.folder / "gone", message["gone"])  # for the monitors
        if "end" in message:
            supervisor.kill()
    supervisor.request(signal.SIGHUP)


def _say(words: Hello | Outcome) -> None:
    with suppress(OSError):  # the launcher is gone
        sys.stdout.write(f"{MARK}{json_line(words).decode()}")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
