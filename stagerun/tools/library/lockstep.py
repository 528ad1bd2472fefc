"""A generator that runs in a thread of its own, one step at a time.

A KeyboardInterrupt comes in the main thread alone. So it never hits training half way, which then can end in order and save; and no signal
handler is needed. What is asked for is computed, and nothing ahead of it.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _End:
    error: BaseException | None


class Lockstep(Generic[T]):
    def __init__(self, make: Callable[[Callable[[T], None]], Iterator[T]]) -> None:
        """`make` is called in the thread. What it gets hands over an item from within, before the generator's next one."""
        self._make = make
        self._asks: SimpleQueue[bool] = SimpleQueue()  # False: to go on to the end without asking
        self._answers: SimpleQueue[T | _End] = SimpleQueue()
        self._thread = threading.Thread(target=self._live, name="stagerun", daemon=True)
        self._alone = self._over = False

    def next(self) -> T | None:
        """The next item; None at the end. Raises what the generator raised, once."""
        if self._over:
            return None
        if self._thread.ident is None:
            self._thread.start()
        self._asks.put(True)
        answer = self._answers.get()
        if not isinstance(answer, _End):
            return answer
        self._over = True
        if answer.error is not None:
            raise answer.error
        return None

    def finish(self) -> None:
        """Returns when the generator has come to its end by itself; what it yields until then is dropped, and its error raised, once."""
        if self._over or self._thread.ident is None:
            self._over = True
            return
        self._asks.put(False)
        self._thread.join()
        self._over = True
        while not isinstance(answer := self._answers.get(), _End):
            pass
        if answer.error is not None:
            raise answer.error

    def _live(self) -> None:
        error = None
        try:
            self._wait()
            for item in () if self._alone else self._make(self._hand):
                self._hand(item)
        except BaseException as found:
            error = found
        self._answers.put(_End(error))

    def _hand(self, item: T) -> None:
        if not self._alone:
            self._answers.put(item)
            self._wait()

    def _wait(self) -> None:
        self._alone = not self._asks.get()
