"""The worker's side of being watched: it starts its monitor, shows it its signs of life, and ends when it is asked to."""

import faulthandler
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
from stagerun.launch.folder import folder, report
from stagerun.launch.watch.monitor import Setup
from stagerun.launch.watch.process import STACK_SIGNAL
from stagerun.system import signals
from stagerun.system.host import host_name
from stagerun.system.process import program
from stagerun.system.pulse import SIZE, Limits, Pulse, Section
from stagerun.system.typed import json_line
from stagerun.system.world import World

if TYPE_CHECKING:
    from stagerun.comm import Comm

# Between saying why and the end: the others hear it at the same time, and are to hear it from their monitors, not from a peer
# that is gone. Rank 0 stays longer: it sees the others go, and saves what is trained.
_STAY_S, _STAY_0_S = 0.5, 1.0
_LOG_S = 1.5
# How long a rank that misses others waits for its monitor's word on which.
_GONE_S = 1.5


class Monitored:
    """Made in the main thread, before there are others. `pulse` is what the training thread writes."""

    def __init__(self, world: World, limits: Limits, say: Callable[[str], None]) -> None:
        """`say`: what speaks to the user, where no launcher of ours waits for a report. PeerError if no process can be started."""
        self._rank, self._size, self._say = world.rank, world.size, say
        self._lock = threading.Lock()
        self._over = False
        self.verdict = ""  # why this job ends, once a monitor has said so
        self._explained = False
        self._gone: list[str] = []  # ranks, by name
        self._gone_came = threading.Event()
        self._place: dict[str, Any] = {}  # where rank 0's monitor listens
        try:
            self._start(world, limits)
        except OSError as error:
            raise PeerError(f"the process that watches this one can't be started: {error.strerror}") from error
        self._thread = threading.Thread(target=self._listen, name="watch", daemon=True)
        self._thread.start()

    def _start(self, world: World, limits: Limits) -> None:
        record, stack = _memory(SIZE), _memory(0)
        self.pulse = Pulse(memoryview(mmap.mmap(record, SIZE)), limits=limits)
        self._stack = open(stack, "wb", buffering=0)  # noqa: SIM115 - until `over`
        faulthandler.register(STACK_SIGNAL, self._stack, all_threads=True)
        self._link, theirs = socket.socketpair()
        listener = self._listener(world) if world.rank == 0 and world.size > 1 else None
        setup = Setup(
            rank=world.rank,
            size=world.size,
            pid=os.getpid(),
            thread=threading.get_ident(),
            host=host_name(),
            limits={section.value: value for section, value in limits.given.items()},
            pulse=record,
            stack=stack,
            link=theirs.fileno(),
            listener=listener.fileno() if listener is not None else -1,
            gone=str(shared / "gone") if (shared := folder()) is not None else "",
        )
        fds = [record, stack, theirs.fileno(), *([setup.listener] if listener is not None else [])]
        command = [sys.executable, *program("stagerun.launch.watch.monitor"), json.dumps(asdict(setup))]
        with signals.held():  # it ignores them as soon as it can
            self._process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        theirs.close()
        os.close(record)
        if listener is not None:
            listener.close()

    def _listener(self, world: World) -> socket.socket | None:
        """A socket for the other ranks' monitors, at MASTER_ADDR if that is this host's own address; at all, where the others reach it by one
        that isn't. Debian has a host's own name mean 127.0.1.1 there: no other host reaches that, but the name, there, is the right one."""
        address = os.environ.get("MASTER_ADDR", "")
        family, own = socket.AF_INET, ""
        with suppress(OSError):
            family, *_, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
            own = str(place[0])
        if (own.startswith("127.") or own == "::1") and world.local_size < world.size:
            own = ""
        for bound in dict.fromkeys((own, "")):
            with suppress(OSError):
                found = socket.create_server((bound, 0), family=family, backlog=1024)
                port = found.getsockname()[1]
                self._place = {"port": port, "address": bound or address, "family": int(family)}
                return found
        return None

    def meet(self, comm: "Comm") -> None:
        """Tells the monitors where that of rank 0 is, and what it knows them by. Collective."""
        if comm.size == 1:
            return
        place = {"token": secrets.token_hex(16), "name": host_name(), **self._place}
        if comm.rank == 0:  # before the others know it: they come at once
            self._send({"meet": place})
        place = json.loads(comm.broadcast_bytes(json.dumps(place).encode() if comm.rank == 0 else None))
        if comm.rank == 0 or "port" not in place:
            return  # it can't listen: every monitor looks at its own worker alone
        with suppress(OSError):  # a name that this host doesn't know
            found = socket.getaddrinfo(place["address"], place["port"], family=place["family"], type=socket.SOCK_STREAM)
            self._send({"meet": {**place, "address": list(found[0][-1])}})

    @property
    def pid(self) -> int:
        """The monitor's."""
        return self._process.pid

    def log(self, path: Path) -> None:
        """Where the run's end is to be logged."""
        self._send({"log": str(path.absolute())})

    def explain(self, error: PeerError) -> None:
        """Puts before it which ranks are gone, on which hosts: a collective knows an address at most, and often of a rank that ended only
        since it missed another. Their sockets may show it to the monitors a little later. Once."""
        if self._explained or self.verdict or self._size == 1:
            return
        self._explained = True
        end = time.monotonic() + _GONE_S
        while not self._gone and not self.verdict and (left := end - time.monotonic()) > 0:
            self._gone_came.wait(left)
        if self._gone:
            single = len(self._gone) == 1
            error.message = (
                f"{listed(self._gone)} {'is' if single else 'are'} gone, without a word: the "
                f"{'process was' if single else 'processes were'} killed, or {'its host is' if single else 'their hosts are'} down; "
                f"{error.message}"
            )

    def over(self) -> None:
        """From now on the worker reports its end itself. Doesn't return where the monitor was faster."""
        with self._lock:
            self._over = True
            ended = bool(self.verdict)
        if ended:
            threading.Event().wait()
        self._send({"bye": True})
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
        faulthandler.unregister(STACK_SIGNAL)  # the monitor alone sends it, and has ended, or was killed
        self._stack.close()
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        self._thread.join(1.0)
        self._link.close()

    def _send(self, message: dict[str, Any]) -> None:
        with suppress(OSError):  # the monitor is gone; that was reported
            self._link.sendall(json_line(message))

    def _listen(self) -> None:
        """In a thread that waits in `recv`, which holds no lock of Python's."""
        with suppress(OSError), self._link.makefile("rb") as words:
            for word in words:
                self._heard(json.loads(word))
        with self._lock:
            if not self._over and self._rank == 0:
                self.pulse.news.append("the process that watches this one is gone: a hang is not noticed any more")

    def _heard(self, message: dict[str, Any]) -> None:
        match message:
            case {"gone": list(gone)}:
                self._gone = [str(name) for name in gone]
                (self._gone_came.set if gone else self._gone_came.clear)()
            case {"news": str(text)}:
                self.pulse.news.append(text)
            case {"end": str(text), "patience": float(patience)}:
                self._end(text, patience)

    def _end(self, text: str, patience: float) -> None:
        with self._lock:
            if self._over:
                return
            self.verdict = text
        self._send({"answered": True})
        if not report(self._rank, ExitCode.PEER, text):
            self._say(text)
        time.sleep(_STAY_S if self._rank else _STAY_0_S)
        end = time.monotonic() + patience
        self._wait_while_it_saves(end)
        if self._rank == 0:
            # Its monitor ends the log, as soon as nothing more comes from here. While this process is there, since the end of a job's
            # first process may be that of all others: in a container, or under a scheduler.
            with suppress(OSError):
                self._link.shutdown(socket.SHUT_WR)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_LOG_S)
            self._wait_while_it_saves(end)  # the others may have been slow to go, and it has just learnt of that
        os._exit(ExitCode.PEER)

    def _wait_while_it_saves(self, end: float) -> None:
        while time.monotonic() < end and self._saves():
            time.sleep(0.05)

    def _saves(self) -> bool:
        """Whether a snapshot is under way, of what is trained when the others have gone perhaps."""
        written = any(thread.name == "snapshot" for thread in threading.enumerate())
        return written or (self._rank == 0 and self.pulse.within is Section.SAVE and not self.pulse.waits)


def _memory(size: int) -> int:
    """The descriptor of a file in memory that has no name. OSError. Builds of Python for an old C library lack memfd_create; there it is a
    file, whose bytes are written, since a full file system would end who touches them later on."""
    if hasattr(os, "memfd_create"):
        memory = os.memfd_create("stagerun")
        os.ftruncate(memory, size)
        return memory
    with tempfile.TemporaryFile(buffering=0) as file:
        file.write(bytes(size))
        return os.dup(file.fileno())


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
