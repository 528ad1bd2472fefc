"""Hub and servers over the network: what a replica asks another rank for, and the threads there that answer.

A message is a JSON value behind its length; vectors follow where the value says so. Nothing is pickled.
"""

import json
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Protocol

import torch
from torch import Tensor

from stagerun.engine.asynchronous.hub import Done, Hub, LegEnd, Work
from stagerun.engine.asynchronous.servers import Push, Server


class Wire(Protocol):
    """`comm.line.Line`, or a fake."""

    def send(self, tensor: Tensor) -> None: ...
    def recv(self, tensor: Tensor) -> None: ...
    def close(self) -> None: ...


def _say(wire: Wire, *values: Any) -> None:
    text = json.dumps(values).encode()
    wire.send(torch.tensor([len(text)]))
    wire.send(torch.frombuffer(bytearray(text), dtype=torch.uint8))


def _hear(wire: Wire) -> list[Any]:
    size = torch.zeros(1, dtype=torch.int64)
    wire.recv(size)
    text = torch.zeros(int(size), dtype=torch.uint8)
    wire.recv(text)
    found: list[Any] = json.loads(text.numpy().tobytes())
    return found


class RemoteDesk:
    """The hub of rank 0. `asks`: a line for the loader's thread alone."""

    def __init__(self, wire: Wire, asks: Wire) -> None:
        self._wire, self._asks = wire, asks
        self._asking, self._left = threading.Lock(), False

    def ask(self, replica: int) -> int | None:
        with self._asking:
            if self._left:  # the loader reads ahead until it is closed, and nobody answers any more
                return None
            _say(self._asks, "ask")
            iteration: int | None = _hear(self._asks)[0]
            return iteration

    def begin(self, replica: int, stop: bool) -> Work | LegEnd:
        _say(self._wire, "begin", stop)
        over, words = _hear(self._wire)
        return LegEnd(**words) if over else Work(**words)

    def claim(self, replica: int, iteration: int) -> int:
        _say(self._wire, "claim", iteration)
        return int(_hear(self._wire)[0])

    def done(self, replica: int, done: Done) -> None:
        _say(self._wire, "done", asdict(done))
        _hear(self._wire)

    def leave(self) -> None:
        """End the threads there, also while a loader still reads ahead."""
        with self._asking:
            self._left = True
            _say(self._asks, "leave")
        _say(self._wire, "leave")


class RemoteServer:
    """A server of another rank. `like`: a tensor on the device and of the dtype of the weights; `size`: elements of the server's parts."""

    def __init__(self, wire: Wire, like: Tensor, size: int) -> None:
        self._wire, self._vector = wire, like.new_empty(size)

    def pull(self, claim: int) -> tuple[int, Tensor]:
        _say(self._wire, "pull", claim)
        version = int(_hear(self._wire)[0])
        if len(self._vector):
            self._wire.recv(self._vector)
        return version, self._vector

    def push(self, push: Push) -> int:
        statistics = len(push.total) if push.total is not None else 0
        _say(self._wire, "push", push.claim, push.iteration, push.seen, statistics)
        if len(push.gradient):
            self._wire.send(push.gradient)
        if push.total is not None and statistics:
            self._wire.send(push.total.contiguous())
        return int(_hear(self._wire)[0])

    def leave(self) -> None:
        _say(self._wire, "leave")


def serve(
    wire: Wire,
    replica: int,
    hub: Hub | None,
    server: Callable[[], Server],
    failed: Callable[[int, BaseException], None],
) -> threading.Thread:
    """Answer what comes over `wire` from `replica`, in a thread, until the replica leaves; `failed` gets any error.

    `hub`: on the rank that has it. `server`: returns that of the present leg."""

    def run() -> None:
        try:
            while (question := _hear(wire)) != ["leave"]:
                _answer(wire, replica, hub, server, *question)
        except BaseException as error:
            failed(replica, error)
        finally:  # the replica must not wait for an answer
            wire.close()

    thread = threading.Thread(target=run, name=f"server of {replica}", daemon=True)
    thread.start()
    return thread


def _answer(
    wire: Wire, replica: int, hub: Hub | None, server: Callable[[], Server], question: str, *words: Any
) -> None:
    if question == "pull":
        version, vector = server().pull(*words)
        _say(wire, version)
        if len(vector):
            wire.send(vector)
    elif question == "push":
        _say(wire, server().push(_received(wire, server(), *words)))
    elif hub is None:
        raise ValueError(f"question {question!r} of worker {replica}")
    elif question == "ask":
        _say(wire, hub.ask(replica))
    elif question == "begin":
        answer = hub.begin(replica, *words)
        _say(wire, isinstance(answer, LegEnd), asdict(answer))
    elif question == "claim":
        _say(wire, hub.claim(replica, *words))
    elif question == "done":
        hub.done(replica, Done(**words[0]))
        _say(wire)
    else:
        raise ValueError(f"question {question!r} of worker {replica}")


def _received(wire: Wire, server: Server, claim: int, iteration: int, seen: int, statistics: int) -> Push:
    gradient = torch.empty_like(server.vector)
    if len(gradient):
        wire.recv(gradient)
    total = torch.empty(statistics, dtype=torch.float64, device=gradient.device) if server.number == 0 else None
    if total is not None and statistics:
        wire.recv(total)
    return Push(claim, iteration, seen, gradient, total)
