"""The launcher's side: an agent on each of several hosts, over ssh, and what they say. No torch.

A host is gone when its connection has ended, or nothing was heard of it for SILENCE_S. It is reported once, as a message of the kind
`lost`; its connection is closed then.
"""

import math
import os
import selectors
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from stagerun.launch.hostfile import Host
from stagerun.launch.ssh import Way, passed_on
from stagerun.launch.wire import ALIVE_S, SILENCE_S, line, reader
from stagerun.system.lines import Garbled

# From ssh's start, or from when a bundle last got on, until the agent's first word, and for as long as it starts: an interpreter and
# torch, perhaps from a busy file server.
START_S = 90.0
# An agent says that it is alive while it answers, and a file server that doesn't makes it wait for ever.
ANSWER_S = 90.0
_WAITING_S = 10.0  # then it is said who is waited for
# A pause so long between two looks, and this process was stopped itself (Ctrl-Z).
_ASLEEP_S = 5.0
_READ_BYTES = 1 << 16
_SAID_LINES = 20
_END_S = 2.0
_OTHER = "it may have another stagerun than this host: install the same on all, or let `--sync --sync-code` copy it"
_NO_NEWS = ("alive", "out", "err")


@dataclass(frozen=True, slots=True)
class Message:
    """What an agent says; `kind` `lost`: why it doesn't any more."""

    host: str
    kind: str
    words: dict[str, Any]


Show = Callable[[str, str, str], None]
Each = Mapping[str, Mapping[str, Any]]
NO_ONE: Each = {}


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
        self.reader = reader()
        self.leaving: deque[memoryview] = deque()
        self.said: deque[str] = deque(maxlen=_SAID_LINES)
        self.began, self.heard, self.first = now, 0.0, 0.0  # heard: of its agent, last and first
        self.asked: tuple[float, float] | None = None  # since when no question is answered, and for how long at most
        self.open = True
        self.spared: frozenset[int] = frozenset()  # ranks there that the others go on without, as it said last
        self.starting = True  # it may be importing what takes long, and says nothing meanwhile

    def send(self, *data: bytes) -> None:
        self.leaving += map(memoryview, data)
        try:
            while self.leaving:
                gone = os.write(self.process.stdin.fileno(), self.leaving[0])  # type: ignore[union-attr]
                self.leaving[0] = self.leaving[0][gone:]
                if not self.leaving[0]:
                    self.leaving.popleft()
                elif not self.heard:  # a bundle gets on
                    self.began = time.monotonic()
        except BlockingIOError:
            pass
        except OSError:  # gone: reading tells of that
            self.leaving.clear()

    def hangs(self, now: float) -> float:
        """Seconds for which it has not answered, where that is too long. It answers once it has said its first word."""
        since, limit = self.asked or (now, 0.0)
        return limit if self.asked and self.heard and now > max(since, self.first) + limit else 0.0

    def silent(self, now: float) -> bool:
        since, limit = self.heard or self.began, START_S if self.starting else SILENCE_S
        return now > since + limit

    def why(self, silent: bool) -> tuple[str, str]:
        if seconds := self.hangs(time.monotonic()):
            ssh = self._way.to(self.host)
            return (
                f"{self.host.name} has not answered for {seconds:.0f} s, though it is there",
                f"a file system there may hang: see whether `{ssh} df` comes back",
            )
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
        self._paused, self._woke = 0.0, 0.0
        for host in hosts:
            self.add(host)

    def __enter__(self) -> "Remote":
        return self

    def __exit__(self, *_: object) -> None:
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
            *([self.way.bundle.data] if self.way.bundle is not None else []), line("environment", values=passed_on())
        )
        self._watch(one)

    def drop(self, host: str) -> None:
        """Hangs up; nothing more is reported of it."""
        if self._lines[host].open:
            self._close(self._lines[host], silent=True)

    @property
    def slept(self) -> float:
        """Seconds that this process was stopped for just now, where that was long enough for agents to take it for gone; else 0."""
        recent = time.monotonic() < self._woke + START_S
        return self._paused if recent and self._paused > SILENCE_S - 2 * ALIVE_S else 0.0

    @property
    def leaving(self) -> bool:
        """Whether something that was sent has not left yet."""
        return any(one.leaving and one.open for one in self._lines.values())

    @property
    def open(self) -> list[str]:
        """Hosts whose connection has not ended, in their order."""
        return [name for name, one in self._lines.items() if one.open]

    def heard(self, host: str) -> float:
        """When, of time.monotonic()."""
        return self._lines[host].heard

    def spared(self, host: str) -> frozenset[int]:
        """Ranks there that the others go on without, as it said last."""
        return self._lines[host].spared

    def send(self, host: str, kind: str, **words: Any) -> None:
        if self._lines[host].open:
            self._lines[host].send(line(kind, **words))
            self._watch(self._lines[host])

    def put(self, host: str, question: str, limit: float | None = None, **words: Any) -> None:
        """A question, whose answer is a message; the host is lost that gives none for `limit` seconds."""
        self._lines[host].asked = time.monotonic(), ANSWER_S if limit is None else limit
        self.send(host, "ask", question=question, **words)

    def ask(
        self,
        hosts: Sequence[str],
        question: str,
        each: Each = NO_ONE,
        limit: float | None = None,
        waiting_for: Callable[[Sequence[str]], None] = lambda hosts: None,
        **words: Any,
    ) -> dict[str, dict[str, Any]]:
        """Everyone's answer, in their order; `each`: words of the question to one of them; who is left out was lost or failed, of which
        `receive` reports next. `limit` as of `put`; `waiting_for` is called once, after a while, with those that have not answered yet."""
        for host in hosts:
            self.put(host, question, limit, **words, **each.get(host, {}))
        say_at = time.monotonic() + _WAITING_S
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
            if waiting and time.monotonic() > say_at:
                waiting_for([host for host in hosts if host in waiting])
                say_at = math.inf
        self._kept += kept
        return {host: answers[host] for host in hosts if host in answers}

    def receive(self, timeout: float) -> list[Message]:
        """What has come, perhaps nothing. Returns at a signal, too."""
        if self._kept:
            found, self._kept = self._kept, []
            return found
        now = time.monotonic()
        if now >= self._beat:
            self._beat = now + ALIVE_S
            for one in self._lines.values():
                if one.open and not one.leaving:
                    one.send(line("alive"))
                    self._watch(one)
        found = []
        for key, _ in self._selector.select(min(timeout, max(0.0, self._beat - now))):
            one, kind = key.data
            if kind == "in":
                one.send()
                self._watch(one)
            elif key.fileobj in self._selector.get_map():  # what came before it may have ended its connection
                found += self._read(one, kind)
        before, self._looked = self._looked, time.monotonic()
        now = self._looked
        if (pause := now - before) > _ASLEEP_S + timeout:
            self._paused, self._woke = pause, now
            for one in self._lines.values():
                one.heard = one.heard and now
                one.began = now
                one.asked = one.asked and (now, one.asked[1])
        for one in self._lines.values():
            if one.open and (one.silent(now) or one.hangs(now)):
                found.append(self._close(one, silent=True))
        return found

    def _watch(self, one: _Line) -> None:
        """Wakes up when more can leave, where there is more."""
        if not one.open:  # nor is its stdin
            return
        stream, there = one.process.stdin, one.process.stdin in self._selector.get_map()
        if one.leaving and not there:
            self._selector.register(stream, selectors.EVENT_WRITE, (one, "in"))  # type: ignore[arg-type]
        elif there and not one.leaving:
            self._selector.unregister(stream)  # type: ignore[arg-type]

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
        one.first = one.first or one.heard
        for words in messages:
            if words["is"] == "alive":
                one.starting = bool(words.get("starting"))
                free = words.get("spared")
                one.spared = frozenset(free) if isinstance(free, list) else frozenset()
            if words["is"] in ("answer", "failed"):
                one.asked = None
            if words["is"] in ("out", "err"):
                self._show(one.host.name, words["is"], words["text"])
        return [Message(one.host.name, words["is"], words) for words in messages if words["is"] not in _NO_NEWS]

    def _close(self, one: _Line, silent: bool = False, garbled: str = "") -> Message:
        one.open = False
        if not silent and not garbled:
            with suppress(subprocess.TimeoutExpired):
                one.process.wait(1.0)
        self._read_rest(one)
        text, hint = one.why(silent)
        if garbled:
            text = f"{one.host.name} says `{garbled}`, which no agent says"
            hint = "nothing that its shell reads at its start may print anything" if not one.heard else _OTHER
        one.leaving.clear()
        for stream in (one.process.stdin, one.process.stdout, one.process.stderr):
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


# Between the end of one attempt and the next; an attempt at a host that is switched off takes ssh.CONNECT_S.
AGAIN_S = 15.0
_SENDING_S = 0.1  # of each look, for a bundle


class Probe:
    """`question`: what they are asked; who answers is back. `rests`: seconds before the first time, by host."""

    def __init__(
        self, way: Way, hosts: Mapping[str, Host], question: Mapping[str, Any], rests: Mapping[str, float]
    ) -> None:
        self._hosts, self._question = hosts, question
        self._remote = Remote((), way, lambda host, stream, text: None)
        self._next = {name: time.monotonic() + rests.get(name, 0.0) for name in hosts}
        self.answers: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> "Probe":
        return self

    def __exit__(self, *of_error: object) -> None:
        self._remote.__exit__(None, None, None)

    def look(self, timeout: float = 0.0) -> None:
        """Brings `answers` up to date."""
        now = time.monotonic()
        for name, due in self._next.items():
            if now >= due:
                self._next[name] = float("inf")
                self._remote.add(self._hosts[name])
                self._remote.put(name, "facts", **self._question)
        messages = self._remote.receive(timeout)
        while self._remote.leaving and time.monotonic() < now + timeout + _SENDING_S:
            messages += self._remote.receive(0.01)
        for message in messages:
            if message.kind == "answer":
                self.answers[message.host] = message.words
            elif message.kind in ("lost", "failed"):
                self._later(message.host)

    def again(self, host: str) -> None:
        """What it answered won't do."""
        self._remote.drop(host)
        self._later(host)

    def _later(self, host: str) -> None:
        self.answers.pop(host, None)
        self._next[host] = time.monotonic() + AGAIN_S
