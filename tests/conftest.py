"""One thread per process: the suite starts several at a time, and threads that wait for each other's cores cost minutes.

A suite started by nohup, or in the background of a script, ignores SIGHUP or SIGINT, and so would all that it starts. A command
that a test, or a fixture of a whole file, calls in this process answers signals its own way, and in the end not at all: each
test begins as a fresh process does.
"""

import fcntl
import os
import signal

import drawn
import pytest
import small
import tiny
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    drawn.quick = "not long" in config.option.markexpr
    # How long an example takes says how busy the machine is.
    settings.register_profile("stagerun", drawn.examples(100), deadline=None)
    settings.load_profile("stagerun")


_STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def _as_in_a_fresh_process() -> None:
    for number in _STOPS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*_STOPS, signal.SIGINT})


_as_in_a_fresh_process()


@pytest.fixture(autouse=True)
def signals_as_in_a_fresh_process():
    _as_in_a_fresh_process()
    yield
    _as_in_a_fresh_process()


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """The images of `tiny`, which no test changes."""
    folder = tmp_path_factory.mktemp("data")
    tiny.make_data(folder)
    return folder


@pytest.fixture(scope="session")
def few(tmp_path_factory):
    """The LMDB of `nan_help`, without a record that makes an iteration fail; no test changes it."""
    from nan_help import make_data  # with torch, which tests/fast does without

    return make_data(tmp_path_factory.mktemp("few") / "lmdb")


@pytest.fixture(scope="module")
def base(tmp_path_factory, request):
    """data/ and schedule/, a file's own: `small` on the images of `tiny`."""
    base = tmp_path_factory.mktemp(request.module.__name__)
    tiny.make_data(base / "data")
    small.make_schedule(base / "schedule", base / "data")
    return base


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """data/, schedule/, the output out/ of one worker that was not interrupted, and what it printed, out.txt. There is one for all
    processes of pytest: copy out/ before you change it."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with (folder / "finished.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = folder / "finished"
        if not (made / "out.txt").exists():
            tiny.make_data(made / "data")
            small.make_schedule(made / "schedule", made / "data")
            done = small.run(made / "schedule", made / "out")
            assert done.returncode == 0, done.stdout + done.stderr
            (made / "out.txt").write_text(done.stdout)
    return made
