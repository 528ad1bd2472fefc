"""A run's history by epochs. Pure."""

from dataclasses import dataclass

from stagerun.events import Tested
from stagerun.report.history import History, Span, StageHistory
from stagerun.report.thin import epoch_number


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """`number` is 1-based, along the path of ancestors; an update that straddles two epochs counts to the later one.
    `branch` is the first stage of its branch. The accuracies are of the last evaluation, None where there was none.
    `partial`: the stage was not trained to its end, and this is where it stopped.
    """

    number: int
    branch: str
    stages: tuple[str, ...]
    partial: bool
    lr: float
    loss: float
    top1: float | None
    test_loss: float | None
    ema_top1: float | None
    images_per_second: float | None
    seconds: float


def epochs(history: History) -> list[Epoch]:
    """Branch after branch. Where one stage alone follows from another, an epoch may hold parts of both."""
    pieces: dict[tuple[str, int], list[tuple[StageHistory, Span]]] = {}
    branches = _branches(history)
    for stage in history.stages:
        for number, span in (stage.trained.epochs if stage.trained else {}).items():
            pieces.setdefault((branches[stage.name], number), []).append((stage, span))
    return [_epoch(number, branch, held) for (branch, number), held in pieces.items()]


def _branches(history: History) -> dict[str, str]:
    """Stage -> the first stage of its branch: a stage alone in starting from another, at its end, goes on with its branch."""
    begun = [s for s in history.stages if s.trained]
    parents = [parent.name for s in begun if (parent := history.follows(s)) is not None]
    found: dict[str, str] = {}
    for stage in begun:
        parent = history.follows(stage)
        alone = parent is not None and parents.count(parent.name) == 1
        found[stage.name] = found.get(parent.name, stage.name) if parent is not None and alone else stage.name
    return found


def _epoch(number: int, branch: str, held: list[tuple[StageHistory, Span]]) -> Epoch:
    spans = [span for _, span in held]
    seconds = sum(span.seconds for span in spans)
    tests: dict[bool, Tested] = {}
    for stage, _ in held:
        tests |= {test.ema: test for epoch, test in stage.tests if epoch_number(epoch) == number}
    own, averaged = tests.get(False), tests.get(True)
    last = held[-1][0]
    stopped = last.finished is None and last.iter < last.max_iter
    return Epoch(
        number=number,
        branch=branch,
        partial=stopped and last.trained is not None and number == max(last.trained.epochs),
        stages=tuple(stage.name for stage, _ in held),
        lr=spans[-1].lr,
        loss=sum(span.loss for span in spans) / sum(span.updates for span in spans),
        top1=own.top1 if own else None,
        test_loss=own.loss if own else None,
        ema_top1=averaged.top1 if averaged else None,
        images_per_second=sum(span.images for span in spans) / seconds if seconds else None,
        seconds=seconds,
    )
