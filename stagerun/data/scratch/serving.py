"""Blocks of a copy that go from node to node: who hands them on, and who asks for them.

A connection begins with a line that holds the job's token. Then a line asks, and a line answers, each a JSON object:

    {"of": NAME, "want": [7, 12]}   ->   {"block": 7, "sha256": ..., "bytes": N} and N bytes; or, while none of them is
                                         here, {"moved": N}: so many bytes were copied so far
    {"try": N}                      ->   {"bytes": N} and N bytes of nothing: how fast is the way

Only blocks that were read back from this node's own disk and compared are handed on, with the digest of what was read from the source;
who gets one compares again. The bytes go as they are over the network of the cluster, as gradients do.
"""

import contextlib
import hmac
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from stagerun.data.scratch.layout import BLOCK, DATA, CopyStopped
from stagerun.system.host import open_files
from stagerun.system.lines import Garbled, Message, message_of
from stagerun.system.lines import line as line_of

# A side that has said nothing for so long has gone, or its network.
SILENT_S = 10.0
# Who comes has so long to show the token. While so many have not, the one that has waited longest goes for the next.
HELLO_S, MOST_STRANGERS = 2.0, 32
_LOOK_S = 0.5  # between two looks whether to stop
_LONGEST_HELLO, _LONGEST_LINE, _MOST_CONNECTIONS = 512, 1 << 16, 4096
_MOST_TRIED = 1 << 30
_NOTHING = bytes(1 << 20)


class Lost(Exception):
    """The other side is gone, or is none of this job's."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node's server is to be met."""

    host: str  # its name, for people
    family: int
    address: str
    port: int


@dataclass(slots=True)
class _Shelf:
    """A copy whose blocks are handed on. `file` stays open: the folder gets its last name meanwhile."""

    file: BinaryIO
    size: int
    digests: dict[int, str] = field(default_factory=dict)


class Server:
    """Hands on what is put on its shelves, to any number of connections, until `close`."""

    def __init__(self, family: int, address: str, token: str) -> None:
        """Listens at `address`, '' for all; at all, where the others know this node by an address that isn't its own. OSError."""
        self._token, self._lock = token, threading.Lock()
        self._shelves: dict[str, _Shelf] = {}
        self._open: set[socket.socket] = set()
        self._strangers: dict[socket.socket, None] = {}  # of `_open`, in the order in which they came
        # The worker itself needs descriptors: files, sockets to other ranks. A large job's other nodes need more than the usual 1024.
        self._most = min(_MOST_CONNECTIONS, open_files(4 * _MOST_CONNECTIONS) // 4)
        self.moved = 0  # bytes that were copied or found to be there, whether they are on a shelf yet or not
        self._over = False
        self._listener = socket.socket(socket.AddressFamily(family), socket.SOCK_STREAM)
        try:
            try:
                self._listener.bind((address, 0))
            except OSError:
                self._listener.bind(("", 0))
            self._listener.listen(1024)
        except OSError:
            self._listener.close()
            raise
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._listen, name="hand on", daemon=True)]
        self._threads[0].start()

    def shelve(self, name: str, folder: Path, size: int, digests: Mapping[int, str] | None = None) -> None:
        """From now on blocks of the copy in `folder` may be asked for: those of `digests`, and what is `put`. OSError."""
        fd = os.open(folder / DATA, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        shelf = _Shelf(open(fd, "rb", buffering=0), size, dict(digests or {}))  # noqa: SIM115 - until `close`
        with self._lock:
            before = self._shelves.pop(name, None)
            self._shelves[name] = shelf
        if before is not None:
            before.file.close()

    def put(self, name: str, number: int, digest: str) -> None:
        with self._lock:
            self._shelves[name].digests[number] = digest

    def close(self) -> None:
        with self._lock:
            self._over = True
            connections = [self._listener, *self._open]
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(1.0)
        self._listener.close()
        # A thread that is still in the kernel would read from whichever file got these numbers.
        if not any(thread.is_alive() for thread in self._threads):
            for shelf in self._shelves.values():
                shelf.file.close()

    def _listen(self) -> None:
        while not self._over:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._over:
                    return
                time.sleep(_LOOK_S)  # no more descriptors, say
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), name="hand on", daemon=True)
            with self._lock:
                most = max(1, min(MOST_STRANGERS, self._most // 2))
                if self._strangers and (len(self._strangers) >= most or len(self._open) >= self._most):
                    self._dismiss()
                full = self._over or len(self._open) >= self._most
                if not full:
                    self._open.add(connection)
                    self._strangers[connection] = None
                    self._threads = [t for t in self._threads if t.is_alive()] + [thread]
            if full:
                connection.close()
                continue
            try:
                thread.start()
            except RuntimeError:  # no more threads for this user: who asked reads from the source
                self._threads.remove(thread)
                self._forget(connection)

    def _dismiss(self) -> None:
        """Ends the connection of the stranger that has waited longest; its thread then closes it."""
        first = next(iter(self._strangers))
        del self._strangers[first]
        self._open.discard(first)
        with contextlib.suppress(OSError):
            first.shutdown(socket.SHUT_RDWR)

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.discard(connection)
            self._strangers.pop(connection, None)
        connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            token = _parsed(_first_line(connection)).get("token")
            if not isinstance(token, str) or not hmac.compare_digest(token.encode(), self._token.encode()):
                return
            with self._lock:
                self._strangers.pop(connection, None)
            with connection.makefile("rb") as lines:
                while not self._over:
                    connection.settimeout(None)  # between two blocks the other side may be busy
                    asked = _parsed(lines.readline(_LONGEST_LINE))
                    # Whoever takes nothing for so long has gone: the kernel's room, filled, would keep this thread for ever.
                    connection.settimeout(SILENT_S)
                    self._answer(connection, asked)
        except (OSError, ValueError, Lost):
            pass  # the other side has gone, or talks nonsense
        finally:
            self._forget(connection)

    def _answer(self, connection: socket.socket, asked: Message) -> None:
        match asked:
            case {"try": int(count)} if 0 < count <= _MOST_TRIED:
                _send(connection, {"bytes": count})
                for at in range(0, count, len(_NOTHING)):
                    connection.sendall(_NOTHING[: min(len(_NOTHING), count - at)])
            case {"of": str(name), "want": list(want)}:
                with self._lock:
                    shelf = self._shelves.get(name)
                    here = [n for n in want if isinstance(n, int) and n in shelf.digests] if shelf is not None else []
                    digest = shelf.digests[here[0]] if shelf is not None and here else ""
                if shelf is None or not here:
                    _send(connection, {"moved": self.moved})
                    return
                count = min(BLOCK, shelf.size - here[0] * BLOCK)
                _send(connection, {"block": here[0], "sha256": digest, "bytes": count})
                if connection.sendfile(shelf.file, here[0] * BLOCK, count) != count:
                    raise Lost  # the file is shorter than it was
            case _:
                raise Lost


class Neighbour:
    """Another node's server, asked by one thread. Every method but `close`: Lost; CopyStopped when `stop` says so."""

    def __init__(self, place: Place, token: str, stop: Callable[[], bool]) -> None:
        self.place, self._token, self._stop = place, token, stop
        self._connection: socket.socket | None = None

    def ask(self, name: str, want: Sequence[int]) -> tuple[int, str, int] | int:
        """The number, digest and size of one of the blocks `want`, whose bytes `read` then gives. While the other node has none of
        them: how many bytes it has copied."""
        answer = self._asked({"of": name, "want": list(want)})
        match answer:
            case {"block": int(number), "sha256": str(digest), "bytes": int(count)} if number in want:
                return number, digest, count
            case {"moved": int(moved)}:
                return moved
        raise self._lost()

    def measure(self, seconds: float) -> float:
        """Bytes per second that come from there, over `seconds` at least, in pieces that take none of them long."""
        piece, came, started = memoryview(bytearray(1 << 20)), 0, time.monotonic()
        count = len(piece)
        while (took := time.monotonic() - started) < seconds:
            if self._asked({"try": count}).get("bytes") != count:
                raise self._lost()
            left = count
            while left:
                left -= self.read(piece[: min(len(piece), left)])
            came += count
            if time.monotonic() - started - took < seconds / 8:
                count = min(2 * count, _MOST_TRIED)
        return came / took

    def read(self, piece: memoryview) -> int:
        """Some of the bytes that come next, at least one."""
        connection, heard = self._connected(), time.monotonic()
        while True:
            try:
                count = connection.recv_into(piece)
            except TimeoutError:
                if self._stop():
                    raise CopyStopped from None
                if time.monotonic() > heard + SILENT_S:
                    raise self._lost() from None
                continue
            except OSError:
                raise self._lost() from None
            if count == 0:
                raise self._lost()
            return count

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _lost(self) -> Lost:
        self.close()
        return Lost(self.place.host)

    def _connected(self) -> socket.socket:
        if self._connection is None:
            try:
                self._connection = socket.socket(socket.AddressFamily(self.place.family), socket.SOCK_STREAM)
                self._connection.settimeout(SILENT_S / 2)
                self._connection.connect((self.place.address, self.place.port))
                self._connection.settimeout(_LOOK_S)
                self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                _send(self._connection, {"token": self._token})
            except OSError:
                raise self._lost() from None
        return self._connection

    def _asked(self, question: Message) -> Message:
        connection = self._connected()
        try:
            _send(connection, question)
        except OSError:
            raise self._lost() from None
        line, byte = b"", memoryview(bytearray(1))
        while not line.endswith(b"\n"):  # byte by byte, since what follows the line belongs to the block
            self.read(byte)
            line += byte
            if len(line) > _LONGEST_LINE:
                raise self._lost()
        try:
            return message_of(line)
        except Garbled:
            raise self._lost() from None


def own_place(meeting: str, first: bool) -> tuple[int, str, str]:
    """(family, where to listen, what the others know it by) of this node. `meeting`: the address of the job's `first` node, by which
    all others reach that one. OSError."""
    family, kind, _, _, place = socket.getaddrinfo(meeting, 9, type=socket.SOCK_DGRAM)[0]
    if first:
        # As for the monitors: Debian has a host's own name mean 127.0.1.1 there, which no other host reaches.
        loops = str(place[0]).startswith("127.") or place[0] == "::1"
        return int(family), "" if loops else str(place[0]), meeting
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # sends nothing; the kernel chooses the way
        own = str(probe.getsockname()[0])
    return int(family), own, own


def _send(connection: socket.socket, message: Message) -> None:
    connection.sendall(line_of(message))


def _first_line(connection: socket.socket) -> bytes:
    """The first line of someone who may be anyone: short, and whole within a short time."""
    line, end = b"", time.monotonic() + HELLO_S
    while not line.endswith(b"\n") and len(line) < _LONGEST_HELLO:
        connection.settimeout(max(1e-3, end - time.monotonic()))
        byte = connection.recv(1)
        if not byte:
            raise Lost
        line += byte
    return line


def _parsed(line: bytes) -> Message:
    if not line.endswith(b"\n"):
        raise Lost
    try:
        return message_of(line)
    except Garbled:
        raise Lost from None
