"""`stagerun data import --prepare`: the same records with the same pixels, restartable, and still an ordinary LMDB."""

from pathlib import Path

import cv2
import lmdb
import made_images
import numpy as np
import pytest
from click.testing import CliRunner
from facade import DataError, Datum, UsageError
from PIL import Image

from stagerun.cli import main
from stagerun.data import index, jpeg
from stagerun.data.importing.engine import Job, Result, run
from stagerun.data.indexing import build
from stagerun.system.imports import REPORT
from stagerun.system.lmdb_file import set_of
from stagerun.tools.data import prepare as preparing
from stagerun.tools.data.prepare import LmdbRecords, Prepared

needs_transcoder = pytest.mark.skipif(bool(preparing.can_prepare()), reason="needs the extra `fast`")


def cmyk(path: Path) -> bytes:
    Image.fromarray(np.full((64, 64, 4), 90, np.uint8), "CMYK").save(path, "JPEG")
    return path.read_bytes()


def progressive(path: Path) -> bytes:
    Image.fromarray(made_images.picture(5, 64, 80)).save(path, "JPEG", progressive=True, quality=90)
    return path.read_bytes()


def caffes(tmp_path: Path) -> str:
    """An LMDB with all that may be in one."""
    raw = Datum(channels=1, height=3, width=4, data=bytes(12), label=3)
    datums = [
        Datum(data=made_images.jpeg(1, 90, 120), label=0, encoded=True),
        Datum(data=made_images.jpeg(2, 64, 64, 1), label=1, encoded=True, channels=1, height=64, width=64),
        Datum(data=progressive(tmp_path / "p"), label=2, encoded=True),
        raw,
        Datum(data=made_images.png(4), label=4, encoded=True),
        Datum(data=cmyk(tmp_path / "c"), label=5, encoded=True),
        *(Datum(data=made_images.jpeg(i, 60 + i, 200), label=i, encoded=True) for i in range(6, 400)),
    ]
    path = tmp_path / "db"
    with lmdb.open(str(path), map_size=1 << 27) as env, env.begin(write=True) as txn:
        for i, datum in enumerate(datums):
            # Fields that this version of Datum doesn't know, as another program may have written.
            txn.put(b"%08d_k%d" % (i, i), datum.SerializeToString() + b"\xfa\x01\x02hi")
    return str(path)


def prepare(source: str, out: Path, threads: int = 2) -> Result:
    return run(Prepared(LmdbRecords(source)), str(out), Job(threads=threads))


def records(path: str | Path) -> dict[bytes, bytes]:
    with lmdb.open(str(path), readonly=True, lock=False) as env, env.begin() as txn:
        return dict(txn.cursor())


def pixels(data: bytes) -> np.ndarray:
    return cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)


@needs_transcoder
def test_the_same_records_with_the_same_pixels(tmp_path: Path) -> None:
    source = caffes(tmp_path)
    index.save(build(source, classes=tuple(map(str, range(400)))), source)
    result = prepare(source, tmp_path / "out")
    assert result.complete and result.records == 400 and not result.counts
    before, after = records(source), records(tmp_path / "out")
    assert before.keys() == after.keys()
    for key, value in before.items():
        old, new = Datum.FromString(value), Datum.FromString(after[key])
        if old.encoded:
            assert (pixels(old.data) == pixels(new.data)).all()
            if old.data != new.data:
                header = jpeg.read_header(new.data)
                assert 1 <= header.restart_interval <= 7 and not header.progressive
        assert b"\xfa\x01\x02hi" in after[key]
        old.data = new.data
        assert old == new
    unchanged = {key[-2:] for key in before if before[key] == after[key]}
    assert unchanged == {b"k3", b"k4", b"k5"}  # raw pixels, PNG, CMYK
    facts, old_facts = index.load(str(tmp_path / "out")), index.load(source)
    assert facts is not None and old_facts is not None
    assert (facts.facts.restart_interval, old_facts.facts.restart_interval) == (4, 0)
    assert facts.facts.classes == old_facts.facts.classes and facts.facts.mean_bgr == old_facts.facts.mean_bgr != ()
    assert facts.facts.deviation_bgr == old_facts.facts.deviation_bgr != ()
    assert dict(facts.facts.kinds) == {"baseline JPEG": 396, "grey JPEG": 1, "raw": 1, "PNG": 1, "CMYK JPEG": 1}
    # The same pixels: training goes on with either, also when the copy's side file was made again.
    assert set_of(str(tmp_path / "out")) == set_of(source) != ""
    again = CliRunner().invoke(main, ["data", "index", str(tmp_path / "out"), "--force", "--threads", "1"])
    assert again.exit_code == 0, again.output
    assert set_of(str(tmp_path / "out")) == set_of(source)


@pytest.mark.long
@needs_transcoder
def test_without_a_side_file_and_in_pieces_it_comes_out_alike(tmp_path: Path) -> None:
    source = caffes(tmp_path)
    prepare(source, tmp_path / "one", threads=1)
    asked = iter(range(10**6))
    stopped = run(Prepared(LmdbRecords(source)), str(tmp_path / "two"), Job(threads=3, stop=lambda: next(asked) > 100))
    assert not stopped.complete
    assert prepare(source, tmp_path / "two").complete
    files = (index.SIDE_FILE, REPORT)
    assert records(tmp_path / "one") == records(tmp_path / "two")
    assert all((tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes() for name in files)
    # What is prepared already stays as it is, byte for byte.
    prepare(str(tmp_path / "one"), tmp_path / "again")
    assert records(tmp_path / "again") == records(tmp_path / "one")


@pytest.mark.long
@needs_transcoder
def test_what_cannot_be_arranged_anew_is_copied_and_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = caffes(tmp_path)
    whole = preparing.prepare

    def fail(data: bytes) -> bytes:
        if data == made_images.jpeg(1, 90, 120):
            raise DataError("the pixels would be others")
        return whole(data)

    monkeypatch.setattr(preparing, "prepare", fail)
    result = prepare(source, tmp_path / "out")
    assert result.counts == (("copied as it is", 1),) and result.bad == 0
    assert records(source)[b"00000000_k0"] == records(tmp_path / "out")[b"00000000_k0"]
    assert "copied as it is\t00000000_k0: the pixels" in (tmp_path / "out" / REPORT).read_text()


@pytest.mark.long
@needs_transcoder
def test_damage_is_not_given_a_fresh_digest(tmp_path: Path) -> None:
    source = caffes(tmp_path)
    built = build(source)
    index.save(built, source)
    with (Path(source) / "data.mdb").open("r+b") as file:
        file.seek(int(built.offsets[9] + built.lengths[9] // 2))
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 4]))
    with pytest.raises(DataError, match=r"record `00000009_k9`: its bytes are not those") as error:
        prepare(source, tmp_path / "out")
    assert "stagerun data verify" in error.value.hint and not (tmp_path / "out").exists()


def test_where_it_cannot_be_done_it_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "can_prepare", lambda: "no libjpeg-turbo 3 here: pip install 'stagerun[fast]'")
    with pytest.raises(UsageError, match="pip install"):
        Prepared(LmdbRecords(caffes(tmp_path)))


@needs_transcoder
def test_where_there_are_no_jpegs_there_is_nothing_to_do(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path / "db")) as env, env.begin(write=True) as txn:
        txn.put(b"0", Datum(channels=1, height=1, width=2, data=b"ab").SerializeToString())
    index.save(build(str(tmp_path / "db")), str(tmp_path / "db"))
    with pytest.raises(UsageError, match="holds no JPEGs"):
        prepare(str(tmp_path / "db"), tmp_path / "out")
