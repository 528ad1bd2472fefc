"""lr_policy `plateau`: Intel Caffe's rule, what a run says of it, and that interruptions and the number of workers are no matter."""

from dataclasses import dataclass, field

import nan_help
import processes
import pytest
import tiny
from facade import FRESH, Event, Iterated, Note, Solver, StageFinished, follow_losses
from hypothesis import given
from hypothesis import strategies as st
from test_run_trees import go, of

from stagerun import language
from stagerun.schedule import make_knobs

WINDOWS = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


def solver(windows: tuple[int, ...], average_loss: int = 1, warm_up: int = 0) -> Solver:
    fixed = {"batch_size": 1, "device_batch_size": 1, "random_seed": 0, "test_batch_size": 1, "max_iter": 100}
    return Solver(
        base_lr=0.8, lr_policy="plateau", gamma=0.5, plateau_winsize=windows, average_loss=average_loss, warmup_iter=warm_up, **fixed
    )  # fmt: skip


@dataclass
class Caffe:
    """`Solver::UpdateSmoothedLoss` and the branch `plateau` of `SGDSolver::GetLearningRate`, statement by statement."""

    windows: tuple[int, ...]
    average_loss: int
    warm_up: int
    iter: int = 0
    current_step: int = 0
    iter_last_event: int = 0
    minimum_loss: float = float("inf")
    losses: list[float] = field(default_factory=list)

    def rate(self, loss: float) -> float:
        if len(self.losses) < self.average_loss:
            self.losses.append(loss)
        else:
            self.losses[self.iter % self.average_loss] = loss
        smoothed = sum(self.losses) / len(self.losses)
        rate = self.iter * 0.8 / max(self.warm_up, 1)
        if self.iter >= self.warm_up:
            if smoothed < self.minimum_loss:
                self.minimum_loss = smoothed
                self.iter_last_event = self.iter
            if self.current_step < len(self.windows):
                iter_next_step = self.iter_last_event + self.windows[self.current_step]
                if self.iter >= iter_next_step:
                    self.current_step += 1
                    self.iter_last_event = self.iter
            rate = 0.8 * 0.5**self.current_step
        self.iter += 1
        return rate


# Eighths add up without rounding, so that a running sum, a list in another order and a mean taken anew are one number.
@given(st.lists(st.integers(0, 16).map(lambda n: n / 8), max_size=60), WINDOWS, st.integers(1, 5), st.integers(0, 9))
def test_the_rule_is_caffes(losses, windows, average_loss, warm_up):
    settings, caffe, state = solver(windows, average_loss, warm_up), Caffe(windows, average_loss, warm_up), FRESH
    knobs = make_knobs(settings)
    for iter, loss in enumerate(losses):
        state = follow_losses(state, settings, iter, loss)
        assert knobs(iter, state.drops).lr == pytest.approx(caffe.rate(loss), rel=1e-15)
        assert state.drops <= len(windows) and len(state.losses) <= average_loss


PLATEAU = """base_lr: 0.1 lr_policy: "plateau" gamma: 0.1 max_iter: 13 warmup_iter: 1 warmup_start_lr: 0.05 average_loss: 3
plateau_winsize: 2 plateau_winsize: 1 plateau_winsize: 3"""


@pytest.fixture(scope="module")
def base(tmp_path_factory, data):
    """data/ and schedule/, of one stage."""
    base = tmp_path_factory.mktemp("plateau")
    text = tiny.SCHEDULE.format(data=data, train=tiny.TRAIN_IMAGES, val=tiny.VAL_IMAGES)
    text = (
        text[: text.index("stage {")].replace("snapshot: 3", "snapshot: 4").replace("batch_size: 32", "batch_size: 8")
    )
    (base / "schedule").mkdir()
    (base / "schedule" / "schedule.prototxt").write_text(text + 'determinism: ELASTIC stage { name: "only" }\n')
    (base / "schedule" / "only.prototxt").write_text(PLATEAU)
    return base


@pytest.fixture(scope="module")
def whole(base):
    """An uninterrupted run of one worker, in base/whole."""
    return go(base / "schedule", base / "whole")


def drops(seen: list[Event]) -> list[str]:
    return [e.text for e in seen if isinstance(e, Note) and "LR" in e.text]


def test_stopped_after_every_fourth_update_it_drops_where_it_would_have(base, whole, tmp_path):
    schedule, lives = language.load(base / "schedule"), []
    while not any(isinstance(e, StageFinished) for e in lives):
        lives += go(base / "schedule", tmp_path / "parts", stop=lambda seen: len(of(seen, Iterated)) >= 3)
    rates = [(e.iter, e.lr, e.loss) for e in whole if isinstance(e, Iterated)]
    assert len({lr for _, lr, _ in rates[1:]}) >= 3, "or the test shows nothing"
    assert [(e.iter, e.lr, e.loss) for e in lives if isinstance(e, Iterated)] == rates
    assert drops(lives) == drops(whole) and "LR 0.1 -> 0.01 at iteration" in drops(whole)[0]
    assert processes.ends(tmp_path / "parts") == processes.ends(base / "whole")
    ends = [next(e for e in seen if isinstance(e, StageFinished)) for seen in (lives, whole)]
    assert ends[0].last_lr == ends[1].last_lr == rates[-1][1]
    state = FRESH
    for iter, lr, loss in rates:
        state = follow_losses(state, schedule.stages[0].solver, iter - 1, loss)
        assert make_knobs(schedule.stages[0].solver)(iter - 1, state.drops).lr == lr


def test_two_workers_decide_as_one_does(base, whole, tmp_path):
    seen = nan_help.lives(base / "schedule", tmp_path / "out", 2)
    assert [(e.iter, e.lr, e.loss) for e in of(seen, Iterated)] == [(e.iter, e.lr, e.loss) for e in of(whole, Iterated)]
    assert processes.ends(tmp_path / "out") == processes.ends(base / "whole")
