"""Through the command: bad records in a run, and where the images stay, never change what is trained."""

import json
from pathlib import Path

import processes
import pytest
import small
import tiny

from stagerun.base import order
from stagerun.data.records import LmdbSource
from stagerun.data.write import write_lmdb

# One stage of 7 iterations of 16: positions 0 .. 111 of the first epoch of 600.
SEED = 1
STAGE = 'base_lr: 0.02 lr_policy: "fixed" max_iter: 7 snapshot: 3'
BAD_AT = 76  # the fifth iteration begins at 64; of two workers the second has it


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny images, the one that comes at position BAD_AT no Datum."""
    base = tmp_path_factory.mktemp("bad")
    tiny.make_data(base / "whole")
    source = LmdbSource(str(base / "whole" / "train_lmdb"))
    values = [source.get(i)[1] for i in range(len(source))]
    values[bad_record()] = b"\xff" * 100
    write_lmdb(str(base / "bad" / "train_lmdb"), values)
    (base / "bad" / "val_lmdb").symlink_to(base / "whole" / "val_lmdb")
    return base / "bad"


def bad_record() -> int:
    return int(order.indices(SEED, tiny.TRAIN_IMAGES, BAD_AT, 1, True)[0])


def schedule(folder: Path, data: Path, extra: str = "") -> Path:
    made = small.make_schedule(folder, data, init=STAGE)
    text = (made / "schedule.prototxt").read_text()
    text = text[: text.index("stage {")].replace("  val {", f"  {extra}\n  val {{") + 'stage { name: "init" }\n'
    (made / "schedule.prototxt").write_text(f"seed: {SEED}\n{text}")
    return made


def notes(out: Path) -> list[str]:
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [line["text"] for line in lines if line["event"] == "Note" and line["warning"]]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_that_stops_at_a_bad_record_has_saved_what_it_trained(data: Path, tmp_path: Path, workers: int) -> None:
    done = small.run(schedule(tmp_path / "s", data), tmp_path / "o", nproc=workers)
    assert done.returncode == 65
    assert f"record `{bad_record():08d}`: the record is not a Caffe Datum (at position {BAD_AT})" in done.stderr
    # Its snapshots are due at 3 and 6.
    names = sorted(path.name for path in (tmp_path / "o" / "snapshots").iterdir())
    assert [name.split("-")[1] for name in names] == ["00000003", "00000004"]


@pytest.mark.slow
def test_replacing_memory_and_threads_train_the_same_with_any_number_of_workers(data: Path, tmp_path: Path) -> None:
    for workers, more in ((1, "cache: DISK"), (2, "cache: MEMORY loader_threads: 3")):
        out = tmp_path / f"o{workers}"
        made = schedule(tmp_path / f"s{workers}", data, f"on_bad_record: REPLACE {more}")
        done = small.run(made, out, "--set", "determinism=ELASTIC", nproc=workers)
        assert done.returncode == 0, done.stderr
        told = [text for text in notes(out) if "bad" in text]
        assert f"record `{bad_record():08d}`" in told[-1] and "replaced so far: 1" in told[-1]
    assert processes.ends(tmp_path / "o1") == processes.ends(tmp_path / "o2")
