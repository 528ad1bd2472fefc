"""One verdict for all workers, and what a worker does about signals."""

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stagerun.launch import StopRequest
from stagerun.launch.folder import Report, ask
from stagerun.launch.local import verdict
from stagerun.system import signals
from stagerun.train.command import RunOptions, stopped_after

KILLED = (
    "worker 1 was killed by SIGKILL\n  hint: run the same command again: it goes on from the newest snapshot"
)  # fmt: skip


@pytest.mark.parametrize(
    "reports, deaths, expected",
    [
        # An error that every rank met alike is reported once.
        ([Report(0, 79, "nan"), Report(1, 79, "nan")], {0: 79, 1: 79}, (79, "nan")),
        # Different ones are reported with their ranks.
        ([Report(0, 65, "a"), Report(1, 65, "b")], {0: 65, 1: 65}, (65, "rank 0: a\nrank 1: b")),
        # The one that raised it tells; the others heard of it.
        ([Report(0, 74, "disk full"), Report(1, 74, "")], {0: 74, 1: 74}, (74, "disk full")),
        ([Report(0, 64, ""), Report(1, 64, "typo")], {0: 64, 1: 64}, (64, "typo")),
        # Who lost its peers is not the cause.
        ([Report(0, 69, "peers are gone"), Report(1, 65, "bad record")], {0: 69, 1: 65}, (65, "bad record")),
        ([Report(0, 70, "bug"), Report(1, 69, "peers are gone")], {0: 70}, (70, "bug")),
        # A kill is, if no one has said anything better.
        ([Report(0, 69, "peers are gone")], {0: 69, 1: -9}, (69, KILLED)),
        ([], {1: -9, 2: -9}, (69, KILLED)),
        ([Report(0, 69, "peers are gone"), Report(1, 74, "full")], {0: 69, 1: 74, 2: -9}, (74, "full")),
        # The others are ended after a death; a report says more than that signal.
        ([Report(0, 69, "lost"), Report(1, 69, "lost too")], {0: -15, 1: 69}, (69, "lost")),
        # Stopped on demand.
        ([Report(0, 75, ""), Report(1, 75, "")], {}, (75, "")),
        ([Report(0, 75, ""), Report(1, 75, "")], {0: 75, 1: 75}, (75, "")),
        # A signal that came when all was done.
        ([Report(0, 0, ""), Report(1, 0, "")], {}, (0, "")),
        ([Report(0, 0, ""), Report(1, 0, "")], {1: -9}, (0, "")),
        ([Report(0, 0, "")], {1: -9, 2: -15}, (0, "")),
        ([Report(1, 0, "")], {0: -15, 1: -9}, (69, KILLED)),
        # One could not save: then the run didn't.
        ([Report(0, 74, "full"), Report(1, 75, "")], {0: 74}, (74, "full")),
        # No one said anything: an interpreter that didn't start, say.
        ([], {0: 1}, (1, "worker 0 ended with exit code 1 and said nothing")),
        ([], {}, (70, "worker 0 ended with exit code 70 and said nothing")),
    ],
)
def test_verdict(reports: list[Report], deaths: dict[int, int], expected: tuple[int, str]) -> None:
    assert verdict(reports, deaths) == expected


@pytest.fixture
def handlers() -> Iterator[None]:
    """Puts those of this process back."""
    before = {number: signal.getsignal(number) for number in signals.stop_signals()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_stop_request_waits_to_be_asked(number: signal.Signals) -> None:
    stop = StopRequest()
    stop.install()
    assert not stop()
    signal.raise_signal(number)
    assert stop() and stop.signal is number
    signal.raise_signal(signal.SIGTERM)  # schedulers send several
    assert stop()


@pytest.mark.usefixtures("handlers")
def test_stop_after_is_a_signal_to_the_command_itself(capfd: pytest.CaptureFixture[str]) -> None:
    stop = StopRequest()
    stop.install()
    with stopped_after(60.0), stopped_after(0.05):
        end = time.monotonic() + 60
        while not stop() and time.monotonic() < end:
            time.sleep(0.01)
    assert stop.signal is signal.SIGTERM
    first, second = filter(None, capfd.readouterr().err.splitlines())
    assert first == "--stop-after 0 s: the time is up"
    assert second == "SIGTERM: stopping after this iteration, to save"
    with stopped_after(0.05):
        pass
    stop.settle(0)
    time.sleep(0.1)  # a command that has ended is not stopped
    assert capfd.readouterr().err == ""
    assert RunOptions("d", stop_after=60.0).arguments() == ["run", "d"], "workers have no clock of their own"


def test_the_clock_of_rank_0_alone_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with stopped_after(60.0):
        assert not [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]


@pytest.mark.usefixtures("handlers")
def test_a_sigterm_after_a_death_is_not_announced_and_the_launchers_is_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The launcher ends workers by SIGTERM when another is gone. A scheduler sends signals to all processes alike, and that of the
    launcher comes a little later."""
    monkeypatch.setenv("STAGERUN_REPORT_DIR", str(tmp_path))
    stop = StopRequest()
    stop.install()
    signal.raise_signal(signal.SIGTERM)
    assert stop() and capfd.readouterr().err == ""
    ask(tmp_path, signal.SIGUSR1)
    for _ in range(2):
        signal.raise_signal(signal.SIGTERM)
    told = "SIGTERM: stopping after this iteration, to save"
    assert capfd.readouterr().err.strip() == told and stop.signal is signal.SIGTERM
