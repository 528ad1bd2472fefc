"""What `--hosts` starts on each host: it says what the host has, starts the workers there, and ends with the launcher.

The launcher's lines come over stdin as JSON: first `Hello`, then `Go`, later {"stop": SIGNAL}, {"gone": TEXT} when another host is lost, and
{"end": true} for an end at once. The end of stdin is the end of the launcher: the workers save and end. What workers print goes through;
this process's own lines on stdout begin with MARK.
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
from stagerun.launch.folder import reports, send, tell_gone
from stagerun.launch.local import Life, Node, live, new_life
from stagerun.launch.worker_count import usual_workers
from stagerun.system import signals
from stagerun.system.host import host_name
from stagerun.system.process import boot_id
from stagerun.system.world import default_threads

MARK = "\x1e"  # ASCII's record separator: nothing that workers print begins with it
# Workers without a monitor would wait for ever for peers on a host that is lost.
_UNWATCHED_S = 3.0


def main() -> None:
    """In the main thread, with which the workers die."""
    from_launcher = os.fdopen(os.dup(0), "rb")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # the workers', too
    hello = _next(from_launcher)
    os.environ.update(_fitting(hello["environment"]))
    _say(
        workers=usual_workers(hello["most"]),
        machine=f"{boot_id()} {host_name()}",
        addresses=_seen_addresses(hello["head"]),
        own=[one.host for one in addresses.interfaces()],
        port=addresses.free_port(),
    )
    go = _next(from_launcher)
    try:
        _run(go, from_launcher)
    except StagerunError as error:
        _say(reports=[[go["node"]["first"], int(error.exit_code), error.render()]], deaths=[], late=False)


def _run(go: dict[str, Any], from_launcher: BinaryIO) -> None:
    node, nproc = Node(**go["node"]), go["nproc"]
    if "GLOO_SOCKET_IFNAME" not in os.environ and (interface := _interface(node.endpoint)):
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    with new_life(go["grace"]) as life:
        with signals.held():
            threading.Thread(target=_listen, args=(from_launcher, life, node, nproc), daemon=True).start()
        threads = go["threads"] or default_threads(nproc)
        deaths = live(life, go["command"], nproc, threads, go["saves"], node)[1]
        _say_end(life, node, nproc, deaths)


def _say_end(life: Life, node: Node, nproc: int, deaths: dict[int, int]) -> None:
    found = reports(life.folder, nproc, node.first)
    _say(reports=[[r.rank, r.code, r.text] for r in found], deaths=list(deaths.items()), late=life.relay.late)


def _listen(from_launcher: BinaryIO, life: Life, node: Node, nproc: int) -> None:
    """Does what the launcher says, in a thread, until its end."""
    for line in from_launcher:
        message = json.loads(line)
        if "stop" in message:
            life.relay.ask(signal.Signals(message["stop"]))
        elif "gone" in message:
            tell_gone(life.folder, message["gone"])
            if not any(life.folder.glob("*.pid")):  # no worker has started: this process waits for the lost host
                _end_at_once(life, node, nproc)
            if not message["watched"]:
                send(life.folder, signal.SIGTERM)
                threading.Timer(_UNWATCHED_S, send, (life.folder, signal.SIGKILL)).start()
        else:
            _end_at_once(life, node, nproc)
    if not any(life.folder.glob("*.pid")):
        _end_at_once(life, node, nproc)
    life.relay.ask(signal.SIGHUP)


def _end_at_once(life: Life, node: Node, nproc: int) -> None:
    """The workers die with this process; some may have saved all by now."""
    _say_end(life, node, nproc, {})
    shutil.rmtree(life.folder, ignore_errors=True)
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


def _seen_addresses(head: str) -> list[str]:
    """By which addresses this host knows the first one. That one itself knows by which one ssh came to it; its name may mean its own
    loopback device there."""
    came = os.environ.get("SSH_CONNECTION", "").split()
    found = [came[2]] if len(came) == 4 else []
    with suppress(OSError, UnicodeError):
        found.append(addresses.resolve(head))
    return found


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


def _interface(endpoint: str) -> str:
    """The network device on the way to where all meet."""
    address = endpoint.rpartition(":")[0]
    if address.startswith("127."):
        return "lo"
    found = addresses.towards(address, addresses.interfaces())
    return found.name if found is not None else ""


if __name__ == "__main__":
    main()
