"""The launcher's side: an agent on each of several hosts, over ssh, and what they say. No torch.

A host is gone when its connection has ended, or nothing was heard of it for SILENCE_S. That is told once, as a message of the kind
`lost`; its connection is closed then.
"""

import os
import selectors
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

from stagerun.launch.hostfile import Host
from stagerun.launch.ssh import Way, passed_on
from stagerun.launch.wire import ALIVE_S, SILENCE_S, Garbled, Reader, line

# From ssh's start until the agent's first word, and for as long as it starts: an interpreter and torch, perhaps from a busy file server.
START_S = 90.0
# A pause so long between two looks, and this process was stopped itself (Ctrl-Z).
_ASLEEP_S = 5.0
_READ_BYTES = 1 << 16
_SAID_LINES = 20
_END_S = 2.0
_LEAVING_S = 0.02  # between two pieces of what doesn't leave at once
_NO_NEWS = ("alive", "out", "err")


@dataclass(frozen=True, slots=True)
class Message:
    """What an agent says; `kind` `lost`: why it doesn't any more."""

    host: str
    kind: str
    words: dict[str, Any]


Show = Callable[[str, str, str], None]
Each = Mapping[str, Mapping[str, Any]]
NOBODY: Each = {}


class _Line:
    """The connection to one host."""

    def __init__(self, host: Host, way: Way, now: float) -> None:
        self.host, self._way = host, way
        self.process = subprocess.Popen(
            way.agent(host), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the launcher
        )  # fmt: skip
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            os.set_blocking(stream.fileno(), False)  # type: ignore[union-attr]
        self.reader = Reader()
        self.leaving = b""
        self.said: deque[str] = deque(maxlen=_SAID_LINES)
        self.began, self.heard = now, 0.0  # heard: of its agent
        self.open = True
        self.starting = True  # it may be importing what takes long, and says nothing meanwhile

    def send(self, data: bytes) -> None:
        self.leaving += data
        with suppress(OSError):  # full, or gone: reading tells of that
            self.leaving = self.leaving[os.write(self.process.stdin.fileno(), self.leaving) :]  # type: ignore[union-attr]

    def silent(self, now: float) -> bool:
        since, limit = self.heard or self.began, START_S if self.starting else SILENCE_S
        return now > since + limit

    def why(self, silent: bool) -> tuple[str, str]:
        if self.heard:
            limit = START_S if self.starting else SILENCE_S
            how = f"was not heard of for {limit:.0f} s" if silent else "is gone: its connection ended"
            return f"{self.host.name} {how}", ""
        return self._way.why(self.host, self.process.poll(), list(self.said))


class Remote:
    """A context in which agents run on `hosts`; at its end none of them does, nor does a worker of theirs."""

    def __init__(self, hosts: Sequence[Host], way: Way, show: Show) -> None:
        """`show`: gets what is printed on a host, and on which stream (out, err)."""
        self.way, self._show = way, show
        self._lines: dict[str, _Line] = {}
        self._kept: list[Message] = []
        self._selector = selectors.DefaultSelector()
        self._beat = self._looked = time.monotonic()
        for host in hosts:
            self.add(host)

    def __enter__(self) -> "Remote":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in self._lines.values():
            if one.open:
                one.send(line("end"))
        last = time.monotonic() + _END_S
        for one in self._lines.values():
            with suppress(OSError):
                one.process.stdin.close()  # type: ignore[union-attr]
            try:
                one.process.wait(max(0.0, last - time.monotonic()))
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait()
            for stream in (one.process.stdout, one.process.stderr):
                stream.close()  # type: ignore[union-attr]
        self._selector.close()

    def add(self, host: Host) -> None:
        """Connects with one more, or once more with one that is gone."""
        now = time.monotonic()
        one = self._lines[host.name] = _Line(host, self.way, now)
        for stream, kind in ((one.process.stdout, "out"), (one.process.stderr, "err")):
            self._selector.register(stream, selectors.EVENT_READ, (one, kind))  # type: ignore[arg-type]
        one.send(
            (self.way.bundle.data if self.way.bundle is not None else b"") + line("environment", values=passed_on())
        )

    @property
    def open(self) -> list[str]:
        """Hosts whose connection has not ended, in their order."""
        return [name for name, one in self._lines.items() if one.open]

    def heard(self, host: str) -> float:
        """When, of time.monotonic()."""
        return self._lines[host].heard

    def send(self, host: str, kind: str, **words: Any) -> None:
        if self._lines[host].open:
            self._lines[host].send(line(kind, **words))

    def ask(self, hosts: Sequence[str], question: str, each: Each = NOBODY, **words: Any) -> dict[str, dict[str, Any]]:
        """Everyone's answer, in their order; `each`: words of the question to one of them; who is left out was lost or failed, of which `receive` tells next."""
        for host in hosts:
            self.send(host, "ask", question=question, **words, **each.get(host, {}))
        answers: dict[str, dict[str, Any]] = {}
        waiting = {host for host in hosts if host in self.open}
        kept: list[Message] = []
        while waiting:
            for message in self.receive(1.0):
                if message.kind == "answer" and message.words["question"] == question:
                    answers[message.host] = message.words
                else:
                    kept.append(message)
                if message.kind in ("answer", "lost", "failed"):
                    waiting.discard(message.host)
        self._kept += kept
        return {host: answers[host] for host in hosts if host in answers}

    def receive(self, timeout: float) -> list[Message]:
        """What has come, perhaps nothing. Returns at a signal, too."""
        if self._kept:
            found, self._kept = self._kept, []
            return found
        now = time.monotonic()
        if now > self._looked + _ASLEEP_S + timeout:
            for one in self._lines.values():
                one.heard = one.heard and now
        if now >= self._beat:
            self._beat = now + ALIVE_S
            for one in self._lines.values():
                if one.open:
                    one.send(line("alive"))
        found = []
        if any(one.leaving and one.open for one in self._lines.values()):
            timeout = min(timeout, _LEAVING_S)
        for key, _ in self._selector.select(min(timeout, max(0.0, self._beat - now))):
            if key.fileobj in self._selector.get_map():  # what came before it may have ended its connection
                found += self._read(*key.data)
        self._looked = now = time.monotonic()
        for one in self._lines.values():
            if one.leaving and one.open:
                one.send(b"")
            if one.open and one.silent(now):
                found.append(self._close(one, silent=True))
        return found

    def _read(self, one: _Line, kind: Literal["out", "err"]) -> list[Message]:
        stream = one.process.stdout if kind == "out" else one.process.stderr
        try:
            data = os.read(stream.fileno(), _READ_BYTES)  # type: ignore[union-attr]
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(stream)  # type: ignore[arg-type]
            return [self._close(one)] if kind == "out" and one.open else []
        if kind == "err":
            one.said.extend(data.decode(errors="replace").split("\n")) if data.strip() else None
            while one.said and not one.said[-1].strip():
                one.said.pop()
            return []
        try:
            messages = one.reader.feed(data)
        except Garbled as error:
            return [self._close(one, garbled=str(error))]
        one.heard = time.monotonic()
        for words in messages:
            if words["is"] == "alive":
                one.starting = bool(words.get("starting"))
            if words["is"] in ("out", "err"):
                self._show(one.host.name, words["is"], str(words.get("text", "")))
        return [Message(one.host.name, words["is"], words) for words in messages if words["is"] not in _NO_NEWS]

    def _close(self, one: _Line, silent: bool = False, garbled: str = "") -> Message:
        one.open = False
        if not silent and not garbled:
            with suppress(subprocess.TimeoutExpired):
                one.process.wait(1.0)
        self._read_rest(one)
        text, hint = one.why(silent)
        if garbled:
            text = f"{one.host.name} says `{garbled}`, which is no agent's word"
            hint = "nothing that its shell reads at its start may print anything"
        for stream in (one.process.stdout, one.process.stderr):
            with suppress(KeyError, ValueError):
                self._selector.unregister(stream)  # type: ignore[arg-type]
        with suppress(OSError):
            one.process.stdin.close()  # type: ignore[union-attr]
        one.process.terminate()
        return Message(one.host.name, "lost", {"text": text, "hint": hint, "ever": bool(one.heard)})

    def _read_rest(self, one: _Line) -> None:
        """What ssh or the interpreter said last."""
        with suppress(KeyError, ValueError):
            self._selector.get_key(one.process.stderr)  # type: ignore[arg-type]
            self._read(one, "err")
