"""Stopping in the midst of an iteration: who decides it, what all ranks make of it, and that not a bit is lost by it."""

from pathlib import Path
from typing import Any

import processes
import pytest
import small
from engine_help import SOLVER, ConvNet, Threads, assert_same, dataset, tensors, updates
from facade import Determinism, Event, Outcome, RunFinished, Stopped, Stopping, Tested, TrainState, hopeless
from test_run_trees import go

from stagerun.comm import Comm

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
def test_when_an_iteration_is_hopeless(left, done, usual, expected):
    assert hopeless(left, done, 4, 10.0, usual) is expected


# -- what all ranks make of it


@pytest.mark.parametrize("determinism", list(Determinism))
@pytest.mark.parametrize("workers, rank, done", [(1, 0, 0), (1, 0, 3), (2, 0, 1), (2, 1, 0), (3, 0, 1), (3, 2, 0)])
def test_one_rank_breaks_off_and_all_leave_the_state_as_it_was(determinism, workers, rank, done):
    batches = [dataset(8, seed=i) for i in range(3)]

    def work(comm: Comm) -> None:
        def trained(first: int, last: int, **more: Any) -> tuple[TrainState, list[Outcome]]:
            return updates(ConvNet(dropout=0.3), SOLVER, batches[first:last], comm, determinism, **more)

        straight, (state, _) = trained(0, 3)[0], trained(0, 2)
        before = tensors(state)
        _, (outcome,) = trained(2, 3, state=state, broken_off=lambda n: comm.rank == rank and n == done)
        assert outcome.broken_off and state.iter == 2
        assert_same(tensors(state), before)
        _, (outcome,) = trained(2, 3, state=state)
        assert not outcome.broken_off
        assert_same(tensors(state), tensors(straight))

    Threads(workers).run(work)


def test_what_has_overflowed_is_not_kept_by_a_stop(tmp_path, data):
    """The weights are infinite after the first update, which only the next one's loss would tell."""
    init = 'base_lr: 1e25 weight_decay: 1e25 lr_policy: "fixed" max_iter: 6 on_nan: ROLLBACK'
    small.make_schedule(tmp_path / "schedule", data, init=init)
    out = tmp_path / "out"
    for after in (("Iterated", 1), ("Iterated", 1)):  # the next process comes by there once more
        seen = live(tmp_path, out, after)
        last = seen[-1]
        assert isinstance(last, Stopped) and (last.stage, last.iter) == ("init", 0), last
        assert "overflowed" in last.reason and "broken off" in last.reason
    assert not any((out / "snapshots").iterdir())


def live(base: Path, out: Path, after: tuple[str, int] | None) -> list[Event]:
    """One life of a run in this process. It is asked to stop by the event of that kind (with that iteration), with no time left."""
    told: list[bool] = []

    def at(event: Event) -> None:
        if (type(event).__name__, getattr(event, "iter", 0)) == after:
            told.append(True)

    stopping = Stopping(lambda: 0.0 if told else None)
    return go(base / "schedule", out, stop=lambda seen: bool(told), at=at, stopping=stopping)


def test_runs_that_break_off_iterations_come_to_the_same_bits(tmp_path, data):
    small.make_schedule(tmp_path / "schedule", data)
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


def test_what_was_evaluated_before_a_stop_is_not_evaluated_again(tmp_path, data):
    """No snapshot is due at that iteration: the one that the stop writes knows of the evaluation."""
    init = 'base_lr: 0.1 lr_policy: "fixed" max_iter: 4 snapshot: 2 test_interval: 3'
    small.make_schedule(tmp_path / "schedule", data, init=init)
    last = live(tmp_path, tmp_path / "out", ("Tested", 3))[-1]
    assert isinstance(last, Stopped) and (last.stage, last.iter) == ("init", 3)
    again = [event for event in live(tmp_path, tmp_path / "out", ("Tested", 4)) if isinstance(event, Tested)]
    assert [(event.stage, event.iter) for event in again] == [("init", 4)]
