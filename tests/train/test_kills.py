"""`stagerun verify DIR`: what it refuses, what it compares, and that it finds different what is. Its runs are in tests/process/test_verify_kills.py."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from stagerun.base.events import (
    Event,
    Iterated,
    NotFinite,
    RunFinished,
    RunStarted,
    StageFinished,
    StageStarted,
    Tested,
)
from stagerun.cli import main
from stagerun.language import load
from stagerun.plan.rehearsal import enough_logical_workers, interruptible
from stagerun.tools.verify.child import KILLS, STOP, strokes
from stagerun.tools.verify.command import VerifyOptions
from stagerun.tools.verify.kills import Course, End, Life, Verdict, compare_logs, render, resumed


@pytest.mark.parametrize(
    ("more", "code", "text"),
    [
        (("--then-workers", 2), 64, "with `determinism: ELASTIC` alone\n  hint: write that into schedule.prototxt, or `--set determinism=ELASTIC`"),
        (("--nproc", 5), 64, "5 workers are too many for stages"),
        (("--iters", 1), 64, "--iters must be 2 or more"),
        (("--kills", 0), 64, "--kills must be 1 or more"),
        (("--device-batch", 9), 64, "more than the schedule's device_batch_size of 4"),
        (("--set", "data.train.source=/nowhere"), 65, "`--synthetic` verifies with made-up images"),
        (("--proofs", 2), 64, "is a schedule, and OUT is not given"),
        (("--out", "out", "--kills", 2), 64, "--kills: "),
    ],
)  # fmt: skip
def test_what_is_refused(base: Path, more: tuple[object, ...], code: int, text: str) -> None:
    done = CliRunner().invoke(main, ["verify", str(base / "schedule"), *map(str, more)])
    assert done.exit_code == code and text in done.output, done.output


def test_it_is_not_for_a_launcher(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = CliRunner().invoke(main, ["verify", str(base / "schedule")])
    assert done.exit_code == 64 and "run it once, without a launcher" in done.output


def test_the_schedule_is_saved_inside_its_stages_and_adds_up_several_device_batches(base: Path) -> None:
    of = load(str(base / "schedule"))
    assert [enough_logical_workers(of, n) for n in (1, 2, 3, 4)] == [2, 3, 4, 4]
    for stage in interruptible(of, 6, 3, None).stages:
        assert 0 < stage.solver.snapshot < stage.solver.max_iter or stage.solver.max_iter == 1
        assert stage.solver.logical_workers == 3 and stage.solver.test_interval


def test_one_of_five_interruptions_is_a_stop_and_the_kills_take_turns() -> None:
    for seed in range(20):
        for number in range(1, 12):
            found = strokes(number, random.Random(seed))
            assert len(found) == number and found.count(STOP) == (0 if number == 1 else max(1, number // 5))
        assert sorted(found.count(kill) for kill in KILLS) == [2, 2, 2, 3]


END = RunFinished(trained=True, seconds=5.0)


def iterated(stage: str, iter: int, loss: float = 1.5, epoch: float = 0.1) -> Iterated:
    return Iterated(
        stage=stage, iter=iter, epoch=epoch, lr=0.1, momentum=0.9, weight_decay=0.0, loss=loss, images=8, seconds=0.1
    )


def started() -> RunStarted:
    return RunStarted(
        schedule="s", out="out", workers=1, device="cpu", threads=1, stages=("a", "b"), iterations=3, iterations_left=3, version="0"
    )  # fmt: skip


def score(top1: float, ema: bool = False) -> Tested:
    return Tested(stage="a", iter=2, images=100, top1=top1, top5=0.9, loss=1.25, seconds=3.0, ema=ema)


def finished(loss: float, name: str, seconds: float) -> StageFinished:
    return StageFinished(
        stage="a", iterations=2, epochs=0.1, first_lr=0.1, last_lr=0.1, weight_decay=0.0, augmentation="none", loss=loss, top1=0.5,
        top5=0.9, test_loss=1.25, train_seconds=seconds, images_per_second=9.0, snapshot=name,
    )  # fmt: skip


def log(*events: Event) -> list[tuple[float, Event]]:
    return [(10.0 + i, event) for i, event in enumerate(events)]


def test_what_is_left_of_a_run_is_known_from_the_straight_one() -> None:
    course = Course(log(started(), iterated("a", 1), iterated("a", 2), iterated("b", 1), score(0.5), END))
    assert [course.seconds_left(log(*events)) for events in ((), (iterated("a", 2),), (iterated("b", 1),))] == [5, 3, 2]


def test_each_loss_and_evaluation_of_each_life_is_compared_and_times_are_not() -> None:
    first = iterated("a", 1, 2.5)
    straight = log(first, iterated("a", 2, 2.25), score(0.5), score(0.625, True), finished(2.0, "a-1", 7.0))
    again = log(first, first, iterated("a", 2, 2.25), score(0.5), finished(2.0, "a-2", 8.0))
    assert compare_logs(straight, again) == (5, [])
    other = log(first, iterated("a", 1, 2.5000000000000004), score(0.625), finished(2.5, "a-2", 8.0), iterated("b", 1))
    assert compare_logs(straight, other)[1] == [
        "loss of a at iteration 1, epoch 0.1: 2.5 straight, 2.5000000000000004 interrupted",
        "evaluation of a at iteration 2: 0.5, 0.9, 1.25 straight, 0.625, 0.9, 1.25 interrupted",
        "result of a: 2.0, 0.5, 0.9, 1.25, None, None, None straight, 2.5, 0.5, 0.9, 1.25, None, None, None interrupted",
        "loss of b at iteration 1, epoch 0.1: nothing straight, 1.5 interrupted",
    ]


def test_iterations_that_a_rollback_has_again_are_others_than_those_before_it() -> None:
    back = NotFinite(
        stage="a", iter=2, lr=0.1, what="the loss is nan", done="ROLLBACK", number=1, most=3, position=16, images=8, seconds=0.1,
        back_to=1, snapshot="a-1",
    )  # fmt: skip
    first = [iterated("a", 1, 2.5, 0.1), iterated("a", 2, 2.25, 0.2), score(0.5)]
    after = [iterated("a", 2, 2.125, 0.4), score(0.625), iterated("a", 3, 2.0, 0.5)]
    straight = log(started(), *first, back, *after, END)
    assert compare_logs(straight, log(started(), *first, back, started(), first[1], back, *after, END)) == (9, [])
    other = log(*first, replace(back, back_to=0), iterated("a", 2, 2.25, 0.4), score(0.75))
    assert [text.partition(":")[0] for text in compare_logs(straight, other)[1]] == [
        "failure of a at iteration 2, image 16", "loss of a at iteration 2, epoch 0.4", "evaluation of a at iteration 2",
    ]  # fmt: skip


def test_a_life_that_began_from_the_seed_resumed_nothing() -> None:
    def begun(iter: int, start: str) -> StageStarted:
        return StageStarted(
            stage="a", number=1, iter=iter, max_iter=9, start=start, batch_size=8, device_batch_size=4, carried_over=""
        )

    assert not resumed(log(started(), begun(0, "seed 1"), iterated("a", 1), begun(1, "a-1")))
    assert resumed(log(started(), begun(1, "a-1"))) and resumed(log(started(), begun(0, "init-3")))
    assert resumed(log(started(), score(0.5))) and not resumed(log(started()))


def test_what_differs_is_told() -> None:
    lives = [Life(2, "", False, "SIGKILL to rank 0", 69), Life(2, "init-2", True, "", 0)]
    ends = End(2, "a" * 64, ()), End(2, "b" * 64, ())
    found = Verdict(
        "s", "DIFFERENT", True, lives, {"init": ends}, {"device": "cpu"}, 9, ["loss of init at iteration 1"], True
    )
    text = render(found, VerifyOptions("s"))
    assert "init   2           aaaaaaaaaaaaaaaa  bbbbbbbbbbbbbbbb    DIFFERENT" in text
    assert "DIFFERENT: interrupted does not equal uninterrupted (1 interruption in 2 lives, 1 of which resumed" in text
    assert "An uninterrupted run repeats itself here" in text and "On a CPU it should" in text
