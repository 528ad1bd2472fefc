"""Stopping in the midst of an iteration: who decides it, what all ranks make of it, and that not a bit is lost by it."""

import os
import signal
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import processes
import pytest
import small
import tiny
import torch
from engine_help import CPU, KNOBS, SOLVER, ConvNet, Threads, arithmetic, assert_same, cut, dataset, tensors
from facade import (
    Context,
    Determinism,
    Event,
    ExitCode,
    Keeper,
    Outcome,
    RunFinished,
    Stopped,
    Stopping,
    StorageError,
    Tested,
    TrainState,
    World,
    make_state,
    run,
    update,
)

from stagerun.comm import Comm, SoloComm, make_reducer, runs_of
from stagerun.engine.update import hopeless
from stagerun.language import load
from stagerun.launch import StopRequest, folder, local, run_workers
from stagerun.launch.folder import Report
from stagerun.launch.local import verdict
from stagerun.launch.stopping import least_before
from stagerun.system import signals
from stagerun.train.run import Output

NEVER = lambda done: False  # noqa: E731
NOTHING_STARTED = folder.nothing_started(ExitCode.SAVED)


# -- the decision


@pytest.mark.parametrize(
    "left, done, usual, expected",
    [
        (None, 0, None, False),  # no one asks
        (None, 3, 100.0, False),
        (1e9, 0, 1.0, True),  # nothing of the iteration is computed that could be lost
        (1e9, 1, None, True),  # the first iteration: nothing that isn't on disk already
        (35.0, 1, 40.0, False),  # a tenth longer than usual
        (33.0, 1, 40.0, True),
        (35.0, 1, 8.0, False),  # slower than ever: 10 s for the first of 4
        (33.0, 1, 8.0, True),
        (-5.0, 3, 40.0, True),
    ],
)
def test_when_an_iteration_is_hopeless(left: float | None, done: int, usual: float | None, expected: bool) -> None:
    assert hopeless(left, done, 4, 10.0, usual) is expected


# -- what all ranks make of it


def one_update(state: TrainState, comm: Comm, reducer, i: int, give_up=NEVER) -> Outcome:
    whole, run, size = dataset(8 * 12), runs_of(4, comm.size)[comm.rank], SOLVER.device_batch_size
    pieces = ((k, cut(whole, 8 * i + k * size, 8 * i + (k + 1) * size), k == run[-1]) for k in run)
    return update(state, pieces, KNOBS, reducer, arithmetic(SOLVER), lambda: False, give_up)


@pytest.mark.parametrize("determinism", list(Determinism))
@pytest.mark.parametrize("workers, rank, done", [(1, 0, 0), (1, 0, 3), (2, 0, 1), (2, 1, 0), (3, 0, 1), (3, 2, 0)])
def test_one_rank_breaks_off_and_all_leave_the_state_as_it_was(
    determinism: Determinism, workers: int, rank: int, done: int
) -> None:
    def work(comm: Comm) -> None:
        def fresh() -> tuple[TrainState, object]:
            state = make_state(ConvNet(dropout=0.3), SOLVER, CPU)
            return state, make_reducer(determinism, [p.tensor for p in state.solver.parameters], comm, 4)

        state, reducer = fresh()
        for i in range(3):
            assert not one_update(state, comm, reducer, i).broken_off
        expected = tensors(state)

        state, reducer = fresh()
        one_update(state, comm, reducer, 0)
        one_update(state, comm, reducer, 1)
        before = tensors(state)
        give_up = (lambda n: n == done) if comm.rank == rank else NEVER
        assert one_update(state, comm, reducer, 2, give_up).broken_off
        assert state.iter == 2
        assert_same(tensors(state), before)
        assert not one_update(state, comm, reducer, 2).broken_off
        assert_same(tensors(state), expected)

    Threads(workers).run(work)


def test_what_has_overflowed_is_not_kept_by_a_stop(tmp_path: Path) -> None:
    """The weights are infinite after the first update, which only the next one's loss would tell."""
    tiny.make_data(tmp_path / "data")
    init = 'base_lr: 1e25 weight_decay: 1e25 lr_policy: "fixed" max_iter: 6 on_nan: ROLLBACK'
    small.make_schedule(tmp_path / "schedule", tmp_path / "data", init=init)
    out = tmp_path / "out"
    for after in (("Iterated", 1), ("Iterated", 1)):  # the next process comes by there once more
        seen = live(tmp_path, out, after)
        last = seen[-1]
        assert isinstance(last, Stopped) and (last.stage, last.iter) == ("init", 0), last
        assert "overflowed" in last.reason and "broken off" in last.reason
    assert not any((out / "snapshots").iterdir())


def live(base: Path, out: Path, after: tuple[str, int] | None) -> list[Event]:
    """One life of a run in this process. It is asked to stop by the event of that kind (with that iteration), with no time left."""
    torch.set_num_threads(1)
    schedule = load(str(base / "schedule"), ())
    keeper = Keeper(schedule, out)
    keeper.open()
    seen: list[Event] = []
    told: list[bool] = []
    stopping = Stopping(lambda: 0.0 if told else None)
    try:
        for event in run(
            Context(schedule, str(out), SoloComm(), World(), CPU, keeper, lambda: bool(told), stopping=stopping)
        ):
            seen.append(event)
            if after is not None and (type(event).__name__, getattr(event, "iter", 0)) == after:
                told.append(True)
    finally:
        keeper.close()
    return seen


def test_runs_that_break_off_iterations_come_to_the_same_bits(tmp_path: Path) -> None:
    tiny.make_data(tmp_path / "data")
    small.make_schedule(tmp_path / "schedule", tmp_path / "data")
    assert isinstance(live(tmp_path, tmp_path / "straight", None)[-1], RunFinished)

    out = tmp_path / "out"
    for after, stage, iter in (
        (("RunStarted", 0), "init", 0),  # before a stage begins
        (("StageStarted", 0), "init", 0),  # its first iteration
        (("Iterated", 3), "init", 3),  # between two snapshots
        (("StageStarted", 3), "init", 3),  # where nothing was trained since the last one
        (("SnapshotDue", 4), "init", 4),  # while one is written
        (("TestDue", 4), "cyc1", 4),  # an evaluation
        (("Tested", 5), "collapse", 0),  # the stage is over
    ):
        last = live(tmp_path, out, after)[-1]
        assert isinstance(last, Stopped) and (last.stage, last.iter) == (stage, iter), after
    names = [folder.name for folder in (out / "snapshots").iterdir() if not folder.name.startswith(".")]
    assert not [name for name in names if "-00000000-" in name], "nothing was trained yet"
    assert isinstance(live(tmp_path, out, None)[-1], RunFinished)
    assert processes.ends(out) == processes.ends(tmp_path / "straight")


def test_what_was_evaluated_before_a_stop_is_not_evaluated_again(tmp_path: Path) -> None:
    """No snapshot is due at that iteration: the one that the stop writes knows of the evaluation."""
    tiny.make_data(tmp_path / "data")
    init = 'base_lr: 0.1 lr_policy: "fixed" max_iter: 4 snapshot: 2 test_interval: 3'
    small.make_schedule(tmp_path / "schedule", tmp_path / "data", init=init)
    last = live(tmp_path, tmp_path / "out", ("Tested", 3))[-1]
    assert isinstance(last, Stopped) and (last.stage, last.iter) == ("init", 3)
    again = [event for event in live(tmp_path, tmp_path / "out", ("Tested", 4)) if isinstance(event, Tested)]
    assert [(event.stage, event.iter) for event in again] == [("init", 4)]


# -- requests


@pytest.fixture
def handlers():
    """What this process does about stop signals is as before when the test is over."""
    before = {number: signal.getsignal(number) for number in signals.stop_signals()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_deadline_runs_from_the_first_signal(handlers: None) -> None:
    stop = StopRequest(grace=100.0)
    stop.install()
    assert stop.left() is None
    signal.raise_signal(signal.SIGUSR1)
    first = stop.left()
    assert first is not None and 0 < first <= least_before(100.0) < 100, "our launcher would kill then"
    signal.raise_signal(signal.SIGTERM)
    assert stop.signal is signal.SIGUSR1 and stop.left() <= first
    patient = StopRequest()
    patient.install()
    signal.raise_signal(signal.SIGTERM)
    assert patient() and patient.left() is None


def child(work) -> int:
    """The exit code of `work()` in a process of its own, which has a minute for it."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        try:
            work()
        finally:
            os._exit(99)  # it should have ended before
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_before_anything_is_started_a_signal_ends_the_process(capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        StopRequest().install(ExitCode.SAVED)
        signal.raise_signal(signal.SIGTERM)

    assert child(work) == 75
    assert f"SIGTERM: {NOTHING_STARTED}" in capfd.readouterr().err


def test_also_while_the_main_thread_waits_outside_of_python() -> None:
    def work() -> None:
        stop = StopRequest()
        stop.install(ExitCode.SAVED)
        with stop.watched():
            os.kill(os.getpid(), signal.SIGTERM)
            # The signal stays blocked for this thread, as in a library that restarts its calls.
            threading.Event().wait(60)

    assert child(work) == 75


def test_also_where_a_thread_of_a_library_is_the_one_that_the_signal_finds() -> None:
    def work() -> None:
        stop = StopRequest()
        stop.install(ExitCode.SAVED)
        library = threading.Thread(target=threading.Event().wait, args=(60,), daemon=True)
        library.start()
        with stop.watched():
            signal.pthread_kill(library.ident or 0, signal.SIGTERM)
            signal.sigtimedwait([signal.SIGUSR2], 60)  # in C, so that no handler runs

    assert child(work) == 75


def test_what_comes_when_the_wait_is_over_is_not_lost(handlers: None) -> None:
    stop = StopRequest()
    stop.install(ExitCode.SAVED)
    with stop.watched():
        stop.begin()
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.signal is signal.SIGTERM, "whichever thread has taken it"


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
def test_a_second_interrupt_ends_at_once_and_another_signal_does_not(sent: tuple[int, ...], code: int) -> None:
    def work() -> None:
        stop = StopRequest()
        stop.install()
        for number in sent:
            signal.raise_signal(number) if number else stop.settle(ExitCode.PEER)
        os._exit(75)

    assert child(work) == code


@pytest.mark.parametrize("event", [Stopped(stage="a", iter=1, reason="asked"), RunFinished(trained=True, seconds=1.0)])
def test_an_interrupt_from_the_last_word_on_does_not_deny_it(
    event: Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nor does a launcher that kills the worker then, and reads its report."""
    monkeypatch.setenv(folder.REPORT_DIR, str(tmp_path))

    def interrupts(event: Event) -> None:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)

    def work() -> None:
        stop = StopRequest()
        stop.install()
        schedule = load(Path(__file__).parents[2] / "solvers" / "fashion_base")
        context = Context(schedule, "", SoloComm(), World(), CPU, None, stop, settle=stop.settle)
        output = Output(context, ExitStack())
        output.sinks.append(interrupts)
        output.show(event)

    code = ExitCode.SAVED if isinstance(event, Stopped) else ExitCode.DONE
    assert child(work) == code and capfd.readouterr().err == ""
    assert folder.reports(tmp_path, 1) == [Report(0, code, "")]


# -- launcher and workers


def test_a_worker_that_enters_late_finds_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handlers: None
) -> None:
    monkeypatch.setenv(folder.REPORT_DIR, str(tmp_path))
    asked = folder.ask(tmp_path, signal.SIGUSR1)
    stop = StopRequest(grace=50.0)
    stop.install()
    assert stop.signal is signal.SIGUSR1, "and not the SIGTERM by which the launcher passes it on"
    left = stop.left()
    assert left is not None and left <= 50.0 - (time.monotonic() - asked.at) + 1.0


def test_signals_are_passed_on_to_children_that_have_entered_and_to_no_one_else(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        os.environ[folder.REPORT_DIR] = str(tmp_path)
        stop = StopRequest()
        stop.install()
        os.write(writing, b"x")
        while not stop():
            time.sleep(0.01)
        os._exit(75)
    os.read(reading, 1)
    (tmp_path / "1.pid").write_text("1")  # not a child of this process
    (tmp_path / "2.pid").write_text("never a number")
    folder.ask(tmp_path, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 75


# In the place of a worker: it enters, and hangs.
HANGS = """
import os, signal, sys, time
from stagerun.launch.folder import enter
from stagerun.system import signals
signal.signal(signal.SIGTERM, lambda *_: None)
signals.release()
enter(int(os.environ["RANK"]))
while True:
    time.sleep(1)
"""


def launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grace: float, numbers: list[int], leaves: str = ""
) -> int:
    """The exit code of a launcher of two workers that hang, which is sent these signals; `leaves`: the report of rank 0."""
    worker = tmp_path / "worker.py"
    worker.write_text(HANGS)
    monkeypatch.setattr(local, "program", lambda module: [str(worker)])

    def told() -> None:
        while (
            not (found := list(Path(tempfile.gettempdir()).glob(f"{local.FOLDER_PREFIX}*/[01].pid"))) or len(found) < 2
        ):
            time.sleep(0.01)
        if leaves:
            (found[0].parent / "0.json").write_text(leaves)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.2)

    def launches() -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        with signals.held():
            threading.Thread(target=told, daemon=True).start()
        code, text = run_workers([], 2, 1, grace=grace)
        print(text, flush=True)
        os._exit(code)

    return child(launches)


def test_the_launcher_ends_workers_whose_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launcher(tmp_path, monkeypatch, 0.5, [signal.SIGTERM]) == 69
    assert "workers had not ended 0 s after SIGTERM, and were killed" in capfd.readouterr().out


@pytest.mark.parametrize("first", [[signal.SIGINT], [signal.SIGTERM, signal.SIGINT]])
@pytest.mark.parametrize("saved", [False, True])
def test_a_second_interrupt_of_the_launcher_ends_at_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    first: list[signal.Signals],
    saved: bool,
) -> None:
    leaves = '{"code": 75, "text": "all is saved"}' if saved else ""
    assert launcher(tmp_path, monkeypatch, 60.0, [*first, signal.SIGINT], leaves) == (75 if saved else 130)
    assert ("all is saved" if saved else "ended without saving") in capfd.readouterr().err


def test_without_room_for_temporary_files_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(folder.REPORT_DIR, str(tmp_path / "gone"))
    folder.enter(0)  # the launcher is gone
    monkeypatch.setenv(folder.LAUNCHER_PID, str(os.getppid()))
    with pytest.raises(StorageError, match="no folder for temporary files in ") as caught:
        folder.enter(0)
    assert "TMPDIR" in caught.value.hint
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "gone"))
    with pytest.raises(StorageError, match="no folder for temporary files in "):
        run_workers(["run"], 2, 1)


def test_a_sigterm_of_the_launchers_before_anything_is_started_is_not_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(folder.REPORT_DIR, str(tmp_path))
    (tmp_path / "1.json").write_text('{"code": 69, "text": "it can\'t be started"}')

    def work() -> None:
        StopRequest().install(ExitCode.SAVED)
        signal.raise_signal(signal.SIGTERM)

    assert child(work) == 69 and capfd.readouterr().err == ""
    assert verdict(folder.reports(tmp_path, 2), {0: 69, 1: 69}) == (69, "it can't be started")


@pytest.mark.parametrize(
    "reports, deaths, asked, expected",
    [
        # Before any worker was started.
        ([], {}, True, (75, NOTHING_STARTED)),
        # Before it could say so.
        ([], {0: 75, 1: -15}, True, (69, "worker 1 was killed by SIGTERM")),
        ([], {1: 75}, False, (75, NOTHING_STARTED)),
        # One alone left before it met the others, who miss it.
        ([Report(0, 69, "peers are gone"), Report(1, 75, NOTHING_STARTED)], {1: 75}, False, (75, NOTHING_STARTED)),
        ([Report(0, 75, ""), Report(1, 75, "")], {1: 75}, True, (75, "")),
        # One that was killed meanwhile could be the one that writes.
        ([Report(1, 75, "")], {0: -9, 1: 75}, True, (69, "worker 0 was killed by SIGKILL")),
        # No one asked: the others were stopped since one had ended.
        (
            [Report(0, 75, NOTHING_STARTED)],
            {0: 75, 1: 70},
            False,
            (70, "worker 1 ended with exit code 70 and said nothing"),
        ),
        ([], {0: 75, 1: 65}, False, (65, "worker 1 ended with exit code 65 and said nothing")),
        # Done before the signal came.
        ([Report(0, 0, ""), Report(1, 0, "")], {}, True, (0, "")),
    ],
)
def test_the_verdict_on_a_stop(
    reports: list[Report], deaths: dict[int, int], asked: bool, expected: tuple[int, str]
) -> None:
    code, text = verdict(reports, deaths, asked)
    assert code == expected[0] and text.startswith(expected[1])
