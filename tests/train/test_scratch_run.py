"""Runs with copies on scratch disks: the same weights to the bit whichever way the images come, and nothing lost on the way."""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import processes
import pytest
from engine_help import Threads
from facade import Event, Note, StagerunError, Stopped
from test_run_trees import go

from stagerun.base.recipe import Data
from stagerun.comm import Comm
from stagerun.language import load
from stagerun.train.agreement import ToldByAnother
from stagerun.train.copying import Copying

HOME = f"stagerun-{os.getuid()}"


@pytest.fixture(scope="module")
def base(base):
    events(base, base / "plain", base)  # without scratch
    return base


@pytest.fixture
def disk(tmp_path):
    (tmp_path / "scratch").mkdir()
    return tmp_path / "scratch"


def options(disk: Path) -> tuple[str, ...]:
    return f'data.scratch="{disk}"', "data.cache=DISK", "data.scratch_reserve=0"


def events(base: Path, out: Path, disk: Path, stop: Callable[[], bool] = lambda: False) -> list[Event]:
    """Those of a run in this process."""
    said = options(disk) if disk != base else ("data.cache=DISK",)
    return go(base / "schedule", out, *said, stop=lambda seen: stop())


def notes(seen: list[Event], warning: bool = False) -> str:
    return "\n".join(event.text for event in seen if isinstance(event, Note) and event.warning is warning)


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """A lock held as another run would."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield fd
    finally:
        os.close(fd)


@pytest.mark.long
def test_copied_before_training(base, disk, tmp_path):
    seen = events(base, tmp_path / "out", disk)
    assert f"the images were copied to {disk}: 598.0 kB in" in notes(seen)
    assert processes.ends(tmp_path / "out") == processes.ends(base / "plain")
    assert len(list((disk / HOME).glob("*/data.mdb"))) == 2, "train and val, each once"
    again = events(base, tmp_path / "again", disk)
    assert f"the images are in {disk}" in notes(again) and not notes(again, warning=True)


@pytest.mark.long
def test_a_stop_while_images_are_copied_loses_nothing(base, disk, tmp_path):
    asked = count()
    events(base, tmp_path / "first", disk)
    copies = [folder.name for folder in (disk / HOME).iterdir() if folder.is_dir()]
    shutil.rmtree(disk / HOME)
    with ExitStack() as locks:
        for name in copies:
            locks.enter_context(locked(disk / HOME / f"{name}.lock"))
        seen = events(base, tmp_path / "out", disk, stop=lambda: next(asked) > 2)
    assert isinstance(seen[-1], Stopped) and (seen[-1].stage, seen[-1].iter) == ("init", 0)
    assert "the next run resumes the copy" in seen[-1].reason
    events(base, tmp_path / "out", disk)
    assert processes.ends(tmp_path / "out") == processes.ends(base / "plain")


def on_two_ranks(data: list[Data]) -> list[Any]:
    """What `Copying.first` gives on each rank: notes and whether it was stopped, or the error."""

    def work(comm: Comm) -> Any:
        mine, found = data[comm.rank], []
        try:
            steps = Copying(mine, [mine.train, *mine.val]).first(comm, lambda: False)
            while True:
                found.append(next(steps).text)
        except StopIteration as end:
            return found, end.value
        except StagerunError as error:
            return error

    return Threads(2).run(work)


@pytest.fixture
def data(base, disk):
    return load(str(base / "schedule"), options(disk)).data


def test_two_nodes_copy_each_for_itself(data, disk):
    (disk / "other").mkdir()
    (notes0, stopped0), (notes1, stopped1) = on_two_ranks([data, replace(data, scratch=str(disk / "other"))])
    assert not stopped0 and not stopped1 and notes0 == [notes0[-1]]
    assert "the images were copied to" in notes0[-1] and "the images were copied to" in notes1[-1]
    assert len(list(disk.glob(f"{HOME}/*/data.mdb"))) == len(list(disk.glob(f"other/{HOME}/*/data.mdb"))) == 2


@pytest.mark.parametrize("failing", [0, 1])
def test_one_nodes_error_ends_the_others_wait(data, disk, failing):
    sides = [data, data]
    sides[failing] = replace(data, scratch=str(disk / "gone"))
    with locked(disk / HOME / "lock"):  # the other would wait for ever
        ended = on_two_ranks(sides)
    assert [error.exit_code for error in ended] == [74, 74]
    assert "gone: no such folder" in ended[0].render() and isinstance(ended[1], ToldByAnother)
