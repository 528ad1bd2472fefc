"""One thread per process: the suite starts several at a time, and threads that wait for each other's cores cost minutes.

A suite started by nohup, or in the background of a script, ignores SIGHUP or SIGINT, and so would all that it starts. A command
that a test, or a fixture of a whole file, calls in this process answers signals its own way, and in the end not at all: each
test begins as a fresh process does.
"""

import os
import signal
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

_STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def _as_in_a_fresh_process() -> None:
    for number in _STOPS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*_STOPS, signal.SIGINT})


_as_in_a_fresh_process()


@pytest.fixture(autouse=True)
def signals_as_in_a_fresh_process() -> Iterator[None]:
    _as_in_a_fresh_process()
    yield
    _as_in_a_fresh_process()
