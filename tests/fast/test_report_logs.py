"""TensorBoard's files and the options of logs, for made-up events."""

import errno
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import contract
import pytest
from facade import Event, StorageError, TensorBoard
from log_help import (
    BRANCH,
    SCHEDULE,
    evaluated,
    feed,
    iterated,
    make,
    points,
    room,
    run_started,
    stage_started,
    trained,
)

from stagerun.logs.table import Opened

# -- TensorBoard


def tensorboard(folder: Path, *events: Event | Iterator[Event], warned: list[str] | None = None) -> None:
    """One process life."""
    pytest.importorskip("tensorboard")
    said = warned if warned is not None else []
    with TensorBoard(folder, {"trunk": 0, "collapse": 8, "early": 8}, said.append) as log:
        feed(log, run_started(), *events)


def test_tensorboard_has_a_run_for_each_stage_along_its_path(tmp_path):
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


def test_tensorboard_after_a_kill_has_each_point_once(tmp_path):
    tensorboard(tmp_path, stage_started("trunk"), trained("trunk", range(1, 6)), evaluated("trunk", 5, 0.5))
    file = next((tmp_path / "trunk").iterdir())
    file.write_bytes(file.read_bytes()[:-7])  # killed while writing
    for life in (3, 2):
        again = (iterated("trunk", i, loss=9.0) for i in range(life + 1, 7))
        tensorboard(tmp_path, stage_started("trunk", life), again)
    assert points(tmp_path / "trunk", "train/loss") == [(1, 2.01), (2, 2.02), (3, 9), (4, 9), (5, 9), (6, 9)]
    assert len(list((tmp_path / "trunk").iterdir())) == 3


def test_tensorboard_on_a_full_disk_keeps_whole_records(tmp_path):
    pytest.importorskip("tensorboard")
    said: list[str] = []
    with TensorBoard(tmp_path, {"trunk": 0}, said.append) as log:
        feed(log, stage_started("trunk"), iterated("trunk", 1))
        (file,) = (tmp_path / "trunk").iterdir()
        with room(file.stat().st_size + 5):
            feed(log, iterated("trunk", 2), iterated("trunk", 3))
        feed(log, iterated("trunk", 4))
    assert len(said) == 1 and os.strerror(errno.ENOSPC) in said[0]
    assert [step for step, _ in points(tmp_path / "trunk", "train/loss")] == [1, 4]


def test_tensorboard_that_cant_make_its_files_lets_training_go_on(tmp_path):
    (tmp_path / "trunk").touch()  # where its folder is to be
    said: list[str] = []
    tensorboard(tmp_path, stage_started("trunk"), trained("trunk", range(1, 4)), warned=said)
    assert len(said) == 1 and "training continues" in said[0]
    if importlib.util.find_spec("tensorboard"):
        with pytest.raises(StorageError):
            TensorBoard(tmp_path / "trunk", {"trunk": 0}, print)


def test_the_place_of_a_stage_is_along_its_path():
    plan = make(SCHEDULE + BRANCH + 'ensemble { name: "both" members: ["collapse", "early"] }')
    assert Opened(plan, Path(), print).iterations_before() == {"trunk": 0, "collapse": 8, "early": 8, "both": 12}


# -- the command


def test_a_package_that_is_missing_is_told_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # it can't be imported
    (tmp_path / "schedule.prototxt").write_text(SCHEDULE)
    refused = contract.stagerun(["run", ".", "--log", "tensorboard"], tmp_path)
    said = "`--log tensorboard` needs the package tensorboard\n  hint: pip install 'stagerun[tensorboard]'\n"
    assert (refused.exit_code, refused.stderr) == (64, said)
    assert [file.name for file in tmp_path.iterdir()] == ["schedule.prototxt"]
