"""The import engine: the same LMDB however many threads make it and however often it is killed; nothing lost, nothing mixed."""

import errno
import fcntl
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lmdb
import pytest
from facade import SIDE_FILE, DataError, Datum, FolderInUseError, ResumeRefused, StorageError
from made_images import records

from stagerun.data import index
from stagerun.data.importing import engine
from stagerun.data.importing.engine import Job, Made, Result, run
from stagerun.data.importing.partial import Note, Seen
from stagerun.data.index import look, parse
from stagerun.system.image_sets import REPORT

Content = tuple[dict[bytes, bytes], bytes, bytes]
# Runs of those left out lie at the start, at commits, and at the end.
BAD = {0, 1, 17, 37, 38, 39, 40, 41, 148, 149}


class Numbers:
    """Raw images of many sizes; position i is left out if it is in `bad`."""

    title = "numbers"
    classes = ("even", "odd")
    statistics = None
    prepared_from = ""
    ignored = ()

    def __init__(self, total: int = 150, bad: set[int] = BAD, version: int = 1) -> None:
        self._total, self._bad = total, bad
        self.identity: Mapping[str, Any] = {"version": version, "images": total}

    def __len__(self) -> int:
        return self._total

    def make(self, position: int) -> Made:
        name = f"image {position}"
        if position in self._bad:
            return Made(b"", None, notes=(Note(name, "broken", "on purpose", bad=True),))
        width = position * 37 % 3000 + 1
        datum = Datum(channels=1, height=1, width=width, data=bytes([position % 256]) * width, label=position % 2)
        notes, record = (Note(name, "odd"),) if position % 20 == 0 else (), datum.SerializeToString()
        return Made(b"%08d" % position, record, position % 2, look(parse(record), True), notes)


@pytest.fixture(autouse=True)
def small_commits(monkeypatch):
    monkeypatch.setattr(engine, "RECORDS_PER_COMMIT", 9)


def job(threads: int = 2, max_bad: int = len(BAD), **more: Any) -> Job:
    return Job(threads=threads, max_bad=max_bad, **more)


def refused(out: object, said: str, **more: Any) -> None:
    with pytest.raises(DataError) as error:
        run(Numbers(), str(out), job(**more))
    assert re.search(said, error.value.render(), re.DOTALL), error.value.render()


def content(out: Path) -> Content:
    """Records, side file and report; beside them there is only data.mdb."""
    found = records(out)
    assert sorted(os.listdir(out)) == ["data.mdb", REPORT, SIDE_FILE]
    return found, (out / SIDE_FILE).read_bytes(), (out / REPORT).read_bytes()


@pytest.fixture
def expected(tmp_path):
    run(Numbers(), str(tmp_path / "expected"), job(threads=1))
    return content(tmp_path / "expected")


def test_what_comes_out(tmp_path):
    seen: list[tuple[int, int]] = []
    result = run(Numbers(), str(tmp_path / "new" / "out"), job(progress=lambda done, total: seen.append((done, total))))
    assert (result.complete, result.records, result.bad, result.total) == (True, 140, 10, 150)
    assert dict(result.counts) == {"broken": 10, "odd": 6} and result.kinds == (("raw", 140),)
    assert seen[0] == (0, 150) and seen[-1] == (150, 150)
    written, _, report = content(tmp_path / "new" / "out")
    work = Numbers()
    assert list(written.items()) == [(m.key, m.record) for m in map(work.make, range(150)) if m.record]
    found = index.load(str(tmp_path / "new" / "out"))
    assert found is not None and found.facts.classes == ("even", "odd")
    assert found.labels.tolist() == [i % 2 for i in range(150) if i not in BAD]
    assert [index.digest_of(value) for value in written.values()] == found.digests.tolist()
    assert report.decode().count("broken\timage") == 10 and "broken\timage 37: on purpose" in report.decode()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_change_nothing(tmp_path, threads, expected):
    run(Numbers(), str(tmp_path / "out"), job(threads))
    assert content(tmp_path / "out") == expected


def test_stopped_again_and_again(tmp_path, expected):
    lives, begun = 0, []
    while True:
        asked = iter(range(1000))
        result = run(Numbers(), str(tmp_path / "out"), job(stop=lambda: next(asked) >= 30))  # noqa: B023
        begun.append(result.started_at)
        if result.complete:
            break
        lives += 1
        assert not (tmp_path / "out").exists() and result.records > 0
    assert lives >= 3 and begun == sorted(set(begun))
    assert content(tmp_path / "out") == expected


@pytest.mark.parametrize(
    ("of", "name", "at", "error", "said"),
    [
        (Seen, "write", 4, OSError(errno.EIO, "power", "disk"), "power"),
        (Seen, "write", 5, lmdb.DiskError("No space left on device"), "No space left.*the same command resumes"),
        (Numbers, "make", 77, StorageError("the file server is gone"), "file server"),
    ],
    ids=["power between the two commits", "a full disk", "an error of the source"],
)
def test_what_fails_half_way_goes_on(tmp_path, expected, monkeypatch, of, name, at, error, said):
    out, calls, whole = tmp_path / "out", iter(range(1000)), getattr(of, name)

    def fail(*arguments: Any) -> Any:
        fails = next(calls) == at
        found = None if fails and of is not Seen else whole(*arguments)
        if fails:
            raise error
        return found

    with monkeypatch.context() as patch, pytest.raises(StorageError) as caught:
        patch.setattr(of, name, fail)
        run(Numbers(), str(out), job())
    assert re.search(said, caught.value.render(), re.DOTALL) and not out.exists()
    assert 0 < run(Numbers(), str(out), job()).started_at < 150  # which thread comes to the 77th call is open
    assert content(out) == expected


def test_the_map_grows_by_itself(tmp_path, monkeypatch):
    """It begins with 64 MiB; with so many bytes there is a commit, too, however few the records."""

    class Large(Numbers):
        def make(self, position: int) -> Made:
            record = Datum(channels=1, height=1024, width=1024, data=bytes(1 << 20), label=0).SerializeToString()
            return Made(b"%08d" % position, record, 0, look(parse(record), True))

    monkeypatch.undo()
    asked = iter([False] * 70 + [True])
    assert run(Large(80, set()), str(tmp_path / "out"), job(stop=asked.__next__)).records == 64
    assert run(Large(80, set()), str(tmp_path / "out"), job()).records == 80
    assert (tmp_path / "out" / "data.mdb").stat().st_size > 80 << 20


def test_too_many_bad_ones_are_all_listed_and_allowing_them_goes_on(tmp_path, expected):
    out = tmp_path / "out"
    with pytest.raises(DataError) as error:
        run(Numbers(), str(out), job(max_bad=9))
    assert "10 of 150 images can't be used; 9 at most" in error.value.message
    assert all(f"image {i}: on purpose" in error.value.message for i in BAD)
    assert "--max-bad 10" in error.value.hint and not out.exists()
    assert (tmp_path / "out.partial" / REPORT).read_text().count("on purpose") == 10
    result = run(Numbers(), str(out), job(max_bad=10))
    assert result.started_at > 140 and content(out) == expected


def test_another_work_in_the_same_place_is_refused(tmp_path):
    out = str(tmp_path / "out")
    stopped = run(Numbers(), out, job(stop=iter([False] * 50 + [True]).__next__))
    assert not stopped.complete
    with pytest.raises(ResumeRefused, match="version: 1 then, 2 now") as error:
        run(Numbers(version=2), out, job())
    assert "--restart" in error.value.hint
    assert run(Numbers(version=2), out, job(restart=True)).started_at == 0
    refused(out, "exists already")
    refused(out, "exists already.*remove it", restart=True)
    again: Result = run(Numbers(version=2), out, job())
    assert again.already and again.records == 140


def test_a_folder_that_is_there_is_left_alone(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").touch()
    for out in (str(tmp_path / "out"), str(tmp_path / "out" / ".."), "/", "."):
        refused(out, "exists already")
    assert os.listdir(tmp_path) == ["out"] and os.listdir(tmp_path / "out") == ["precious"]


def test_two_at_once(tmp_path):
    (tmp_path / "out.partial").mkdir()
    fd = os.open(tmp_path / "out.partial" / "lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.write(fd, b"process 17 on node3")
        with pytest.raises(FolderInUseError, match="process 17 on node3"):
            run(Numbers(), str(tmp_path / "out"), job())
    finally:
        os.close(fd)
    assert run(Numbers(), str(tmp_path / "out"), job()).complete


def test_what_somebody_changed_is_not_built_upon(tmp_path):
    out = str(tmp_path / "out")
    run(Numbers(), out, job(stop=iter([False] * 100 + [True]).__next__))
    seen = tmp_path / "out.partial" / "positions" / "data.mdb"
    whole = seen.read_bytes()
    os.truncate(seen, 10_000)
    refused(out, "is cut off.*--restart")
    seen.write_bytes(whole)
    with lmdb.open(str(seen.parent), map_size=1 << 26, lock=False) as env, env.begin(write=True) as txn:
        for at in range(3, 150):
            txn.delete(b"%08d" % at)
    refused(out, "more than positions.*--restart")
    os.truncate(tmp_path / "out.partial" / "lmdb" / "data.mdb", 10_000)
    refused(out, "is cut off.*--restart")
    (tmp_path / "out.partial" / "import.json").write_text("{")
    with pytest.raises(ResumeRefused, match="is damaged"):
        run(Numbers(), out, job())
    assert run(Numbers(), out, job(restart=True)).complete


@pytest.mark.parametrize("name", ["thesis.tex", "positions/1", "lmdb/thesis.tex", "lmdb/data.mdb/1"])
@pytest.mark.parametrize("whole", [True, False])
def test_nor_are_those_in_its_folders(tmp_path, name, whole):
    """`out.partial` may be somebody's own, or have got a file of theirs since."""
    partial = tmp_path / "out.partial"
    if whole:
        run(Numbers(), str(tmp_path / "out"), job(stop=iter([False] * 100 + [True]).__next__))
        for path in (partial / "positions" / "data.mdb", partial / "lmdb" / "data.mdb"):
            path.unlink()
    (partial / name).parent.mkdir(parents=True, exist_ok=True)
    (partial / name).write_text("years of work")
    before = sorted(partial.rglob("*"))
    refused(tmp_path / "out", f"holds `{name}`", restart=whole)
    assert (partial / name).read_text() == "years of work"
    assert set(partial.rglob("*")) - set(before) <= {partial / "lock"} and set(before) <= set(partial.rglob("*"))


def test_somebody_elses_file_beside_the_records_stops_the_end(tmp_path, expected):
    run(Numbers(), str(tmp_path / "out"), job(stop=iter([False] * 100 + [True]).__next__))
    lmdb_folder = tmp_path / "out.partial" / "lmdb"
    (lmdb_folder / "thesis.tex").write_text("years of work")
    for name in ("lock.mdb", REPORT, f"{REPORT}.partial", f"{SIDE_FILE}.partial-{'0' * 32}"):
        (lmdb_folder / name).touch()  # what a look into it, and an end that was killed, leave
    refused(tmp_path / "out", r"holds `lmdb/thesis\.tex`")
    (lmdb_folder / "thesis.tex").rename(tmp_path / "thesis.tex")
    run(Numbers(), str(tmp_path / "out"), job())
    assert content(tmp_path / "out") == expected
