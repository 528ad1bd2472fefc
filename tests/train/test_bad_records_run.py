"""Bad records that are replaced: counted over all workers and lives of a run, named in its log, forgotten when they are mended."""

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import small
import tiny
import torch

from stagerun.base import order
from stagerun.base.errors import DataError
from stagerun.base.recipe import Data, OnBadRecord, Source
from stagerun.comm import SoloComm
from stagerun.data.records import LmdbSource
from stagerun.data.write import write_lmdb
from stagerun.language import load
from stagerun.system.world import World
from stagerun.train.keeper import Keeper, Selection
from stagerun.train.progress import STATE, progress_of
from stagerun.train.walk import run

SEED = 1
# 7 iterations of 16 images: of each the first worker of two has the first 8. One record of the 600 may be bad.
STAGE = 'base_lr: 0.02 lr_policy: "fixed" max_iter: 7 snapshot: {}'


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    whole = tmp_path_factory.mktemp("whole")
    tiny.make_data(whole)
    return whole


def record(position: int) -> int:
    return int(order.indices(SEED, tiny.TRAIN_IMAGES, position, 1, True)[0])


def damaged(folder: Path, whole: Path, positions: Sequence[int]) -> Path:
    """The images of `whole`, those that come at the positions no Datums."""
    source = LmdbSource(str(whole / "train_lmdb"))
    values = [source.get(i)[1] for i in range(len(source))]
    for position in positions:
        values[record(position)] = b"\xff" * 100
    write_lmdb(str(folder / "train_lmdb"), values)
    (folder / "val_lmdb").symlink_to(whole / "val_lmdb")
    return folder


def schedule(folder: Path, data: Path, snapshot: int) -> Path:
    made = small.make_schedule(folder, data, init=STAGE.format(snapshot))
    text = (made / "schedule.prototxt").read_text()
    text = text[: text.index("stage {")].replace("  val {", "  on_bad_record: REPLACE\n  val {")
    (made / "schedule.prototxt").write_text(f'seed: {SEED}\n{text}stage {{ name: "init" }}\n')
    return made


def log(out: Path, event: str) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


def saved(out: Path) -> dict[int, list[int | str]]:
    """Iteration of each snapshot and the numbers of the bad records that it knows of."""
    folders = sorted((out / "snapshots").iterdir())
    known = [progress_of({STATE: (folder / STATE).read_bytes()}).bad_records for folder in folders]
    return {int(f.name.split("-")[1]): sorted(row[0] for row in rows) for f, rows in zip(folders, known, strict=True)}


@pytest.mark.process
@pytest.mark.slow
def test_two_workers_with_one_each_are_too_many_and_stay_so_until_the_data_is_mended(
    whole: Path, tmp_path: Path
) -> None:
    made = schedule(tmp_path / "s", damaged(tmp_path / "d", whole, [2, 10]), snapshot=3)
    for _ in range(2):
        done = small.run(made, tmp_path / "o", nproc=2)
        assert done.returncode == 65 and "2 bad records were met" in done.stderr, done.stdout + done.stderr
        assert all(f"record `{record(position):08d}`" in done.stderr for position in (2, 10))
        assert saved(tmp_path / "o") == {3: sorted([record(2), record(10)])}
    assert len(log(tmp_path / "o", "Iterated")) == 3, "the second time it is known before anything is trained"
    mended = ("--set", f'data.train.source="{whole / "train_lmdb"}"', "--set", "data.on_bad_record=STOP")
    done = small.run(made, tmp_path / "o", *mended)
    assert done.returncode == 0, done.stderr
    assert len(log(tmp_path / "o", "Iterated")) == 7


def test_a_worker_alone_ends_with_all_that_it_met_in_its_snapshot(whole: Path, tmp_path: Path) -> None:
    made = schedule(tmp_path / "s", damaged(tmp_path / "d", whole, [66, 70]), snapshot=6)
    of, out = load(str(made), ()), tmp_path / "o"
    keeper = Keeper(of, out)
    keeper.open()
    try:
        with pytest.raises(DataError, match="2 bad records"):
            list(run(of, str(out), SoloComm(), World(), torch.device("cpu"), keeper, lambda: False))
    finally:
        keeper.close()
    ((iter, known),) = saved(out).items()
    # Images are made ahead, so that it may be known before the fifth iteration, which has both.
    assert 1 <= iter <= 5 and known == sorted([record(66), record(70)])
    (ref,) = keeper.inventory().snapshots
    assert "image library" in ref.environment and "colour library" not in ref.environment, "its colours stay"


@pytest.mark.process
@pytest.mark.slow
def test_a_stage_whose_last_iteration_shows_that_they_are_too_many_is_not_finished(whole: Path, tmp_path: Path) -> None:
    made = schedule(tmp_path / "s", damaged(tmp_path / "d", whole, [98, 110]), snapshot=0)
    for life in range(2):
        done = small.run(made, tmp_path / "o", nproc=2)
        assert done.returncode == 65 and "2 bad records were met" in done.stderr, done.stdout + done.stderr
        assert saved(tmp_path / "o") == {}, "it would count as finished"
        assert len(log(tmp_path / "o", "Iterated")) == 7 * (life + 1)


@pytest.mark.process
def test_what_the_second_worker_met_before_a_signal_is_in_the_log_and_in_the_snapshot(
    whole: Path, tmp_path: Path
) -> None:
    made, out = schedule(tmp_path / "s", damaged(tmp_path / "d", whole, [10]), snapshot=0), tmp_path / "o"
    started = small.start(made, out, "--set", "init.max_iter=100000", nproc=2)
    small.wait_for(out / "log.jsonl", started)
    while '"Iterated"' not in (out / "log.jsonl").read_text():
        assert started.process.poll() is None, started.wait()
    os.kill(started.process.pid, signal.SIGTERM)
    code, text = started.wait(60)
    assert code == 75, text
    assert [f"`{record(10):08d}`" in str(note["text"]) for note in log(out, "Note") if note["warning"]] == [True]
    assert list(saved(out).values()) == [[record(10)]]


# -- the counting


def data(action: OnBadRecord = OnBadRecord.REPLACE) -> Data:
    return Data(train=Source(source="d", path="d", images=2000), on_bad_record=action)


def test_an_older_snapshot_knows_of_none() -> None:
    assert progress_of({STATE: b'{"position": 5, "train_seconds": 1.5, "losses": [2.5]}'}).bad_records == []


def test_a_set_that_is_returned_to_after_a_restart_has_the_bad_records_that_were_met_before(
    whole: Path, tmp_path: Path
) -> None:
    data, out = damaged(tmp_path / "d", whole, [2]), tmp_path / "o"
    made = schedule(tmp_path / "s", data, snapshot=3)
    other = f'data {{ train {{ source: "{whole / "train_lmdb"}" images: {tiny.TRAIN_IMAGES} }} }}'
    (made / "other.prototxt").write_text(f"{STAGE.format(3)}\n{other}\n")
    (made / "back.prototxt").write_text(STAGE.format(3))
    text = (made / "schedule.prototxt").read_text()
    (made / "schedule.prototxt").write_text(f'{text}stage {{ name: "other" }}\nstage {{ name: "back" }}\n')
    for chosen in (Selection(until="other"), Selection()):
        of = load(str(made), ())
        keeper = Keeper(of, out, chosen)
        keeper.open()
        try:
            list(run(of, str(out), SoloComm(), World(), torch.device("cpu"), keeper, lambda: False))
        finally:
            keeper.close()
    ends = {name: sorted((out / "snapshots").glob(f"{name}-*"))[-1] for name in ("init", "other", "back")}
    known = {name: progress_of({STATE: (folder / STATE).read_bytes()}) for name, folder in ends.items()}
    path = str(data / "train_lmdb")
    assert [row[0] for row in known["init"].bad_records] == [record(2)] and not known["init"].bad_beside
    assert not known["other"].bad_records and known["other"].bad_beside == {path: known["init"].bad_records}
    assert known["back"].bad_records == known["init"].bad_records and not known["back"].bad_beside
