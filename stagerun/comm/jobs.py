"""Jobs done one after the other, at once or in a thread beside the one that trains."""

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

import torch

Job = Callable[[], None]


class Jobs(Protocol):
    def put(self, job: Job) -> None:
        """Does it now or later."""

    def wait(self) -> None:
        """Returns when all that was put is done, or raises the first error of a job; those after it are left out."""


class Inline:
    """Does each job at once."""

    def put(self, job: Job) -> None:
        job()

    def wait(self) -> None:
        pass


class Background:
    """Does the jobs in a thread, which ends with this object. The process doesn't wait for it: a peer may never answer."""

    def __init__(self, name: str, idle: Job = lambda: None) -> None:
        """`idle` is called when no job is left. It must not hold what holds this object."""
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        threading.Thread(target=_work, args=(self._jobs, idle), name=name, daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def put(self, job: Job) -> None:
        def careful() -> None:
            if self._error is None:
                try:
                    job()
                except BaseException as error:  # raised by `wait`, in the thread that trains
                    self._error = error

        self._jobs.put(careful)

    def wait(self) -> None:
        done = threading.Event()
        self._jobs.put(done.set)
        done.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error


@torch.no_grad()
def _work(jobs: "queue.SimpleQueue[Job | None]", idle: Job) -> None:
    while True:
        if jobs.empty():
            idle()
        job = jobs.get()
        if job is None:
            return
        job()
        del job  # it holds what holds this thread's end
