"""Conditions that a test can't have from the machine, and moments within a call, by Python's audit events: nothing of the package is replaced."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

_asked: list[tuple[str, Callable[..., object]]] = []


@cache
def _listen() -> None:
    def audit(event: str, args: tuple[Any, ...]) -> None:
        for name, do in list(_asked):
            if name == event:
                do(*args)

    sys.addaudithook(audit)


@contextmanager
def at(event: str, do: Callable[..., object]) -> Iterator[None]:
    """`do` gets the arguments of each such call before it is made; what it raises, the call seems to raise."""
    _listen()
    _asked.append((event, do))
    try:
        yield
    finally:
        _asked.remove((event, do))


@contextmanager
def once(event: str, found: Callable[..., bool], do: Callable[[], object]) -> Iterator[None]:
    """`do` comes in between, before the first call whose arguments are `found`."""
    done: list[bool] = []

    def first(*args: object) -> None:
        if not done and found(*args):
            done.append(True)
            do()

    with at(event, first):
        yield
    assert done, f"there was no such call of {event}"


@contextmanager
def refused(path: Path, code: int) -> Iterator[None]:
    """Opening that file gives this error: by its path, or by its name after its folder was opened."""
    folder = threading.local()

    def opened(name: object, *_: object) -> None:
        if str(name) == str(path) or (name == path.name and getattr(folder, "last", "") == str(path.parent)):
            raise OSError(code, os.strerror(code))
        folder.last = str(name)

    with at("open", opened):
        yield


@contextmanager
def no_flock(code: int) -> Iterator[None]:
    """A file system without locks."""

    def locked(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    with at("fcntl.flock", locked):
        yield
