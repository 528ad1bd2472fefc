"""The worker's side of its monitor: it starts the monitor, writes signs of life, and ends when the monitor decides so."""

import faulthandler
import ipaddress
import json
import mmap
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagerun.base.errors import ExitCode, PeerError
from stagerun.base.text import listed
from stagerun.launch.judge import LONGEST
from stagerun.launch.monitor import STACK_SIGNAL, Setup, briefly, log_failure
from stagerun.launch.stopping import report
from stagerun.system import signals
from stagerun.system.process import program
from stagerun.system.pulse import SIZE, Limits, Pulse, Section
from stagerun.system.typed import json_line
from stagerun.system.world import World

if TYPE_CHECKING:
    from stagerun.comm import Comm

# Between the message and the end, so that the others hear of it from their monitors, not from a lost peer. Rank 0 stays longer: it sees the
# others go, and saves.
_STAY_S, _STAY_0_S = 0.5, 1.0

_LOOK_S = 0.05
# A rank that lost its peers waits this long for its monitor to name them: a silent host counts after 2 s.
_GONE_S = 2.5


class Monitored:
    """Made in the main thread, before others start. `pulse`: written by the training thread."""

    def __init__(self, world: World, limits: Limits, say: Callable[[str], None]) -> None:
        """Start the monitor. `say` prints to the user without a launcher. PeerError if no process can be started."""
        self._world, self._say = world, say
        self._lock = threading.Lock()
        self._over = False
        self.verdict = ""  # why this job ends, by a monitor
        self._explained = False
        self._gone: list[str] = []  # ranks, by name
        self._log = ""
        try:
            self._start(limits)
        except OSError as error:
            raise PeerError(f"the process that watches this one can't be started: {error.strerror}") from error
        self._thread = threading.Thread(target=self._listen, name="watch", daemon=True)
        self._thread.start()

    def _start(self, limits: Limits) -> None:
        record, stack = _memory(SIZE), _memory(0)
        self.pulse = Pulse(memoryview(mmap.mmap(record, SIZE)), limits=limits)
        self._stack = open(stack, "wb", buffering=0)  # noqa: SIM115 - until `over`
        faulthandler.register(STACK_SIGNAL, self._stack, all_threads=True)
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        setup = Setup(
            rank=self._world.rank,
            size=self._world.size,
            pid=os.getpid(),
            thread=threading.get_ident(),
            limits={section.value: value for section, value in limits.given.items()},
            pulse=record,
            stack=stack,
            link=theirs.fileno(),
        )
        command = [sys.executable, *program("stagerun.launch.monitor"), json.dumps(asdict(setup))]
        fds = (record, stack, theirs.fileno())
        with signals.held():  # the monitor ignores them
            self._process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        theirs.close()
        os.close(record)

    def meet(self, comm: "Comm") -> None:
        """Connect the monitors, at a port of rank 0's host. Collective. PeerError."""
        if comm.size == 1:
            return
        try:
            hub, meeting = None, None
            if comm.rank == 0:
                hub = _hub(self._world)
                meeting = json.dumps([secrets.token_hex(16), hub.getsockname()[1]]).encode()
            token, port = json.loads(comm.broadcast_bytes(meeting))
            if hub is None:
                family, address = _master(port)
                hub = socket.socket(family, socket.SOCK_DGRAM)
                hub.connect(address)
            with hub:
                socket.send_fds(self._link, [json_line({"token": token})], [hub.fileno()])
        except OSError as error:
            raise PeerError(f"the processes that watch the workers can't meet: {error.strerror}") from error

    @property
    def pid(self) -> int:
        """Return the monitor's process number."""
        return self._process.pid

    def log(self, path: Path) -> None:
        """Set the log that gets the run's end."""
        self._log = str(path.absolute())
        self._send(log=self._log)

    def explain(self, error: PeerError) -> None:
        """Add the lost ranks and hosts to the error, once: a collective has an address at most, often of a rank that only lost another. Their
        monitors may report a little later."""
        if self._explained or self.verdict or self._world.size == 1:
            return
        self._explained = True
        end = time.monotonic() + _GONE_S
        while not self._gone and not self.verdict and time.monotonic() < end:
            time.sleep(_LOOK_S)
        if self._gone:
            error.message = f"{listed(self._gone)}: killed, or the host is down; {error.message}"

    def over(self) -> None:
        """Leave the report of its end to the worker. Never returns if the monitor was faster."""
        with self._lock:
            self._over = True
            ended = bool(self.verdict)
        if ended:
            threading.Event().wait()
        self._send(bye=True)
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        faulthandler.unregister(STACK_SIGNAL)  # its only sender has ended
        self._stack.close()
        self._thread.join(1.0)
        self._link.close()

    def _send(self, **message: Any) -> None:
        with suppress(OSError):  # the monitor is gone, which was reported
            self._link.sendall(json_line(message))

    def _listen(self) -> None:
        """Follow the monitor's messages, in a thread: `recv` releases Python's lock."""
        with suppress(OSError):
            while data := self._link.recv(LONGEST):
                match json.loads(data):
                    case {"gone": list(gone)}:
                        self._gone = gone
                    case {"news": str(text)}:
                        self.pulse.news.append(text)
                    case {"end": str(text), "patience": float(patience)}:
                        self._end(text, patience)
        with self._lock:
            if not self._over and self._world.rank == 0:
                self.pulse.news.append("the process that watches this one is gone: hangs are no longer detected")

    def _end(self, text: str, patience: float) -> None:
        with self._lock:
            if self._over:
                return
            self.verdict = text
        self._send(answered=True)
        if not report(self._world.rank, ExitCode.PEER, text):
            self._say(text)
        time.sleep(_STAY_S if self._world.rank else _STAY_0_S)
        end = time.monotonic() + patience
        while time.monotonic() < end and self._saves():
            time.sleep(_LOOK_S)
        if self._log:
            briefly(log_failure, self._log, text)
        os._exit(ExitCode.PEER)

    def _saves(self) -> bool:
        """Return whether a snapshot is in progress, perhaps after the others have gone."""
        written = any(thread.name == "snapshot" for thread in threading.enumerate())
        return written or (self._world.rank == 0 and self.pulse.within is Section.SAVE and not self.pulse.waits)


def _master(port: int) -> tuple[int, tuple[Any, ...]]:
    """Return family and address of that port on rank 0's host, IPv4 if possible. OSError."""
    addresses = socket.getaddrinfo(os.environ["MASTER_ADDR"], port, type=socket.SOCK_DGRAM)
    family, *_, address = min(addresses, key=lambda one: one[0] != socket.AF_INET)
    return family, address


def _hub(world: World) -> socket.socket:
    """Open the socket of rank 0's monitor, at MASTER_ADDR, or at all addresses if the others don't reach that one: Debian maps a host's name
    to 127.0.1.1 on itself. OSError."""
    family, address = _master(0)
    misleads = ipaddress.ip_address(address[0]).is_loopback and world.local_size < world.size
    hub = socket.socket(family, socket.SOCK_DGRAM)
    try:
        hub.bind(("", 0) if misleads else address)
    except OSError:
        hub.bind(("", 0))
    return hub


def _memory(size: int) -> int:
    """Return the descriptor of a nameless file in memory. Its bytes are written now: on a full file system a later access would end the
    process. Pythons built for an old C library (conda's, uv's) lack memfd_create. OSError."""
    if hasattr(os, "memfd_create"):
        memory = os.memfd_create("stagerun")
    else:
        with tempfile.TemporaryFile() as file:
            memory = os.dup(file.fileno())
    os.pwrite(memory, bytes(size), 0)
    return memory


@contextmanager
def monitored(world: World, limits: Limits | None, say: Callable[[str], None]) -> Iterator[Monitored | None]:
    """Run the body with a monitor, which names lost ranks in a PeerError; yield None without `limits`. Afterwards the worker reports its end."""
    if limits is None:
        yield None
        return
    watch = Monitored(world, limits, say)
    try:
        yield watch
    except PeerError as error:
        watch.explain(error)
        raise
    finally:
        watch.over()
