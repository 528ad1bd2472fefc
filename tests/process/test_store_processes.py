"""The store and processes: those that are dead, and those that outlive one that held a lock."""

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import audited
import pytest
from facade import FolderInUseError, this_process
from test_store_lease import HERE, Clock, taken
from test_store_lease import out as out

from stagerun.store import Lock

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@contextmanager
def child(work: Callable[[Callable[[str], object]], object]) -> Iterator[tuple[int, Callable[[], str]]]:
    """A process that does `work(say)`: its number, and what reads a line that it says. Killed at the end."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            work(lambda text: os.write(writing, f"{text}\n".encode()))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as said:
        try:
            yield pid, lambda: said.readline().rstrip()
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_without_locks_a_dead_process_of_this_machine_is_not_waited_for(out):
    with child(lambda say: say(str(this_process().born)) and signal.pause()) as (pid, said):
        born = int(said())
    for dead in (
        replace(HERE, pid=pid, born=born),
        replace(HERE, born=HERE.born - 1),  # the number went to another process since: this one
    ):
        assert not dead.alive()
        taken(out, dead)
        clock = Clock()
        with audited.no_flock(errno.ENOLCK):
            taken(out, locked=False, clock=clock).release(0)
        assert clock.now == 1000
    assert HERE.alive()


def test_the_lock_dies_with_its_process_though_a_forked_worker_lives_on(tmp_path):
    def holds(say: Callable[[str], object]) -> None:
        with Lock(tmp_path):
            if os.fork() == 0:
                say(str(os.getpid()))
            signal.pause()

    with child(holds) as (_, said):
        worker = int(said())
        with pytest.raises(FolderInUseError):
            Lock(tmp_path).acquire()
    with Lock(tmp_path):
        os.kill(worker, signal.SIGKILL)  # it lived
