"""Reading a log: what has been read bit by bit is what one reading finds, however it is damaged; and Student's t."""

import json
import os
import random
from pathlib import Path

import made_schedules
import pytest
from drawn import examples
from facade import Event, Failed, Note, NotFinite, Reader, StorageError, UsageError, incidents_of, make_picture, t95
from hypothesis import given
from hypothesis import strategies as st
from log_help import stage_started
from long_log import line, write_log
from made_up_runs import BATCH, STAGES, Story, killed_and_resumed, report

MOST = 50


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A log with branches, restarts, lines that aren't a run's, and one that begins a stage once more."""
    out = write_log(tmp_path_factory.mktemp("log"), make_picture(made_schedules.branches()), restarts=3, ema=True)
    data = (out / "log.jsonl").read_bytes()
    half = data.index(b"\n", len(data) // 2) + 1
    again = line(2e9, stage_started("main", 0)).encode()
    return data[:half] + b'{"time": 1e9, "event": "New"}\n{"ti\n\n' + data[half:] + again + b'{"time"'


def read(reader: Reader) -> object:
    try:
        return reader.read()
    except UsageError:
        return None


def write(out: Path, data: bytes) -> None:
    with open(out / "log.jsonl", "ab") as file:
        file.write(data)


@given(st.data())
@examples(20)
def test_bit_by_bit_it_is_what_one_reading_finds(whole, tmp_path_factory, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=4)))
    out = tmp_path_factory.mktemp("out")
    reader = Reader(out, MOST)
    write(out, b"")
    for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        write(out, whole[begin:end])
        assert read(reader) == read(Reader(out, MOST))


@pytest.mark.parametrize("how", ["replaced", "cut short"])
def test_another_log_is_read_from_its_start(how, whole, tmp_path):
    write(tmp_path, whole)
    reader, log = Reader(tmp_path, MOST), tmp_path / "log.jsonl"
    reader.read()
    other = whole[: whole.index(b"\n", len(whole) // 2) + 1].replace(b'"loss": ', b'"loss": 1')
    if how == "replaced":
        (tmp_path / "new").write_bytes(other + other)
        os.replace(tmp_path / "new", log)
    else:
        log.write_bytes(other)
    assert reader.read() == read(Reader(tmp_path, MOST))


def test_a_pipe_in_place_of_the_log_is_not_waited_for(tmp_path, whole):
    reader = Reader(tmp_path, MOST)
    write(tmp_path, whole)
    assert reader.read().lives
    (tmp_path / "log.jsonl").unlink()
    os.mkfifo(tmp_path / "log.jsonl")  # which no one writes to
    with pytest.raises(StorageError, match="not a regular file"):
        reader.read()


def incidents(out: Path, *more: Event) -> list[tuple[str, int]]:
    write_log(out, make_picture(made_schedules.steps()), share=0.5, restarts=1)
    write(out, "".join(line(2e9, event) for event in more).encode())
    return [(one.kind, one.iter) for one in incidents_of(Reader(out).read())]


def test_what_has_happened_has_its_place(tmp_path):
    stages = list(make_picture(made_schedules.steps()).stages.values())
    stage, half = stages[0], sum(stage.iterations for stage in stages) // 2
    fails = NotFinite(
        stage=stage.name, iter=30, lr=0.1, what="the loss", done="ROLLBACK", number=1, most=3, position=0, images=1, seconds=1.0,
        back_to=20,
    )  # fmt: skip
    before = [("warning", half // 2), ("restart", half // 2)]
    assert incidents(tmp_path / "plain", Note(text="plain"), Failed(code=1, text="no space")) == before
    assert incidents(tmp_path / "fails", fails) == [("rollback", 20)], "what was undone is not shown"
    assert incidents(tmp_path, stage_started(stage.name, 0)) == [], "a stage that starts over loses its incidents"


def test_curves_are_thin_and_the_rest_is_over_every_iteration(tmp_path, monkeypatch):
    monkeypatch.setitem(STAGES, "init", (3000, 0.1))
    story = Story(tmp_path / "out").begin()
    story.start("init", None)
    story.train("init", 1, 2000, 0)
    story.train("init", 1501, 3000, 0, loss=1000.0)  # killed; the line that says where it goes on is lost
    found = Reader(tmp_path / "out", points=MOST).read()
    (life,), init = found.lives, found.stages[0]
    assert (len(init.updates["iter"]), init.images_per_second, init.seconds) == (3000, BATCH, 3000.0)
    assert (life.updates, life.again, life.seconds) == (3500, 500, 3500.0)
    assert [(n, part.stop - part.start) for n, part in init.by_epoch()] == [(n, 4) for n in range(1, 751)]
    assert [iter for iter, _ in init.losses] == [60 * n + 30.5 for n in range(50)]
    for iter, loss in init.losses:  # a mean, of what counts alone
        assert loss == pytest.approx((2.0 if iter < 1500 else 1000.0) - 0.1 * iter)


@pytest.mark.parametrize("number", ["1-2", "1e", "9" * 400, "1e999", "NaN", "true", '"2"'])
def test_a_number_that_is_none_makes_its_line_a_damaged_one(tmp_path, number):
    story = Story(tmp_path / "out").begin()
    story.start("init", None)
    story.train("init", 1, 4, 0)
    path = tmp_path / "out" / "log.jsonl"
    path.write_text(path.read_text().replace('"loss": 1.7', f'"loss": {number}'))
    found = Reader(tmp_path / "out").read()
    assert found.damaged == 1 and [iter for iter, _ in found.stages[0].losses] == [1, 2, 4]


@pytest.mark.long
def test_no_log_however_damaged_is_a_bug(tmp_path):
    """Lines with values changed at random: a report or one clear message."""
    killed_and_resumed(tmp_path / "out")
    log = tmp_path / "out" / "log.jsonl"
    whole, rng = log.read_text().splitlines(), random.Random(7)
    odd = ["", "x", -1, 0, 1, 7, 1e300, -1e300, 1e-300, None, True, [], ["init"], {}, "init", "cyc1-00000004-a0001"]
    for _ in range(150):
        lines = []
        for said in whole:
            record = json.loads(said) if said.endswith("}") else {}
            if record and rng.random() < 0.3:
                record[rng.choice(list(record))] = rng.choice(odd)
                said = json.dumps(record)
            lines += [] if rng.random() < 0.1 else [said]
        rng.shuffle(lines)
        log.write_text("\n".join(lines))
        for by in ("run", "stage", "epoch", "iteration", "life", "seed"):
            assert report(tmp_path / "out", "--by", by).exit_code in (0, 64)


@pytest.mark.parametrize(
    "freedom, value", [(1, 12.7062), (4, 2.7764), (9, 2.2622), (10, 2.2281), (20, 2.0860), (120, 1.9799)]
)
def test_students_t(freedom, value):
    """Against tables, at both sides of where the expansion begins."""
    assert t95(freedom) == pytest.approx(value, abs=1e-3)
