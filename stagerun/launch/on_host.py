"""What `--hosts` starts on each host: it says what the host has, starts the workers there, and ends with the launcher.

The launcher's lines come over stdin as JSON: first what it knows, then the orders, later {"stop": SIGNAL}, {"gone": TEXT} when another host is
lost, and {"end": true} for an end at once. The end of stdin is the end of the launcher: the workers save and end. What workers
print goes through; this process's own lines on stdout begin with MARK.
"""

import json
import os
import shutil
import signal
import socket
import sys
import threading
from contextlib import suppress
from typing import Any, BinaryIO

from stagerun.base.errors import ExitCode, StagerunError
from stagerun.launch import addresses
from stagerun.launch.folder import reports, tell_gone
from stagerun.launch.local import Node, Supervisor, supervised
from stagerun.launch.worker_count import usual_workers
from stagerun.system import signals
from stagerun.system.host import host_name
from stagerun.system.process import boot_id
from stagerun.system.world import default_threads

# How long workers that no monitor watches may take to end once another host is lost: they may hang in what they wait for.
_UNWATCHED_S = 3.0
MARK = "\x1e"  # ASCII's record separator: nothing that workers print begins with it


def main() -> None:
    """In the main thread, with which the workers die."""
    from_launcher = os.fdopen(os.dup(0), "rb")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # the workers', too
    known = _next(from_launcher)
    os.environ.update(_fitting(known["environment"]))
    here = addresses.interfaces()
    # By which addresses this host knows the first one. That one itself knows by which one ssh came to it; its name may mean its own
    # loopback device there.
    seen = os.environ.get("SSH_CONNECTION", "").split()[2:3]
    with suppress(OSError, UnicodeError):
        seen.append(addresses.resolve(known["head"]))
    _say(
        workers=usual_workers(known["most"]),
        machine=f"{boot_id()} {host_name()}",
        addresses=seen,
        own=[one.host for one in here],
        port=addresses.free_port(),
    )
    orders = _next(from_launcher)
    node, nproc = Node(**orders["node"]), orders["nproc"]
    address = node.endpoint.rpartition(":")[0]
    device = addresses.towards(address, here)
    if address.startswith("127.") or device is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", device.name if device is not None else "lo")
    try:
        with supervised(orders["grace"]) as supervisor:
            with signals.held():
                threading.Thread(target=_listen, args=(from_launcher, supervisor, node, nproc), daemon=True).start()
            threads = orders["threads"] or default_threads(nproc)
            deaths = supervisor.run(orders["command"], nproc, threads, orders["saves"], node)[1]
            _say_end(supervisor, node, nproc, deaths)
    except StagerunError as error:
        _say(reports=[[node.first, int(error.exit_code), error.render()]], deaths=[], late=False)


def _fitting(values: dict[str, str]) -> dict[str, str]:
    """The launcher's environment without networks that this host lacks: a login node's `eth0`, say."""
    names = [name for _, name in socket.if_nameindex()]
    fitting = {}
    for key, value in values.items():
        begins = tuple(value.lstrip("=").split(","))
        if not key.endswith("_SOCKET_IFNAME") or value.startswith("^") or any(n.startswith(begins) for n in names):
            fitting[key] = value
        else:
            print(f"{key}={value} is left out: this host has no such interface", file=sys.stderr)
    return fitting


def _say_end(supervisor: Supervisor, node: Node, nproc: int, deaths: dict[int, int]) -> None:
    found = reports(supervisor.folder, nproc, node.first)
    _say(reports=[[r.rank, r.code, r.text] for r in found], deaths=list(deaths.items()), late=supervisor.late)


def _listen(from_launcher: BinaryIO, supervisor: Supervisor, node: Node, nproc: int) -> None:
    """Do what the launcher says, in a thread, until its end."""
    for line in from_launcher:
        message = json.loads(line)
        if "stop" in message:
            supervisor.request(message["stop"])
        elif "gone" in message:
            tell_gone(supervisor.folder, message["gone"])  # for the monitors
            if not message["watched"]:
                supervisor.request(signal.SIGTERM)
                timer = threading.Timer(_UNWATCHED_S, supervisor.kill)
                timer.daemon = True
                timer.start()
        if "end" in message or not any(supervisor.folder.glob("*.pid")):  # or no worker has started
            _end_at_once(supervisor, node, nproc)
    if not any(supervisor.folder.glob("*.pid")):
        _end_at_once(supervisor, node, nproc)
    supervisor.request(signal.SIGHUP)


def _end_at_once(supervisor: Supervisor, node: Node, nproc: int) -> None:
    """The workers die with this process; some may have saved all by now."""
    _say_end(supervisor, node, nproc, {})
    shutil.rmtree(supervisor.folder, ignore_errors=True)
    os._exit(ExitCode.DONE)


def _next(from_launcher: BinaryIO) -> dict[str, Any]:
    line = from_launcher.readline()
    if not line:
        sys.exit(ExitCode.PEER)  # the launcher has ended
    message: dict[str, Any] = json.loads(line)
    return message


def _say(**words: Any) -> None:
    with suppress(OSError):  # the launcher is gone
        sys.stdout.write(f"{MARK}{json.dumps(words)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
