"""`stagerun verify-resume`: that it finds equal what is, and different what is not, counts what it did, and leaves nothing behind."""

import json
import random
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import processes
import pytest
import small
import tiny
from click.testing import CliRunner

from stagerun.base.errors import FolderInUseError, UsageError
from stagerun.base.events import (
    Event,
    Iterated,
    Note,
    NotFinite,
    RunFinished,
    RunStarted,
    StageFinished,
    StageStarted,
    Tested,
)
from stagerun.cli import main
from stagerun.data.write import write_lmdb
from stagerun.language import load
from stagerun.language.proto import caffe_pb2
from stagerun.plan.rehearsal import enough_logical_workers, interruptible
from stagerun.store import lock
from stagerun.store.throw_away import claim
from stagerun.tools.verify_resume import command as verifying
from stagerun.tools.verify_resume.interruption import KILLS, STOP, Course, Stroke, course_of, strokes
from stagerun.tools.verify_resume.verdict import (
    Compared,
    Ends,
    Lived,
    VerifyOptions,
    as_record,
    compare_logs,
    promises,
    render,
    went_on,
)
from stagerun.train.log_file import Tail


def words(schedule: Path, out: Path, *more: object) -> list[str]:
    return [str(w) for w in ("verify-resume", schedule, "--out", out, "--threads", 1, *more)]


# -- the whole, whose real runs are in tests/process/test_verify_resume_runs.py


@pytest.fixture
def as_before() -> Iterator[None]:
    """The handlers of signals, which the command sets in this process."""
    held = {number: signal.getsignal(number) for number in signal.valid_signals()}
    yield
    for number, handler in held.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.mark.slow
@pytest.mark.usefixtures("as_before")
def test_other_bits_are_found_and_told(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is interrupted sees other images here, which the command does not know."""
    stored = np.load(tiny.STORED)

    def turned(i: int) -> bytes:
        image, label = stored["images"][i][::-1], int(stored["labels"][i])
        return caffe_pb2.Datum(channels=1, height=28, width=28, data=image.tobytes(), label=label).SerializeToString()

    write_lmdb(str(tmp_path / "turned"), [turned(i) for i in range(tiny.TRAIN_IMAGES)])
    honest = VerifyOptions.life_arguments

    def other(self: VerifyOptions, out: Path, batches: int, threads: int) -> list[str]:
        changed = ["--set", f"data.train.source={tmp_path / 'turned'}"] if out.name.startswith("interrupted") else []
        return [*honest(self, out, batches, threads), *changed]

    monkeypatch.setattr(VerifyOptions, "life_arguments", other)
    short = ("--kills", 1, "--iters", 2)
    done = CliRunner().invoke(main, words(base / "schedule", tmp_path / "out", *short))
    assert done.exit_code == 70, done.output
    assert "DIFFERENT: interrupted does not equal uninterrupted (1 interruption in " in done.output
    assert "An uninterrupted run repeats itself here" in done.output
    assert "On a CPU it should" in done.output and "loss of init at iteration 1: " in done.output
    lines = {
        line.split()[0]: line.split()[-1] for line in done.output.splitlines() if line.startswith(("init ", "early "))
    }
    assert lines == {"init": "DIFFERENT", "early": "DIFFERENT"}


@pytest.mark.process
@pytest.mark.slow
def test_ctrl_c_ends_all_and_leaves_nothing(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run = processes.Run(words(base / "schedule", out, "--nproc", 2, "--iters", 6)).start()
    small.wait_for(out / ".verify-resume" / "work" / "straight" / "log.jsonl", run, timeout=600)
    run.process.send_signal(signal.SIGINT)
    code, said = run.wait()
    assert code == 130 and "Traceback" not in said, said
    assert run.gone() and list(out.iterdir()) == []


# -- what is refused


@pytest.mark.parametrize(
    ("more", "code", "text"),
    [
        (("--then-workers", 2), 64, "with `determinism: ELASTIC` alone\n  hint: write that into schedule.prototxt, or `--set determinism=ELASTIC`"),
        (("--nproc", 5), 64, "5 workers are too many for stages"),
        (("--iters", 1), 64, "--iters must be 2 or more"),
        (("--kills", 0), 64, "--kills must be 1 or more"),
        (("--device-batch", 9), 64, "more than the schedule's device_batch_size of 4"),
        (("--set", "data.train.source=/nowhere"), 65, "`--synthetic` verifies with made-up images"),
    ],
)  # fmt: skip
def test_what_is_refused(base: Path, tmp_path: Path, more: tuple[object, ...], code: int, text: str) -> None:
    done = CliRunner().invoke(main, words(base / "schedule", tmp_path / "out", *more))
    assert done.exit_code == code and text in done.output, done.output
    assert not (tmp_path / "out").exists()


def test_it_is_not_for_a_launcher(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = CliRunner().invoke(main, words(base / "schedule", tmp_path / "out"))
    assert done.exit_code == 64 and "run it once, without a launcher" in done.output


# -- the schedule cut down, the moments, what is compared


def test_the_schedule_is_saved_inside_its_stages_and_adds_up_several_device_batches(base: Path) -> None:
    of = load(str(base / "schedule"))
    assert [enough_logical_workers(of, n) for n in (1, 2, 3, 4)] == [2, 3, 4, 4]
    short = interruptible(of, 6, 3, None)
    for stage in short.stages:
        assert 0 < stage.solver.snapshot < stage.solver.max_iter or stage.solver.max_iter == 1
        assert stage.solver.logical_workers == 3 and stage.solver.test_interval


END = RunFinished(trained=True, seconds=5.0)


def iterated(stage: str, iter: int, loss: float = 1.5) -> Iterated:
    return Iterated(
        stage=stage, iter=iter, epoch=0.1, lr=0.1, momentum=0.9, weight_decay=0.0, loss=loss, images=8, seconds=0.1
    )


def started() -> RunStarted:
    return RunStarted(
        schedule="s", out="out", workers=1, device="cpu", threads=1, stages=("a", "b"), iterations=3, iterations_left=3, version="0"
    )  # fmt: skip


def log(*events: Event) -> list[tuple[float, Event]]:
    return [(10.0 + i, event) for i, event in enumerate(events)]


def test_moments_are_spread_over_the_whole_run() -> None:
    events = log(started(), iterated("a", 1), iterated("a", 2), iterated("b", 1), Note(text="evaluated"), END)
    course = course_of(events)
    assert course.places == {("a", 1, 0.1): 1, ("a", 2, 0.1): 2, ("b", 1, 0.1): 3} and course.seconds == 5.0
    assert course.place(3) == "after iteration 1 of b"
    late = 0
    for seed in range(100):
        rng = random.Random(seed)
        first, second, last = course.moment(0, 5, rng), course.moment(2, 3, rng), course.moment(3, 1, rng)
        assert first.done == 0 and first.delay <= 1
        assert second.done == 2 and second.delay <= 1
        assert last.done == 3 and last.delay <= 2
        late += last.delay > 1
    assert 20 < late < 80, "half of the time after the last iteration is evaluation"
    assert Course((5.0,), 5.0).moment(0, 2, random.Random(1)).delay == 0, "a clock that stood still"
    assert course.moment(99, 1, random.Random(1)).done == 3, "trained once more than the other run did"


def test_a_log_of_several_lives_is_no_course() -> None:
    with pytest.raises(ValueError, match="one uninterrupted"):
        course_of(log(started(), iterated("a", 1), started(), END))


def test_one_of_five_interruptions_is_a_stop_and_the_kills_take_turns() -> None:
    for seed in range(20):
        for number in range(1, 12):
            found = strokes(number, random.Random(seed))
            assert len(found) == number and found.count(STOP) == (0 if number == 1 else max(1, number // 5))
        assert sorted(found.count(kill) for kill in KILLS) == [2, 2, 2, 3]


def score(top1: float, ema: bool = False) -> Tested:
    return Tested(stage="a", iter=2, images=100, top1=top1, top5=0.9, loss=1.25, seconds=3.0, ema=ema)


def finished(loss: float, name: str, seconds: float) -> StageFinished:
    return StageFinished(
        stage="a", iterations=2, epochs=0.1, first_lr=0.1, last_lr=0.1, weight_decay=0.0, augmentation="none", loss=loss, top1=0.5,
        top5=0.9, test_loss=1.25, train_seconds=seconds, images_per_second=9.0, snapshot=name,
    )  # fmt: skip


def test_each_loss_and_evaluation_of_each_life_is_compared_and_times_are_not() -> None:
    straight = log(
        iterated("a", 1, 2.5), iterated("a", 2, 2.25), score(0.5), score(0.625, True), finished(2.0, "a-1", 7.0)
    )
    again = log(
        iterated("a", 1, 2.5), iterated("a", 1, 2.5), iterated("a", 2, 2.25), score(0.5), finished(2.0, "a-2", 8.0)
    )
    same = compare_logs(straight, again)
    assert (same.losses, same.tests, same.different) == (3, 2, ())
    other = log(
        iterated("a", 1, 2.5),
        iterated("a", 1, 2.5000000000000004),
        score(0.625),
        finished(2.5, "a-2", 8.0),
        iterated("b", 1),
    )
    assert compare_logs(straight, other).different == (
        "loss of a at iteration 1: 2.5 straight, 2.5000000000000004 interrupted",
        "evaluation of a at iteration 2: 0.5, 0.9, 1.25 straight, 0.625, 0.9, 1.25 interrupted",
        "result of a at iteration 2: 2.0, 0.5, 0.9, 1.25, None, None, None straight, "
        "2.5, 0.5, 0.9, 1.25, None, None, None interrupted",
        "loss of b at iteration 1: nothing straight, 1.5 interrupted",
    )  # fmt: skip


def back(stage: str, iter: int, back_to: int, number: int = 1, what: str = "the loss is nan") -> NotFinite:
    return NotFinite(
        stage=stage, iter=iter, lr=0.1, what=what, done="ROLLBACK", number=number, most=3, position=8 * iter, images=8, seconds=0.1,
        back_to=back_to, snapshot="a-1",
    )  # fmt: skip


def test_iterations_that_a_rollback_has_again_are_others_than_those_before_it() -> None:
    def at(iter: int, epoch: float, loss: float) -> Iterated:
        return replace(iterated("a", iter, loss), epoch=epoch)

    first = [at(1, 0.1, 2.5), at(2, 0.2, 2.25), score(0.5)]
    after = [at(2, 0.4, 2.125), score(0.625), at(3, 0.5, 2.0)]
    straight = log(started(), *first, back("a", 2, 1), *after, END)
    course = course_of(straight)
    assert [course.done(event) for _, event in straight] == [0, 1, 2, 0, 0, 3, 0, 4, 0]
    assert course.place(3) == "after iteration 2 of a"
    cut_short = log(started(), *first, back("a", 2, 1), started(), first[1], back("a", 2, 1), *after, END)
    assert compare_logs(straight, cut_short) == Compared(5, 2, ())
    other = log(*first, back("a", 2, 0), at(2, 0.4, 2.25), score(0.75))
    assert compare_logs(straight, other).different == (
        "failure of a at iteration 2: 'the loss is nan', 0.1, 'ROLLBACK', 1, 1 straight, "
        "'the loss is nan', 0.1, 'ROLLBACK', 1, 0 interrupted",
        "loss of a at iteration 2: 2.125 straight, 2.25 interrupted",
        "evaluation of a at iteration 2: 0.5, 0.9, 1.25 or 0.625, 0.9, 1.25 straight, 0.75, 0.9, 1.25 interrupted",
    )


def test_a_life_that_began_from_the_seed_went_on_from_nothing() -> None:
    def begun(iter: int, start: str) -> StageStarted:
        return StageStarted(
            stage="a", number=1, iter=iter, max_iter=9, start=start, batch_size=8, device_batch_size=4, carried_over=""
        )

    assert not went_on(log(started(), begun(0, "seed 1"), iterated("a", 1), back("a", 1, 1), begun(1, "a-1")))
    assert went_on(log(started(), begun(1, "a-1"))) and went_on(log(started(), begun(0, "init-3")))
    assert went_on(log(started(), score(0.5))) and not went_on(log(started()))


@pytest.mark.parametrize(("rounds", "right"), [(2, True), (99, True), (1, False)])
def test_nothing_is_bit_exact_where_nothing_went_on(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds: int, right: bool
) -> None:
    """Among the interrupted runs those that before the number `rounds` always begin anew. Nothing is run here."""
    of = load(str(base / "schedule"))
    options = VerifyOptions(str(base), (), None, 1, 0, 2, None, None, True, 1, 1, True)
    whole = log(started(), iterated("a", 1), END)
    trial = verifying._Trial(options, of, tmp_path, 1)
    done: list[int] = []

    def straight(out: Path) -> tuple[verifying._Round, float]:
        return verifying._Round(out, Tail(out), list(whole)), 1.0

    def interrupted(out: Path, course: Course, left: list[Stroke]) -> verifying._Round:
        done.append(len(left))
        for hit in (*left, None):
            trial.lives.append(Lived(1, "", hit is None and len(done) >= rounds, "", "hit" if hit else "", "", 0))
        left.clear()
        events = whole if right else log(started(), iterated("a", 1, 9.0), END)
        return verifying._Round(out, Tail(out), list(events))

    monkeypatch.setattr(trial, "_straight", straight)
    monkeypatch.setattr(trial, "_round", interrupted)
    monkeypatch.setattr(trial, "_ends", lambda out: Ends({}, {}, {"device": "cpu"}))
    if rounds > 9:
        with pytest.raises(UsageError, match=r"none of 12 lives went on from a snapshot") as caught:
            trial.verdict()
        assert "--kills" in (caught.value.hint or "") and 1 < len(done) <= verifying.VAIN
        return
    verdict = trial.verdict()
    assert done == [1] * rounds and verdict.went_on == 1 and verdict.equal == right
    assert "1 of which went on from a snapshot" in render(verdict) and json.loads(as_record(verdict))["went_on"] == 1


def test_who_waited_for_a_lock_that_was_deleted_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the opening of the lock's file and the lock its holder leaves, and another comes."""
    folder, others = tmp_path / "x", ExitStack()
    first = ExitStack()
    claim(folder, "work", first)
    honest = lock._try

    def late(fd: int) -> bool:
        monkeypatch.setattr(lock, "_try", honest)
        first.close()
        assert not folder.exists()
        (claim(folder, "work", others) / "theirs").touch()
        return honest(fd)

    monkeypatch.setattr(lock, "_try", late)
    with pytest.raises(FolderInUseError), ExitStack() as mine:
        claim(folder, "work", mine)
    assert (folder / "work" / "theirs").exists()
    others.close()
    assert not folder.exists()


def test_a_folder_that_is_left_before_its_lock_is_opened_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, first = tmp_path / "x", ExitStack()
    claim(folder, "work", first)
    honest = lock.Lock.acquire

    def late(self: lock.Lock) -> None:
        monkeypatch.setattr(lock.Lock, "acquire", honest)
        first.close()
        assert not folder.exists()
        honest(self)

    monkeypatch.setattr(lock.Lock, "acquire", late)
    with ExitStack() as mine:
        assert claim(folder, "work", mine).is_dir()
    assert not folder.exists()


def test_what_a_life_promised_is_read_from_its_log() -> None:
    notes = log(
        Note(text="resume is BIT-EXACT: same"),
        Note(text="else"),
        Note(text="resume is EQUIVALENT, not BIT-EXACT: threads"),
    )
    assert promises(notes) == ["resume is BIT-EXACT: same", "resume is EQUIVALENT, not BIT-EXACT: threads"]
