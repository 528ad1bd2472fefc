"""DAWNBench's table, TensorBoard's files and the options for them, for made-up events."""

import errno
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from log_help import (
    BRANCH,
    SCHEDULE,
    evaluated,
    feed,
    finished,
    iterated,
    make,
    points,
    run_started,
    stage_started,
    table,
    trained,
)

from stagerun.base.errors import StorageError, UsageError
from stagerun.base.events import Event, StageFinished
from stagerun.plan import Plan
from stagerun.train.logs import whole_file
from stagerun.train.logs.course import course
from stagerun.train.logs.dawnbench import DawnBench
from stagerun.train.logs.table import LOGS, require_evaluation, require_packages
from stagerun.train.logs.tensorboard import TensorBoard
from stagerun.train.options import RunOptions

# -- DAWNBench


def dawnbench(out: Path, plan: Plan, *results: StageFinished, warned: list[str] | None = None) -> DawnBench:
    said = warned if warned is not None else []
    images = {stage.name: 50 for stage in plan.schedule.stages}
    return DawnBench(out, course(plan), images, results, said.append)


def test_dawnbench_has_a_row_for_each_evaluation_of_all_images(tmp_path: Path) -> None:
    feed(
        dawnbench(tmp_path, make()),
        stage_started("trunk"),
        trained("trunk", range(1, 6)),
        evaluated("trunk", 5, 0.25, seconds=1000.0),
        trained("trunk", range(6, 8)),
        evaluated("trunk", 7, 0.3, images=40),
        trained("trunk", range(8, 9)),
        evaluated("trunk", 8, 0.5),
        finished("trunk", 8, 0.5, 8 * 36.0),
        stage_started("collapse"),
        trained("collapse", range(1, 5)),
        finished("collapse", 4, 0.75, 4 * 36.0),
    )
    assert table(tmp_path / "dawnbench.tsv") == [
        ["1", "0.05000000", "25.00", "90.00"],
        ["1.6", "0.08000000", "50.00", "90.00"],
        ["2.4", "0.12000000", "75.00", "90.00"],
    ]


def test_dawnbench_after_a_kill_goes_on_from_the_snapshot(tmp_path: Path) -> None:
    feed(
        dawnbench(tmp_path, make()),
        stage_started("trunk"),
        trained("trunk", range(1, 3)),
        evaluated("trunk", 2, 0.2),
        trained("trunk", range(3, 5)),
        evaluated("trunk", 4, 0.4),
    )
    log = dawnbench(tmp_path, make())
    assert len(table(tmp_path / "dawnbench.tsv")) == 2
    feed(log, stage_started("trunk", 3, train_seconds=3 * 36.0))
    assert len(table(tmp_path / "dawnbench.tsv")) == 1
    feed(log, iterated("trunk", 4, seconds=72.0), evaluated("trunk", 4, 0.41))
    assert [row[:3] for row in table(tmp_path / "dawnbench.tsv")] == [
        ["0.4", "0.02000000", "20.00"],
        ["0.8", "0.05000000", "41.00"],
    ]
    feed(dawnbench(tmp_path, make()), stage_started("trunk"))
    assert table(tmp_path / "dawnbench.tsv") == [], "trained from the seed again"


def test_dawnbench_takes_finished_stages_from_their_results(tmp_path: Path) -> None:
    plan = make(SCHEDULE + BRANCH)
    trunk, early = finished("trunk", 8, 0.5, 360.0), finished("early", 4, 0.6, 72.0)
    dawnbench(tmp_path, plan, trunk, early)
    assert [row[:2] for row in table(tmp_path / "dawnbench-collapse.tsv")] == [["1.6", "0.10000000"]]
    assert [row[:2] for row in table(tmp_path / "dawnbench-early.tsv")] == [
        ["1.6", "0.10000000"],
        ["2.4", "0.12000000"],
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dawnbench-collapse.tsv", "dawnbench-early.tsv"]


def test_dawnbench_waits_for_the_result_of_an_ancestor(tmp_path: Path) -> None:
    log = dawnbench(tmp_path, make(), finished("collapse", 4, 0.75, 36.0))
    assert not (tmp_path / "dawnbench.tsv").exists()
    feed(log, evaluated("trunk", 8, 0.5), finished("trunk", 8, 0.5, 36.0))
    assert [row[:2] for row in table(tmp_path / "dawnbench.tsv")] == [["1.6", "0.01000000"], ["2.4", "0.02000000"]]


def test_dawnbench_of_averaged_weights(tmp_path: Path) -> None:
    feed(
        dawnbench(tmp_path, make()),
        stage_started("trunk"),
        iterated("trunk", 1),
        evaluated("trunk", 1, 0.2),
        evaluated("trunk", 1, 0.3, ema=True),
        finished("trunk", 8, 0.5, 36.0, ema_top1=0.6, ema_top5=0.95),
    )
    assert [row[2] for row in table(tmp_path / "dawnbench.tsv")] == ["20.00", "50.00"]
    assert [row[2] for row in table(tmp_path / "dawnbench.ema.tsv")] == ["30.00", "60.00"]


def test_dawnbench_says_that_it_leaves_foreign_lines_out(tmp_path: Path) -> None:
    (tmp_path / "dawnbench.tsv").write_text("epoch\thours\ttop1Accuracy\ttop5Accuracy\n0.4\t0.1\t20.0\nmine\n")
    said: list[str] = []
    feed(dawnbench(tmp_path, make(), warned=said), stage_started("trunk", 2))
    assert len(said) == 1 and "2 lines" in said[0]
    assert table(tmp_path / "dawnbench.tsv") == []


def test_a_full_disk_is_told_once_and_no_row_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    log = dawnbench(tmp_path, make(), warned=said)
    write = whole_file.write_atomic

    def full(*_: object) -> None:
        raise StorageError("no space left")

    monkeypatch.setattr(whole_file, "write_atomic", full)
    feed(log, stage_started("trunk"), iterated("trunk", 1), evaluated("trunk", 1, 0.2), evaluated("trunk", 2, 0.3))
    assert len(said) == 1 and said[0].startswith("warning: ") and "dawnbench.tsv can't be written: no space" in said[0]
    monkeypatch.setattr(whole_file, "write_atomic", write)
    feed(log, evaluated("trunk", 2, 0.3))
    assert [row[2] for row in table(tmp_path / "dawnbench.tsv")] == ["20.00", "30.00"]


# -- TensorBoard


def tensorboard(folder: Path, *events: Event | Iterator[Event], warned: list[str] | None = None) -> None:
    """One process life."""
    pytest.importorskip("tensorboard")
    said = warned if warned is not None else []
    with TensorBoard(folder, course(make(SCHEDULE + BRANCH)), said.append) as log:
        feed(log, run_started(), *events)


def test_tensorboard_has_a_run_for_each_stage_along_its_path(tmp_path: Path) -> None:
    tensorboard(
        tmp_path,
        stage_started("trunk"),
        trained("trunk", range(1, 9)),
        stage_started("collapse"),
        trained("collapse", range(1, 3)),
        evaluated("collapse", 2, 0.5),
        evaluated("collapse", 2, 0.75, ema=True),
        stage_started("early"),
        iterated("early", 1, seconds=0.0),
    )
    assert points(tmp_path / "trunk", "train/loss") == [(i, 2 + i / 100) for i in range(1, 9)]
    assert points(tmp_path / "collapse", "train/lr") == [(9, 0.5), (10, 0.5)]
    assert points(tmp_path / "collapse", "train/images_per_second") == [(9, 0.55556), (10, 0.55556)]
    assert points(tmp_path / "collapse", "test/top1") == [(10, 0.5)]
    assert points(tmp_path / "collapse", "test_ema/top1") == [(10, 0.75)]
    assert points(tmp_path / "early", "train/momentum") == [(9, 0.9)], "beside the other branch"


def test_tensorboard_after_a_kill_has_each_point_once(tmp_path: Path) -> None:
    tensorboard(tmp_path, stage_started("trunk"), trained("trunk", range(1, 6)), evaluated("trunk", 5, 0.5))
    file = next((tmp_path / "trunk").iterdir())
    file.write_bytes(file.read_bytes()[:-7])  # killed while writing
    for life in (3, 2):
        again = (iterated("trunk", i, loss=9.0) for i in range(life + 1, 7))
        tensorboard(tmp_path, stage_started("trunk", life), again)
    assert points(tmp_path / "trunk", "train/loss") == [(1, 2.01), (2, 2.02), (3, 9), (4, 9), (5, 9), (6, 9)]
    assert len(list((tmp_path / "trunk").iterdir())) == 3


def test_tensorboard_on_a_full_disk_keeps_whole_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    said: list[str] = []
    with TensorBoard(tmp_path, course(make()), said.append) as log:
        feed(log, stage_started("trunk"), iterated("trunk", 1))
        file = log.files["trunk"]
        whole = file.file

        class Full:
            """Room for 5 bytes more."""

            def write(self, data: bytes) -> int:
                return whole.write(data[:5])

            def __getattr__(self, name: str) -> Any:
                return getattr(whole, name)

        file.file = Full()  # type: ignore[assignment]
        feed(log, iterated("trunk", 2), iterated("trunk", 3))
        file.file = whole
        assert file.path.stat().st_size == file.size, "no part of a record is left"
        feed(log, iterated("trunk", 4))
    assert len(said) == 1 and os.strerror(errno.ENOSPC) in said[0]
    assert [step for step, _ in points(tmp_path / "trunk", "train/loss")] == [1, 4]


def test_tensorboard_that_cant_make_its_files_lets_training_go_on(tmp_path: Path) -> None:
    (tmp_path / "trunk").touch()  # where its folder is to be
    said: list[str] = []
    tensorboard(tmp_path, stage_started("trunk"), trained("trunk", range(1, 4)), warned=said)
    assert len(said) == 1 and "training goes on" in said[0]
    if importlib.util.find_spec("tensorboard"):
        with pytest.raises(StorageError):
            TensorBoard(tmp_path / "trunk", course(make()), print)


# -- the command


def test_a_worker_gets_the_same_options() -> None:
    options = RunOptions("dir", nproc=2, threads=1, log_format="caffe", log=("dawnbench", "mllog"))
    words = " ".join(options.arguments())
    assert "--log-format caffe" in words and "--log dawnbench --log mllog" in words


def test_a_package_that_is_missing_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError) as caught:
        require_packages(list(LOGS))
    assert caught.value.message == "`--log tensorboard` needs the package tensorboard"
    assert caught.value.hint == "pip install 'stagerun[tensorboard]'"


def test_a_table_of_evaluations_needs_evaluations() -> None:
    plan = make(SCHEDULE.replace('val { source: "/d/val" images: 50 }', ""))
    with pytest.raises(UsageError, match=r"without `data\.val` nothing is evaluated"):
        require_evaluation(["mllog", "dawnbench"], plan.schedule)
    require_evaluation(["mllog"], plan.schedule)
    require_evaluation(["dawnbench"], make().schedule)
