"""Questions and answers between ranks: a JSON value behind its length, and the vectors that come with it. Nothing is pickled."""

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Message = tuple[Sequence[Any], Sequence[Tensor]]  # words and vectors


class Wire(Protocol):
    """`comm.line.Line`, or a fake."""

    def send(self, tensor: Tensor) -> None: ...
    def recv(self, tensor: Tensor) -> None: ...
    def close(self) -> None: ...


def say(wire: Wire, words: Sequence[Any], vectors: Sequence[Tensor] = ()) -> None:
    kinds = [(str(vector.dtype).removeprefix("torch."), len(vector)) for vector in vectors]
    text = json.dumps([words, kinds]).encode()
    wire.send(torch.tensor([len(text)]))
    wire.send(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    for vector in vectors:
        if len(vector):
            wire.send(vector.contiguous())


def hear(wire: Wire, device: torch.device) -> Message:
    size = torch.zeros(1, dtype=torch.int64)
    wire.recv(size)
    text = torch.zeros(int(size), dtype=torch.uint8)
    wire.recv(text)
    words, kinds = json.loads(text.numpy().tobytes())
    vectors = [torch.empty(length, dtype=getattr(torch, dtype), device=device) for dtype, length in kinds]
    for vector in vectors:
        if len(vector):
            wire.recv(vector)
    return words, vectors


def serve(
    wire: Wire, device: torch.device, answer: Callable[..., Message], failed: Callable[[BaseException], None]
) -> threading.Thread:
    """Answer what comes over `wire`, in a thread, until the other end says that it leaves; `failed` gets any error."""

    def run() -> None:
        try:
            while (question := hear(wire, device))[0] != ["leave"]:
                say(wire, *answer(*question))
        except BaseException as error:
            failed(error)
        finally:  # the replica must not wait for an answer
            wire.close()

    thread = threading.Thread(target=run, name="server", daemon=True)
    thread.start()
    return thread
