"""Work done by threads, results in order. Decoding, encoding, hashing and reading all let go of Python's lock."""

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

# Items that one thread does in one go, so that handing over costs little, and goes ahead: memory is bounded by their product.
_AT_ONCE, _AHEAD = 4, 3


def in_order(make: Callable[[int], T], first: int, last: int, threads: int) -> Generator[T, None, None]:
    """make(first), ..., make(last - 1), whoever is done first. An exception comes where its result would have come.

    At most 12 results a thread are under way or waiting. Closing it waits for those in the making, no others are started.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix="images")
    waiting: deque[Future[list[T]]] = deque()
    try:
        for start in range(first, last, _AT_ONCE):
            waiting.append(pool.submit(_several, make, start, min(last, start + _AT_ONCE)))
            if len(waiting) >= threads * _AHEAD:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _several(make: Callable[[int], T], first: int, last: int) -> list[T]:
    return [make(i) for i in range(first, last)]
