"""The loop of a stage: its events, and where it stops; and evaluation."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_help import CPU, SOLVER, Batch, Linear, Threads, arithmetic, assert_same, cut, dataset, tensors
from facade import Determinism, Iterated, Knobs, Normalise, Precision, StageLoop, Transform, evaluate, make_state, train
from torch import nn

from stagerun.comm import SoloComm, make_reducer, runs_of


def stage_loop(comm=None, **changes) -> StageLoop:
    comm = comm or SoloComm()
    loop = StageLoop(
        stage="cyc1",
        max_iter=9,
        batch_size=8,
        epoch_images=40,
        start_position=20,
        logical_workers=runs_of(4, comm.size)[comm.rank],
        knobs=lambda i: Knobs(0.01 * (i + 1), 0.9 - 0.01 * i, 0.001 * i),
        snapshot=3,
        test_interval=4,
        arithmetic=arithmetic(SOLVER),
    )
    return replace(loop, **changes)


def device_batches(loop: StageLoop, first: int = 0):
    """What this rank gets, from iteration `first` on; and a record of what was asked for."""
    data = dataset(8 * 12)
    for i in range(first, 12):
        for k in loop.logical_workers:
            yield cut(data, 8 * i + 2 * k, 8 * i + 2 * k + 2)


def go(loop, state, comm=None, stop=lambda: False, batches=None):
    comm = comm or SoloComm()
    reducer = make_reducer(Determinism.FIXED, [p.tensor for p in state.solver.parameters], comm, 4)
    return list(train(loop, state, batches or device_batches(loop, state.iter), reducer, stop))


def short(events) -> list[tuple[str, int]]:
    return [(type(event).__name__, event.iter) for event in events]


def test_events_come_in_order_and_say_what_each_update_was_done_with():
    state = make_state(Linear(), SOLVER, CPU)
    events = go(stage_loop(), state)
    expected = [
        [("Iterated", i), *DUE.get(i, [])] for i in range(1, 10)
    ]  # nothing at 9: the end of the stage sees to it
    assert short(events) == [event for each in expected for event in each] and state.iter == 9
    for event in (e for e in events if isinstance(e, Iterated)):
        i = event.iter - 1
        assert (event.lr, event.momentum, event.weight_decay) == (0.01 * (i + 1), 0.9 - 0.01 * i, 0.001 * i)
        assert (event.stage, event.epoch, event.images) == ("cyc1", (20 + 8 * event.iter) / 40, 8)
        assert math.isfinite(event.loss) and event.seconds >= 0
    together = short(go(stage_loop(snapshot=2, test_interval=2, max_iter=4), make_state(Linear(), SOLVER, CPU)))
    assert together[1:] == [("Iterated", 2), ("SnapshotDue", 2), ("TestDue", 2), ("Iterated", 3), ("Iterated", 4)]


DUE = {3: [("SnapshotDue", 3)], 4: [("TestDue", 4)], 6: [("SnapshotDue", 6)], 8: [("TestDue", 8)]}


@pytest.mark.parametrize("after", [3, 5])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_all_ranks_stop_after_the_update_in_which_one_was_told(workers, after):
    """Where a snapshot is due, too, it is a stop only."""

    def work(comm):
        calls = []

        def stop() -> bool:
            calls.append(None)
            return comm.rank == comm.size - 1 and len(calls) == after

        state = make_state(Linear(), SOLVER, CPU)
        events = go(stage_loop(comm), state, comm, stop)
        return short(events), state.iter, len(calls), tensors(state)

    for events, iteration, calls, weights in (answers := Threads(workers).run(work)):
        assert events[-2:] == [("Iterated", after), ("Stopped", after)]
        assert iteration == calls == after
        assert_same(weights, answers[0][3])


# -- evaluation


class Scores(nn.Module):
    """Answers with what is written in the first pixels of the image."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.modes: list[bool] = []

    def forward(self, x):
        self.modes.append(self.training)
        return x.flatten(1)[:, : self.classes].clone()


def scored(images: np.ndarray, labels: np.ndarray, classes: int) -> tuple[float, float, float]:
    """top1, top5 and loss in numpy, one image after another."""
    top1 = top5 = 0
    loss = 0.0
    for image, label in zip(images, labels, strict=True):
        scores = image.reshape(-1)[:classes].astype(float) * 0.01
        order = np.argsort(-scores, kind="stable")
        top1 += order[0] == label
        top5 += label in order[:5]
        loss += np.log(np.exp(scores).sum()) - scores[label]
    n = len(labels)
    return top1 / n, top5 / n, loss / n


def distinct(n: int, classes: int) -> Batch:
    """Images without equal scores among their first pixels: where two are equal the order is nobody's business."""
    rng = np.random.default_rng(3)
    images = np.stack([rng.permutation(256)[:36].astype(np.uint8).reshape(6, 6, 1) for _ in range(n)])
    return Batch(images, rng.integers(0, classes, n), np.arange(n))


def batches_of(data: Batch, size: int, comm):
    count = -(-len(data.labels) // size)
    for number in runs_of(count, comm.size)[comm.rank]:
        yield number, cut(data, number * size, (number + 1) * size)


def evaluated(comm, data, size, classes, stop=lambda: False):
    normalise, model = Normalise(Transform(scale=0.01), 1, CPU, torch.float64, False), Scores(classes)
    count = -(-len(data.labels) // size)
    network, measure = evaluate.Classifier(model, normalise, Precision.FP64), evaluate.Measure(normalise)
    score = evaluate.score(network, batches_of(data, size, comm), count, measure, comm, stop)
    assert not any(model.modes)
    return score


@pytest.mark.parametrize("classes", [3, 12])
@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_each_image_counts_once_whatever_the_workers_and_the_last_batch(workers, classes):
    data = distinct(23, classes)
    top1, top5, loss = scored(data.images, data.labels, classes)
    assert 0 < top1 < 1 and (top5 == 1) == (classes == 3)
    scores = Threads(workers).run(lambda comm: evaluated(comm, data, 4, classes))  # 6 batches, the last of 3
    assert set(scores) == {evaluated(SoloComm(), data, 4, classes)}  # the same bits
    assert (scores[0].images, scores[0].top1, scores[0].top5) == (23, top1, top5)
    assert scores[0].loss == pytest.approx(loss, rel=1e-12)
    first = data.images.reshape(23, -1)[:, :classes].argmax(1)
    hits = [
        [np.sum((data.labels == c) & (first == c)), np.sum(data.labels == c), np.sum(first == c)]
        for c in range(classes)
    ]
    recalls, f1s = [r / n for r, n, _ in hits if n], [2 * r / (n + a) for r, n, a in hits if n + a]
    assert scores[0].balanced_accuracy == pytest.approx(np.mean(recalls), rel=1e-12)
    assert scores[0].macro_f1 == pytest.approx(np.mean(f1s), rel=1e-12) and f1s != recalls
    # A rank that is told to stop leaves no score anywhere.
    stopped = Threads(workers).run(lambda comm: evaluated(comm, data, 4, classes, stop=lambda: comm.rank == 0))
    assert stopped == [None] * workers
