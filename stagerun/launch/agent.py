"""`stagerun agent`: on each host of `--hosts`, the other end of the launcher's connection. It answers questions about its host, starts
the workers there for one life, and passes on what they print and how they end.

When the launcher is gone, or hasn't been heard for a while, the workers are asked to stop, and save; none outlives this process.
"""

import codecs
import fcntl
import os
import queue
import select
import shutil
import signal
import socket
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

from stagerun.base.errors import ExitCode, StagerunError
from stagerun.launch import addresses
from stagerun.launch.folder import reports, send, spared, tell_gone
from stagerun.launch.local import Life, Node, live, new_life
from stagerun.launch.sparing import Watch, without
from stagerun.launch.wire import ALIVE_S, SILENCE_S, line, reader
from stagerun.system import signals
from stagerun.system.lines import Garbled
from stagerun.system.world import default_threads

# A pause so long between two looks, and this process was stopped itself: no one else's silence is known.
_ASLEEP_S = 5.0
_LOOK_S, _READ_BYTES = 0.5, 1 << 16
# Where no monitor sees to it, workers whose peers are on a host that is gone would wait for ever.
_UNWATCHED_S = 3.0

Question = dict[str, Any]
Answers = Mapping[str, Callable[[Question], dict[str, Any]]]


class Agent:
    """Made in the main thread. `answers`: by question, those that need to know more than this part of the house; what they
    print is printed by the launcher."""

    def __init__(self, answers: Answers) -> None:
        # Answers may import it: hosts without a reverse name are no news.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        self._answers: Answers = {**answers, "meet": _meet, "port": lambda _: {"port": addresses.free_port()}}
        self._todo: queue.Queue[dict[str, Any]] = queue.Queue()
        self._life: Life | None = None
        self._watch: Watch | None = None  # over the workers of that life
        self._early: list[dict[str, Any]] = []  # what came for a life that was only about to begin
        self._meeting = threading.Lock()
        self._ranks = 0, 0  # the first here, and how many
        self._alone = False  # no one listens any more
        self._writing = threading.Lock()
        self._in, self._out = os.dup(0), os.dup(1)
        os.set_blocking(self._out, False)
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)  # the workers', too
        self._pumps = [_Pump(self, 1, "out"), _Pump(self, 2, "err")]

    def run(self) -> None:
        """Until the launcher has no more use for it."""
        with signals.held():
            for work in (self._read, self._beat, *(pump.run for pump in self._pumps)):
                threading.Thread(target=work, daemon=True).start()
        while True:
            message = self._todo.get()
            try:
                match message["is"]:
                    case "environment":
                        os.environ.update(_fitting(message["values"]))
                    case "ask":
                        self._answer(message)
                    case "go":
                        self._go(message)
            except StagerunError as error:
                self._failed(int(error.exit_code), error.render())
            except Exception as error:  # torch's words, or a bug of ours
                self._failed(int(ExitCode.PEER), f"its agent failed: {type(error).__name__}: {_first_line(error)}")
            if self._alone:  # who would have ended this process had a life to wait for
                os._exit(ExitCode.PEER)

    # -- what the main thread does

    def _answer(self, message: Question) -> None:
        answer = self._answers[message["question"]](message)
        self._drain()
        self.say("answer", question=message["question"], **answer)

    def _go(self, message: dict[str, Any]) -> None:
        node = Node(**message["node"])
        if "GLOO_SOCKET_IFNAME" not in os.environ and (found := _interface(node.endpoint)) is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = found
        nproc = message["nproc"]
        self._ranks = node.first, nproc
        with new_life(message["grace"]) as life:
            with self._meeting:
                self._life = life
            if self._alone:
                self._end(ExitCode.PEER)
            self._watch = Watch(
                life.folder, lambda rank, code, said: self.say("spared", rank=rank, code=code, text=said)
            )
            for early in self._early:
                self._pass_on(life, early)
            threads = message["threads"] or default_threads(nproc)
            deaths = live(life, message["command"], nproc, threads, message["saves"], self._watch, node)[1]
            self._drain()
            self._say_ended(life, deaths)
            self._life = None
        if self._alone:
            os._exit(ExitCode.SAVED)

    def _say_ended(self, life: Life, deaths: dict[int, int]) -> None:
        first, nproc = self._ranks
        found, deaths = without(reports(life.folder, nproc, first), deaths, spared(life.folder))
        self.say(
            "ended",
            reports=[[one.rank, one.code, one.text] for one in found],
            deaths=[[rank, code] for rank, code in deaths.items()],
            late=life.relay.late,
        )

    def _failed(self, code: int, text: str) -> None:
        self._life = None
        self._drain()
        self.say("failed", code=code, text=text)

    def _drain(self) -> None:
        """Returns when what was printed until now is on its way."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        for pump in self._pumps:
            pump.drain()

    # -- the launcher

    def say(self, kind: str, **words: Any) -> None:
        """From any thread. Where no one listens any more it says nothing; that is so, too, when nothing was taken for SILENCE_S: the thread
        that reads may be the one that speaks."""
        left = memoryview(line(kind, **words))
        with self._writing:
            last = time.monotonic() + SILENCE_S
            while left and not self._alone:
                try:
                    if select.select([], [self._out], [], _LOOK_S)[1]:
                        left = left[os.write(self._out, left) :]
                        last = time.monotonic() + SILENCE_S
                    elif time.monotonic() > last:
                        self._hang_up()
                except BlockingIOError:
                    continue
                except OSError:
                    return  # reading tells that it is gone

    def _beat(self) -> None:
        while not self._alone:
            life = self._life
            free = sorted(spared(life.folder)) if life is not None else []
            self.say("alive", starting=life is None or not _entered(life), spared=free)
            time.sleep(ALIVE_S)

    def _read(self) -> None:
        messages_of, heard, looked = reader().feed, time.monotonic(), time.monotonic()
        while True:
            ready = select.select([self._in], [], [], _LOOK_S)[0]
            now = time.monotonic()
            if now > looked + _ASLEEP_S:
                heard = now
            looked = now
            if ready:
                try:
                    data = os.read(self._in, _READ_BYTES)
                    messages = messages_of(data)
                except (OSError, Garbled):
                    data = b""
                if not data:
                    return self._hang_up()
                heard = now
                for message in messages:
                    self._heard(message)
            elif now > heard + SILENCE_S:
                return self._hang_up()

    def _heard(self, message: dict[str, Any]) -> None:
        match message:
            case {"is": "environment" | "ask" | "go"}:
                self._todo.put(message)
            case {"is": "stop" | "gone" | "over"}:
                with self._meeting:
                    if self._life is None:
                        self._early.append(message)
                        return
                self._pass_on(self._life, message)
            case {"is": "end"}:
                if (life := self._life) is not None:
                    self._say_ended(life, {})  # someone may have saved all by now
                self._end(ExitCode.DONE)

    def _pass_on(self, life: Life, message: dict[str, Any]) -> None:
        """What concerns the workers of a life."""
        match message:
            case {"is": "stop", "signal": int(number)}:
                life.relay.ask(signal.Signals(number))
                self._leave_if_nothing_started(life)
            case {"is": "over"}:
                if self._watch is not None:
                    self._watch.over = True
            case {"is": "gone", "text": str(text), "watched": bool(watched)}:
                self._leave_if_nothing_started(life)
                tell_gone(life.folder, text)
                if not watched:
                    send(life.folder, signal.SIGTERM)
                    threading.Timer(_UNWATCHED_S, send, (life.folder, signal.SIGKILL)).start()

    def _leave_if_nothing_started(self, life: Life) -> None:
        """A worker that starts just now dies with this process."""
        if not _entered(life):
            self._say_ended(life, {})
            self._end(ExitCode.SAVED)

    def _hang_up(self) -> None:
        self._alone = True
        if (life := self._life) is None or not _entered(life):
            self._end(ExitCode.PEER)
        life.relay.ask(signal.SIGHUP)

    def _end(self, code: int) -> NoReturn:
        """At once; the workers die with it."""
        if (life := self._life) is not None:
            shutil.rmtree(life.folder, ignore_errors=True)
        os._exit(code)


class _Pump:
    """What is written to one of this process's and its workers' streams goes to the launcher."""

    def __init__(self, agent: Agent, number: int, kind: str) -> None:
        self._agent, self._kind = agent, kind
        self._end, writing = os.pipe()
        os.dup2(writing, number)
        os.close(writing)
        self._lock = threading.Lock()
        self._text = codecs.getincrementaldecoder("utf-8")("replace")

    def run(self) -> None:
        while True:
            select.select([self._end], [], [])
            with self._lock:
                text = self._text.decode(os.read(self._end, _READ_BYTES))
                if text:
                    self._agent.say(self._kind, text=text)

    def drain(self) -> None:
        while struct.unpack("i", fcntl.ioctl(self._end, termios.FIONREAD, b"\0" * 4))[0]:
            time.sleep(0.01)
        with self._lock:
            pass


# -- answers


def _meet(question: Question) -> dict[str, Any]:
    """By which addresses this host knows the one where all are to meet. That one itself knows by which one ssh came to it; its name may
    well be its own loopback device's there."""
    came = os.environ.get("SSH_CONNECTION", "").split()
    found = [came[2]] if len(came) == 4 else []
    with suppress(OSError, UnicodeError):
        found.append(addresses.resolve(question["name"]))
    return {"addresses": found, "own": [one.host for one in addresses.interfaces()]}


def _fitting(values: dict[str, str]) -> dict[str, str]:
    """What the launcher's environment says, but for the networks of another host: of a login node's `eth0` a node may have none."""
    names = [name for _, name in socket.if_nameindex()]
    fitting = {}
    for key, value in values.items():
        begins = tuple(value.lstrip("=").split(","))
        if not key.endswith("_SOCKET_IFNAME") or value.startswith("^") or any(n.startswith(begins) for n in names):
            fitting[key] = value
        else:
            print(f"{key}={value} is left out: this host has no such interface", file=sys.stderr)
    return fitting


def _interface(endpoint: str) -> str | None:
    """On the way to where all meet."""
    address = endpoint.rpartition(":")[0]
    if address.startswith("127."):
        return "lo"
    found = addresses.towards(address, addresses.interfaces())
    return found.name if found is not None else None


def _entered(life: Life) -> bool:
    """Whether a worker here has started. Until then this process may be importing torch, which holds Python's lock while a file server
    hands out large libraries: nothing else is said meanwhile."""
    return any(life.folder.glob("*.pid"))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]
