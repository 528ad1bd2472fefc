"""The launcher and its workers: one verdict for all of them, what each does about signals, and what a launcher does with those that hang."""

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from facade import Context, Event, ExitCode, RunFinished, Stopped, StorageError, World

from stagerun.comm import SoloComm
from stagerun.command.ending import stopped_after
from stagerun.language import load
from stagerun.launch import StopRequest, local, run_workers, stopping
from stagerun.launch.local import Orders, Outcome, verdict
from stagerun.launch.stopping import Report, aside, least_before
from stagerun.system import signals
from stagerun.train.command import RunOptions
from stagerun.train.sinks import Output

NOTHING_STARTED = stopping.nothing_started(ExitCode.SAVED)

KILLED = "worker 1 was killed by SIGKILL\n  hint: run the same command again: it resumes from the newest snapshot"
GONE = "peers are gone"
SILENT = " without a message"

# What workers report, as (rank, code, text), how those that did not end with 0 ended, and what that comes to.
VERDICTS: list[tuple[list[tuple[int, int, str]], dict[int, int], tuple[int, str]]] = [
    # An error that every rank met alike is reported once.
    ([(0, 79, "nan"), (1, 79, "nan")], {0: 79, 1: 79}, (79, "nan")),
    # Different ones are reported with their ranks.
    ([(0, 65, "a"), (1, 65, "b")], {0: 65, 1: 65}, (65, "rank 0: a\nrank 1: b")),
    # The one that raised it tells; the others heard of it.
    ([(0, 74, "disk full"), (1, 74, "")], {0: 74, 1: 74}, (74, "disk full")),
    ([(0, 64, ""), (1, 64, "typo")], {0: 64, 1: 64}, (64, "typo")),
    # Who lost its peers is not the cause.
    ([(0, 69, GONE), (1, 65, "bad record")], {0: 69, 1: 65}, (65, "bad record")),
    ([(0, 70, "bug"), (1, 69, GONE)], {0: 70}, (70, "bug")),
    # A kill is, if no one has said anything better.
    ([(0, 69, GONE)], {0: 69, 1: -9}, (69, KILLED)),
    ([], {1: -9, 2: -9}, (69, KILLED)),
    ([(0, 69, GONE), (1, 74, "full")], {0: 69, 1: 74, 2: -9}, (74, "full")),
    # The others are ended after a death; a report says more than that signal.
    ([(0, 69, "lost"), (1, 69, "lost too")], {0: -15, 1: 69}, (69, "lost")),
    # Stopped on demand.
    ([(0, 75, ""), (1, 75, "")], {}, (75, "")),
    ([(0, 75, ""), (1, 75, "")], {0: 75, 1: 75}, (75, "")),
    # A signal that came when all was done.
    ([(0, 0, ""), (1, 0, "")], {}, (0, "")),
    ([(0, 0, ""), (1, 0, "")], {1: -9}, (0, "")),
    ([(0, 0, "")], {1: -9, 2: -15}, (0, "")),
    ([(1, 0, "")], {0: -15, 1: -9}, (69, KILLED)),
    # One could not save: then the run didn't.
    ([(0, 74, "full"), (1, 75, "")], {0: 74}, (74, "full")),
    # No one said anything: an interpreter that didn't start, say.
    ([], {0: 1}, (1, f"worker 0 ended with exit code 1{SILENT}")),
    ([], {}, (70, f"worker 0 ended with exit code 70{SILENT}")),
    # A stop before any worker could say so.
    ([], {1: 75}, (75, NOTHING_STARTED)),
    # One alone left before it met the others, who miss it.
    ([(0, 69, GONE), (1, 75, NOTHING_STARTED)], {1: 75}, (75, NOTHING_STARTED)),
    # No one asked: the others were stopped since one had ended.
    ([(0, 75, NOTHING_STARTED)], {0: 75, 1: 70}, (70, f"worker 1 ended with exit code 70{SILENT}")),
    ([], {0: 75, 1: 65}, (65, f"worker 1 ended with exit code 65{SILENT}")),
]
ASKED: list[tuple[list[tuple[int, int, str]], dict[int, int], tuple[int, str]]] = [
    # Before any worker was started.
    ([], {}, (75, NOTHING_STARTED)),
    # Before it could say so.
    ([], {0: 75, 1: -15}, (69, KILLED.replace("KILL", "TERM"))),
    ([(0, 75, ""), (1, 75, "")], {1: 75}, (75, "")),
    # One that was killed meanwhile could be the one that writes.
    ([(1, 75, "")], {0: -9, 1: 75}, (69, KILLED.replace("worker 1", "worker 0"))),
    # Done before the signal came.
    ([(0, 0, ""), (1, 0, "")], {}, (0, "")),
]


@pytest.mark.parametrize("asked, case", [*((False, case) for case in VERDICTS), *((True, case) for case in ASKED)])
def test_verdict(asked, case):
    """`asked`: whether the launcher was told to stop."""
    reports, deaths, expected = case
    outcome = Outcome([Report(*one) for one in reports], deaths, signal.SIGINT if asked else None)
    assert verdict(outcome, Orders(())) == expected


# -- requests


@pytest.fixture
def handlers():
    """Puts those of this process back."""
    before = {number: signal.getsignal(number) for number in signals.stop_signals()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def installed(grace: float | None = None) -> StopRequest:
    stop = StopRequest(grace=grace)
    stop.install()
    return stop


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_stop_request_waits_to_be_asked(number):
    stop = installed()
    assert not stop()
    signal.raise_signal(number)
    assert stop() and stop.signal is number
    signal.raise_signal(signal.SIGTERM)  # schedulers send several
    assert stop()


@pytest.mark.usefixtures("handlers")
def test_stop_after_is_a_signal_to_the_command_itself(capfd):
    stop = installed()
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


def test_the_clock_of_rank_0_alone_decides(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with stopped_after(60.0):
        assert not [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]


@pytest.mark.usefixtures("handlers")
def test_a_sigterm_after_a_death_is_not_announced_and_the_launchers_is_once(tmp_path, monkeypatch, capfd):
    """The launcher ends workers by SIGTERM when another is gone. A scheduler sends signals to all processes alike, and that of the
    launcher comes a little later."""
    monkeypatch.setenv("STAGERUN_REPORT_DIR", str(tmp_path))
    stop = installed()
    signal.raise_signal(signal.SIGTERM)
    assert stop() and capfd.readouterr().err == ""
    stopping.leave(tmp_path / "stop", [signal.SIGUSR1, time.monotonic()])
    for _ in range(2):
        signal.raise_signal(signal.SIGTERM)
    told = "SIGTERM: stopping after this iteration, to save"
    assert capfd.readouterr().err.strip() == told and stop.signal is signal.SIGTERM


def test_a_deadline_runs_from_the_first_signal(handlers):
    stop = installed(100.0)
    assert stop.left() is None
    signal.raise_signal(signal.SIGUSR1)
    first = stop.left()
    assert first is not None and 0 < first <= least_before(100.0) < 100, "our launcher would kill then"
    signal.raise_signal(signal.SIGTERM)
    assert stop.signal is signal.SIGUSR1 and stop.left() <= first
    patient = installed()
    signal.raise_signal(signal.SIGTERM)
    assert patient() and patient.left() is None


def child(work: Callable[[], None]) -> int:
    """The exit code of `work()` in a process of its own, which has a minute for it."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        try:
            work()
        finally:
            os._exit(99)  # it should have ended before
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def raised(stop: StopRequest) -> None:
    signal.raise_signal(signal.SIGTERM)


def while_the_main_thread_waits_outside_of_python(stop: StopRequest) -> None:
    aside(lambda: os.kill(os.getpid(), signal.SIGTERM) or time.sleep(60))


def where_a_thread_of_a_library_is_the_one_that_it_finds(stop: StopRequest) -> None:
    library = threading.Thread(target=threading.Event().wait, args=(60,), daemon=True)
    library.start()
    aside(lambda: signal.pthread_kill(library.ident or 0, signal.SIGTERM) or time.sleep(60))


@pytest.mark.parametrize(
    "comes",
    [raised, while_the_main_thread_waits_outside_of_python, where_a_thread_of_a_library_is_the_one_that_it_finds],
)
def test_before_anything_is_started_a_signal_ends_the_process(comes, capfd):
    def work() -> None:
        stop = StopRequest()
        stop.install(ExitCode.SAVED)
        comes(stop)

    assert child(work) == 75
    assert f"SIGTERM: {NOTHING_STARTED}" in capfd.readouterr().err


INT, TERM, USR1, SETTLED = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, 0


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        ((INT, TERM, TERM, USR1), 75),
        ((INT, TERM, TERM, USR1, INT), 130),
        ((INT, SETTLED, TERM), 75),
        ((INT, SETTLED, TERM, INT), 130),
    ],
)
def test_a_second_interrupt_ends_at_once_and_another_signal_does_not(sent, code):
    def work() -> None:
        stop = installed()
        for number in sent:
            signal.raise_signal(number) if number else stop.settle(ExitCode.PEER)
        os._exit(75)

    assert child(work) == code


@pytest.mark.parametrize("event", [Stopped(stage="a", iter=1, reason="asked"), RunFinished(trained=True, seconds=1.0)])
def test_an_interrupt_from_the_last_word_on_does_not_deny_it(event, tmp_path, monkeypatch, capfd):
    """Nor does a launcher that kills the worker then, and reads its report."""
    monkeypatch.setenv(stopping.REPORT_DIR, str(tmp_path))

    def interrupts(event: Event) -> None:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)

    def work() -> None:
        stop = installed()
        schedule = load(Path(__file__).parents[2] / "solvers" / "fashion_base")
        context = Context(schedule, "", SoloComm(), World(), torch.device("cpu"), None, stop, settle=stop.settle)
        output = Output(context, ExitStack())
        output.sinks.append(interrupts)
        output.show(event)

    code = ExitCode.SAVED if isinstance(event, Stopped) else ExitCode.DONE
    assert child(work) == code and capfd.readouterr().err == ""
    assert stopping.reports(tmp_path, 1) == [Report(0, code, "")]


# -- launcher and workers


def test_a_worker_that_comes_late_finds_the_request(tmp_path, monkeypatch, handlers):
    monkeypatch.setenv(stopping.REPORT_DIR, str(tmp_path))
    asked_at = time.monotonic()
    stopping.leave(tmp_path / "stop", [signal.SIGUSR1, asked_at])
    stop = installed(50.0)
    assert stop.signal is signal.SIGUSR1, "and not the SIGTERM by which the launcher passes it on"
    left = stop.left()
    assert left is not None and left <= 50.0 - (time.monotonic() - asked_at) + 1.0


# In the place of a worker: it hears signals, and hangs.
HANGS = """
import os, signal, sys, time
from pathlib import Path
from stagerun.launch.stopping import report
from stagerun.system import signals
rank, heard = int(os.environ["RANK"]), []
signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
signals.release()
Path(os.environ["STAGERUN_REPORT_DIR"], f"{rank}.pid").touch()
while True:
    time.sleep(0.1)
"""
# Rank 1 is killed; rank 0 hears of it, and takes longer to save than others get; as a worker's monitor it may have left its report by then.
SAVES = """
    if rank == 1 and (Path(os.environ["STAGERUN_REPORT_DIR"]) / "0.pid").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    if heard:
        if {first}:
            report(0, 69, "rank 1 is gone")
        time.sleep(2.5)
        Path(__file__).with_name("saved").touch()
        report(0, 69, "rank 1 is gone")
        os._exit(69)
"""


def launcher(
    tmp_path: Path, grace: float, numbers: list[int], leaves: str = "", worker: str = HANGS, others: float = 30.0
) -> int:
    """The exit code of a launcher of two workers that hang, which is sent these signals; `leaves`: the report of rank 0; `others`: the
    seconds of those that are left."""
    (tmp_path / "worker.py").write_text(worker)

    def told() -> None:
        while len(found := list(tmp_path.glob(f"{local.FOLDER_PREFIX}*/[01].pid"))) < 2:
            time.sleep(0.01)
        if leaves:
            (found[0].parent / "0.json").write_text(leaves)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.2)

    def launches() -> None:
        tempfile.tempdir, local.program = str(tmp_path), lambda module: [str(tmp_path / "worker.py")]
        local._END_S = others
        with signals.held():
            threading.Thread(target=told, daemon=True).start()
        code, text = run_workers(Orders((), 1, grace), 2)
        print(text, flush=True)
        os._exit(code)

    return child(launches)


@pytest.mark.parametrize("first", [False, True], ids=["saves_first", "reports_first"])
def test_rank_0_has_its_grace_to_save_when_another_is_gone(tmp_path, capfd, first):
    assert launcher(tmp_path, 60.0, [], worker=HANGS + SAVES.format(first=first), others=1.0) == 69
    assert (tmp_path / "saved").exists() and capfd.readouterr().out.startswith("worker 1 was killed by SIGKILL")


def test_the_launcher_ends_workers_whose_time_is_over(tmp_path, capfd):
    assert launcher(tmp_path, 0.5, [signal.SIGTERM]) == 69
    assert "workers did not end within 0 s of SIGTERM and were killed" in capfd.readouterr().out


@pytest.mark.parametrize("first", [[signal.SIGINT], [signal.SIGTERM, signal.SIGINT]])
@pytest.mark.parametrize("saved", [False, True])
def test_a_second_interrupt_of_the_launcher_ends_at_once(tmp_path, capfd, first, saved):
    leaves = '{"code": 75, "text": "all is saved"}' if saved else ""
    assert launcher(tmp_path, 60.0, [*first, signal.SIGINT], leaves) == (75 if saved else 130)
    assert ("all is saved" if saved else "ended without saving") in capfd.readouterr().out


def test_without_room_for_temporary_files_it_says_so(tmp_path):
    def work() -> None:
        tempfile.tempdir = str(tmp_path / "none")
        with pytest.raises(StorageError, match="no folder for temporary files in ") as caught:
            run_workers(Orders(()), 2)
        os._exit("TMPDIR" in caught.value.hint)

    assert child(work) == 1


def test_a_sigterm_of_the_launchers_before_anything_is_started_is_not_a_stop(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv(stopping.REPORT_DIR, str(tmp_path))
    (tmp_path / "1.json").write_text('{"code": 69, "text": "it can\'t be started"}')

    def work() -> None:
        StopRequest().install(ExitCode.SAVED)
        signal.raise_signal(signal.SIGTERM)

    assert child(work) == 69 and capfd.readouterr().err == ""
    outcome = Outcome(stopping.reports(tmp_path, 2), {0: 69, 1: 69})
    assert verdict(outcome, Orders(())) == (69, "it can't be started")
