"""The worker's side of being watched: it starts its monitor, shows it its signs of life, and ends when it is asked to."""

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
from stagerun.launch.folder import report
from stagerun.launch.watch.monitor import STACK_SIGNAL, Setup, log_failure
from stagerun.launch.watch.peers import LONGEST
from stagerun.system import signals
from stagerun.system.process import program
from stagerun.system.pulse import SIZE, Limits, Pulse, Section
from stagerun.system.typed import json_line
from stagerun.system.world import World

if TYPE_CHECKING:
    from stagerun.comm import Comm

# Between saying why and the end: the others hear it at the same time, and are to hear it from their monitors, not from a peer
# that is gone. Rank 0 stays longer: it sees the others go, and saves what is trained.
_STAY_S, _STAY_0_S = 0.5, 1.0
_LOG_S = 1.0
_LOOK_S = 0.05
# How long a rank that misses others waits for its monitor's word on which: a host that fell silent is one after 2 s.
_GONE_S = 2.5


class Monitored:
    """Made in the main thread, before there are others. `pulse` is what the training thread writes."""

    def __init__(self, world: World, limits: Limits, say: Callable[[str], None]) -> None:
        """`say`: what speaks to the user, where no launcher of ours waits for a report. PeerError if no process can be started."""
        self._world, self._say = world, say
        self._lock = threading.Lock()
        self._over = False
        self.verdict = ""  # why this job ends, once a monitor has said so
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
        command = [sys.executable, *program("stagerun.launch.watch.monitor"), json.dumps(asdict(setup))]
        fds = (record, stack, theirs.fileno())
        with signals.held():  # it ignores them as soon as it can
            self._process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        theirs.close()
        os.close(record)

    def meet(self, comm: "Comm") -> None:
        """Brings the monitors together, at a port of rank 0's host. Collective. PeerError."""
        if comm.size == 1:
            return
        try:
            own, place = None, None
            if comm.rank == 0:
                own = _hub(self._world)
                place = json.dumps([secrets.token_hex(16), own.getsockname()[1]]).encode()
            token, port = json.loads(comm.broadcast_bytes(place))
            if own is None:
                family, hub = _master(port)
                own = socket.socket(family, socket.SOCK_DGRAM)
                own.connect(hub)
            with own:
                socket.send_fds(self._link, [json_line({"token": token})], [own.fileno()])
        except OSError as error:
            raise PeerError(f"the processes that watch the workers can't meet: {error.strerror}") from error

    @property
    def pid(self) -> int:
        """The monitor's."""
        return self._process.pid

    def log(self, path: Path) -> None:
        """Where the run's end is to be logged."""
        self._log = str(path.absolute())
        self._send(log=self._log)

    def explain(self, error: PeerError) -> None:
        """Puts before it which ranks are gone, on which hosts: a collective knows an address at most, and often of a rank that ended only
        since it missed another. Their monitors may say it a little later. Once."""
        if self._explained or self.verdict or self._world.size == 1:
            return
        self._explained = True
        end = time.monotonic() + _GONE_S
        while not self._gone and not self.verdict and time.monotonic() < end:
            time.sleep(_LOOK_S)
        if self._gone:
            error.message = f"{listed(self._gone)}: gone without a word, killed, or the host is down; {error.message}"

    def over(self) -> None:
        """From now on the worker reports its end itself. Doesn't return where the monitor was faster."""
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
        faulthandler.unregister(STACK_SIGNAL)  # the monitor alone sends it, and has ended, or was killed
        self._stack.close()
        self._thread.join(1.0)
        self._link.close()

    def _send(self, **message: Any) -> None:
        with suppress(OSError):  # the monitor is gone; that was reported
            self._link.sendall(json_line(message))

    def _listen(self) -> None:
        """In a thread that waits in `recv`, which holds no lock of Python's."""
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
                self.pulse.news.append("the process that watches this one is gone: a hang is not noticed any more")

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
        if self._log:  # in a thread: the disk may be what hangs
            logging = threading.Thread(target=log_failure, args=(self._log, text), daemon=True)
            logging.start()
            logging.join(_LOG_S)
        os._exit(ExitCode.PEER)

    def _saves(self) -> bool:
        """Whether a snapshot is under way, of what is trained when the others have gone perhaps."""
        written = any(thread.name == "snapshot" for thread in threading.enumerate())
        return written or (self._world.rank == 0 and self.pulse.within is Section.SAVE and not self.pulse.waits)


def _master(port: int) -> tuple[int, tuple[Any, ...]]:
    """Family and address of that port on rank 0's host. OSError. IPv4 where there is a choice, as everywhere."""
    found = socket.getaddrinfo(os.environ["MASTER_ADDR"], port, type=socket.SOCK_DGRAM)
    family, *_, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    return family, address


def _hub(world: World) -> socket.socket:
    """Where rank 0's monitor hears the others: at MASTER_ADDR, or at all addresses where that isn't one of this host's that others reach.
    Debian has a host's own name mean 127.0.1.1 there. OSError."""
    family, address = _master(0)
    misleads = ipaddress.ip_address(address[0]).is_loopback and world.local_size < world.size
    hub = socket.socket(family, socket.SOCK_DGRAM)
    try:
        hub.bind(("", 0) if misleads else address)
    except OSError:
        hub.bind(("", 0))
    return hub


def _memory(size: int) -> int:
    """The descriptor of a file in memory that has no name. OSError. Builds of Python for an old C library lack memfd_create. Its bytes are
    written, since a full file system would end who touches them later on."""
    if hasattr(os, "memfd_create"):
        memory = os.memfd_create("stagerun")
    else:
        with tempfile.TemporaryFile() as file:
            memory = os.dup(file.fileno())
    os.pwrite(memory, bytes(size), 0)
    return memory


@contextmanager
def monitored(world: World, limits: Limits | None, say: Callable[[str], None]) -> Iterator[Monitored | None]:
    """Within it this worker has a monitor, which says first who is gone where a PeerError follows from it; none without `limits`. After it,
    the worker alone reports its end."""
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
