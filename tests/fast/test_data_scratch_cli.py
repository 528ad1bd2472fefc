"""`stagerun data stage` and `unstage`, as a user types them."""

import os
import re
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from stagerun.cli import main
from stagerun.data.scratch import look, stage

HOME = f"stagerun-{os.getuid()}"


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    (tmp_path / "scratch").mkdir()
    return tmp_path / "scratch"


def data(*words: object) -> Result:
    before = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    }
    try:
        return CliRunner().invoke(main, ["data", *map(str, words)])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_schedules_images_ahead_of_its_run_and_away_again(base: Path, disk: Path) -> None:
    schedule, scratch = base / "schedule", f'data.scratch="{disk}"'
    done = data("stage", schedule, "--set", scratch, "--reserve", 0)
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert [re.sub(r"\d+ s, [\d.]+ .B/s", "T", line).partition(": copied, ")[0] for line in lines] == [
        str(base / "data" / f"{kind}_lmdb") for kind in ("train", "val")
    ]
    assert all(Path(line.rpartition(": ")[2], "data.mdb").exists() for line in lines)
    again = data("stage", schedule, "--scratch", disk, "--reserve", 0)
    assert again.output.count(": was there, ") == 2
    verified = data("stage", schedule, "--scratch", disk, "--reserve", 0, "--verify")
    assert verified.output.count("was there, and every byte is right, ") == 2
    planned = data("unstage", schedule, "--set", scratch, "--dry-run")
    assert planned.output.count("would be removed: copy of ") == 2
    removed = data("unstage", schedule, "--set", scratch)
    assert (
        removed.exit_code == 0
        and removed.output.count("\nremoved: copy of ") + removed.output.startswith("removed") == 2
    )
    assert list((disk / HOME).glob("*/*")) == []
    assert data("unstage", schedule, "--set", scratch).output == f"nothing to remove in {disk}\n"


def test_one_lmdb_used_by_another_and_all_of_them(base: Path, disk: Path) -> None:
    train, val = base / "data" / "train_lmdb", base / "data" / "val_lmdb"
    assert data("stage", train, "--scratch", disk, "--reserve", 0).exit_code == 0
    [used] = stage([look(str(val))], str(disk), 0)
    kept = data("unstage", "--all", "--scratch", disk)
    assert f"kept: it is in use: copy of {val}, " in kept.output and f"removed: copy of {train}, " in kept.output
    assert kept.exit_code == 0
    used.close()
    assert data("unstage", val, "--scratch", disk).output.startswith(f"removed: copy of {val}")


def test_mistakes(base: Path, disk: Path, tmp_path: Path) -> None:
    schedule, train = base / "schedule", base / "data" / "train_lmdb"
    (tmp_path / "empty").mkdir()
    for words, code, text in [
        (("stage", schedule), 64, "has no `scratch` under `data`"),
        (("stage", train), 64, "an LMDB needs --scratch"),
        (("stage", train, "--scratch", disk, "--set", "seed=1"), 64, "--set is for schedules, and there is no"),
        (("stage", tmp_path / "nowhere", "--scratch", disk), 65, "nowhere: no such folder"),
        (
            ("stage", tmp_path / "empty", "--scratch", disk),
            64,
            "(it has no schedule.prototxt) nor an LMDB's (no data.mdb)",
        ),
        (("stage", train / "data.mdb", "--scratch", disk), 64, "data.mdb: is not a folder"),
        (("stage", train, "--scratch", disk, "--reserve", "nan"), 64, "nan is not a number"),
        (("stage", train, "--scratch", disk, "--reserve", "inf"), 64, "inf is not a number"),
        (("stage", train, "--scratch", disk / "nowhere"), 74, "nowhere: no such folder"),
        (("stage", train, "--scratch", disk, "--reserve", 1e8), 74, "100000.0 TB stay free"),
        (("stage", train, "--scratch", disk, "--reserve", -1), 64, "--reserve"),
        (("unstage",), 64, "give DIR or --all"),
        (("unstage", train, "--all", "--scratch", disk), 64, "give DIR or --all"),
        (("unstage", "--all"), 64, "--all needs --scratch"),
        (("unstage", "--all", "--scratch", disk, "--set", "seed=1"), 64, "--all reads none"),
        (("unstage", tmp_path / "nowhere"), 64, "and an LMDB needs --scratch"),
    ]:
        done = data(*words)
        assert (done.exit_code, text in done.output) == (code, True), (words, done.output)
    assert not list(disk.glob("*/*/*"))
