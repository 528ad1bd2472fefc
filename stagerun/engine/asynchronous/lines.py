"""Hub and servers over the network: what a replica asks a rank for, and the threads there that answer it.

A question is seven numbers, and so is an answer; vectors and texts follow where the numbers say so. Nothing is pickled.
"""

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from stagerun.base.errors import PeerError
from stagerun.engine.asynchronous.desk import Desk, Done, LegEnd, Work
from stagerun.engine.asynchronous.servers import Push, Server

_NUMBERS = 7


class Wire(Protocol):
    """`comm.line.Line`, or a fake."""

    def send(self, tensor: Tensor) -> None: ...
    def recv(self, tensor: Tensor) -> None: ...
    def close(self) -> None: ...


class _Op(IntEnum):
    ASK = 0
    BEGIN = 1
    CLAIM = 2
    DONE = 3
    PULL = 4
    PUSH = 5
    LEAVE = 6


def _say(wire: Wire, *numbers: float) -> None:
    wire.send(torch.tensor([*numbers, *[0.0] * (_NUMBERS - len(numbers))], dtype=torch.float64))


def _hear(wire: Wire) -> list[float]:
    numbers = torch.zeros(_NUMBERS, dtype=torch.float64)
    wire.recv(numbers)
    return numbers.tolist()


def _say_text(wire: Wire, text: bytes) -> None:
    wire.send(torch.frombuffer(bytearray(text), dtype=torch.uint8))


def _hear_text(wire: Wire, size: int) -> bytes:
    found = torch.zeros(size, dtype=torch.uint8)
    wire.recv(found)
    return found.numpy().tobytes()


class RemoteDesk:
    """The hub of rank 0. `asks`: a line for the loader's thread alone."""

    def __init__(self, wire: Wire, asks: Wire) -> None:
        self._wire, self._asks = wire, asks
        self._asking, self._left = threading.Lock(), False

    def ask(self, replica: int) -> int | None:
        with self._asking:
            if self._left:  # the loader reads ahead until it is closed, and nobody answers any more
                return None
            _say(self._asks, _Op.ASK)
            iteration = int(_hear(self._asks)[0])
        return None if iteration < 0 else iteration

    def begin(self, replica: int, stop: bool) -> Work | LegEnd:
        _say(self._wire, _Op.BEGIN, stop)
        over, *numbers = map(int, _hear(self._wire))
        if not over:
            return Work(*numbers[:4])
        found = json.loads(_hear_text(self._wire, numbers[0]))
        return LegEnd(**{**found, "gone": tuple(found["gone"])})

    def claim(self, replica: int, seen: Sequence[int], computed: Done) -> int:
        _say(self._wire, _Op.CLAIM, len(seen), computed.iteration, computed.loss, computed.seconds)
        self._wire.send(torch.tensor(seen, dtype=torch.int64))
        return int(_hear(self._wire)[0])

    def done(self, replica: int, done: Done) -> None:
        text = done.wrong.encode()
        _say(self._wire, _Op.DONE, done.iteration, done.loss, done.seconds, done.staleness, len(text))
        if text:
            _say_text(self._wire, text)
        _hear(self._wire)

    def leave(self) -> None:
        """There is nothing more to ask, also for a loader that still reads ahead."""
        with self._asking:
            self._left = True
            _say(self._asks, _Op.LEAVE)
        _say(self._wire, _Op.LEAVE)


class RemoteServer:
    """A server of another rank. `like`: an empty tensor on the device and of the dtype of the weights; `size`: elements of its parts."""

    def __init__(self, wire: Wire, like: Tensor, size: int) -> None:
        self._wire, self._vector = wire, like.new_empty(size)

    def pull(self, claim: int, leg: int, floor: int) -> tuple[int, Tensor]:
        _say(self._wire, _Op.PULL, claim, leg, floor)
        version = int(_hear(self._wire)[0])
        if len(self._vector):
            self._wire.recv(self._vector)
        return version, self._vector

    def push(self, push: Push) -> int:
        statistics = len(push.total) if push.total is not None else 0
        _say(self._wire, _Op.PUSH, push.claim, push.iteration, push.seen, statistics, push.leg)
        if len(push.gradient):
            self._wire.send(push.gradient)
        if push.total is not None and statistics:
            self._wire.send(push.total.contiguous())
        return int(_hear(self._wire)[0])

    def leave(self) -> None:
        _say(self._wire, _Op.LEAVE)


class Clerk:
    """Answers what comes over one line from `replica`, in a thread of its own, until that one leaves or is gone: then `lost` hears of it."""

    def __init__(
        self,
        wire: Wire,
        replica: int,
        desk: Desk | None,
        server: Callable[[], Server],
        lost: Callable[[int], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """`desk`: of the rank that has the hub. `server`: that of the present leg. `failed` hears of what should not have happened."""
        self._wire, self.replica, self._desk, self._server = wire, replica, desk, server
        self._lost, self._failed = lost, failed
        self.thread = threading.Thread(target=self._run, name=f"server of {replica}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            while self._answer(*_hear(self._wire)):
                pass
        except PeerError:
            self._lost(self.replica)
        except BaseException as error:
            self._failed(error)
        finally:  # who still waits for an answer there gets none
            self._wire.close()

    def _answer(self, op: float, *numbers: float) -> bool:
        """Whether there may be more."""
        wire = self._wire
        match _Op(int(op)):
            case _Op.LEAVE:
                return False
            case _Op.PULL:
                version, vector = self._server().pull(*map(int, numbers[:3]))
                _say(wire, version)
                if len(vector):
                    wire.send(vector)
            case _Op.PUSH:
                _say(wire, self._take(*map(int, numbers[:5])))
            case other:
                self._at_desk(other, numbers)
        return True

    def _take(self, claim: int, iteration: int, seen: int, statistics: int, leg: int) -> int:
        server = self._server()
        gradient = torch.empty_like(server.vector)
        if len(gradient):
            self._wire.recv(gradient)
        total = torch.empty(statistics, dtype=torch.float64, device=gradient.device) if server.number == 0 else None
        if total is not None and statistics:
            self._wire.recv(total)
        return server.push(Push(claim, iteration, seen, gradient, total, leg))

    def _at_desk(self, op: _Op, numbers: tuple[float, ...]) -> None:
        desk, wire, replica = self._desk, self._wire, self.replica
        assert desk is not None
        match op:
            case _Op.ASK:
                asked = desk.ask(replica)
                _say(wire, -1 if asked is None else asked)
            case _Op.BEGIN:
                answer = desk.begin(replica, bool(numbers[0]))
                if isinstance(answer, Work):
                    _say(wire, 0, answer.iteration, answer.claim, answer.own_from, answer.floor)
                else:
                    text = json.dumps(asdict(answer)).encode()
                    _say(wire, 1, len(text))
                    _say_text(wire, text)
            case _Op.CLAIM:
                seen = torch.zeros(int(numbers[0]), dtype=torch.int64)
                wire.recv(seen)
                iteration, loss, seconds = numbers[1:4]
                _say(wire, desk.claim(replica, seen.tolist(), Done(int(iteration), replica, loss, seconds)))
            case _Op.DONE:
                iteration, loss, seconds, staleness, size = numbers[:5]
                wrong = _hear_text(wire, int(size)).decode() if size else ""
                desk.done(replica, Done(int(iteration), replica, loss, seconds, int(staleness), wrong))
                _say(wire)
            case _:
                raise ValueError(f"question {op} of worker {replica}")
