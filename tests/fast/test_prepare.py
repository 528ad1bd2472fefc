"""`stagerun data import --prepare`: the same records with the same pixels, restartable, and still an ordinary LMDB."""

import re
from pathlib import Path
from typing import Any

import case_files
import contract
import cv2
import lmdb
import made_images
import numpy as np
import pytest
from facade import Datum, index, read_header
from made_images import records
from PIL import Image

needs_transcoder = pytest.mark.skipif(not made_images.prepared([made_images.jpeg(1)]), reason="needs the extra `fast`")
REPORT = "stagerun-import.txt"


def saved(path: Path, image: Image.Image, **options: object) -> bytes:
    image.save(path, "JPEG", **options)
    return path.read_bytes()


def caffes(folder: Path) -> Path:
    """An LMDB with all that may be in one."""
    cmyk = saved(folder / "c", Image.fromarray(np.full((64, 64, 4), 90, np.uint8), "CMYK"))
    progressive = saved(folder / "p", Image.fromarray(made_images.picture(5, 64, 80)), progressive=True, quality=90)
    datums = [
        Datum(data=made_images.jpeg(1, 90, 120), label=0, encoded=True),
        Datum(data=made_images.jpeg(2, 64, 64, 1), label=1, encoded=True, channels=1, height=64, width=64),
        Datum(data=progressive, label=2, encoded=True),
        Datum(channels=1, height=3, width=4, data=bytes(12), label=3),
        Datum(data=made_images.png(4), label=4, encoded=True),
        Datum(data=cmyk, label=5, encoded=True),
        *(Datum(data=made_images.jpeg(i, 60 + i, 200), label=i, encoded=True) for i in range(6, 40)),
    ]
    with lmdb.open(str(folder / "db"), map_size=1 << 27) as env, env.begin(write=True) as txn:
        for i, datum in enumerate(datums):
            # Fields that this version of Datum doesn't know, as another program may have written.
            txn.put(b"%08d_k%d" % (i, i), datum.SerializeToString() + b"\xfa\x01\x02hi")
    return folder / "db"


def data(folder: Path, *words: object) -> str:
    done = contract.stagerun(["data", *words], folder)
    assert done.exit_code == 0, done.output
    return done.stdout


def facts(folder: Path, name: str) -> Any:
    made = index.load(str(folder / name))
    assert made is not None
    return made.facts


def pixels(data: bytes) -> np.ndarray:
    return cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)


def told(folder: Path, *words: object) -> str:
    """What a command that is refused says, and its exit code."""
    done = contract.stagerun(["data", *words], folder)
    return f"{done.output}[{done.exit_code}]"


@needs_transcoder
def test_the_same_records_with_the_same_pixels(tmp_path):
    source, out = caffes(tmp_path), tmp_path / "out"
    (tmp_path / "classes").write_text("".join(f"class {i}\n" for i in range(40)))
    data(tmp_path, "verify", "--index", "db", "--classes", "classes")
    data(tmp_path, "import", "--prepare", "db", "out")
    before, after = records(source), records(out)
    assert before.keys() == after.keys()
    for key, value in before.items():
        old, new = Datum.FromString(value), Datum.FromString(after[key])
        if old.encoded:
            assert (pixels(old.data) == pixels(new.data)).all()
            if old.data != new.data:
                header = read_header(new.data)
                assert 1 <= header.restart_interval <= 7 and not header.progressive
        assert b"\xfa\x01\x02hi" in after[key]
        old.data = new.data
        assert old == new
    unchanged = {key[-2:] for key in before if before[key] == after[key]}
    assert unchanged == {b"k3", b"k4", b"k5"}  # raw pixels, PNG, CMYK
    old_facts, new_facts = facts(tmp_path, "db"), facts(tmp_path, "out")
    for same in ("classes", "mean_bgr", "deviation_bgr"):
        assert getattr(new_facts, same) == getattr(old_facts, same) != ()
    kinds = {"baseline JPEG": 36, "grey JPEG": 1, "raw": 1, "PNG": 1, "CMYK JPEG": 1}
    assert dict(new_facts.kinds) == kinds
    # The same pixels: training goes on with either, also when the copy's side file was made again.
    for _ in range(2):
        form = f"40 records, sample [0-9a-f]{{16}}, index {old_facts.fingerprint[:16]}"
        assert re.fullmatch(form, facts(tmp_path, "out").prepared_from)
        data(tmp_path, "verify", "--index", "out", "--threads", 1)
    # What is prepared already stays as it is, byte for byte.
    data(tmp_path, "import", "--prepare", "out", "again")
    assert records(tmp_path / "again") == after


@needs_transcoder
def test_what_cannot_be_arranged_anew_is_copied_and_noted(tmp_path):
    """A progressive JPEG without its last scan, which libjpeg smooths."""
    whole = saved(tmp_path / "whole", Image.fromarray(made_images.picture(8, 90, 120)), progressive=True)
    value = Datum(data=whole[: whole.rindex(b"\xff\xda")] + b"\xff\xd9", encoded=True).SerializeToString()
    with lmdb.open(str(tmp_path / "db")) as env, env.begin(write=True) as txn:
        txn.put(b"k6", value)
    assert "1 copied as it is" in data(tmp_path, "import", "--prepare", "db", "out")
    assert "copied as it is\tk6: the image can't be prepared: its pixels" in (tmp_path / "out" / REPORT).read_text()
    assert records(tmp_path / "out") == {b"k6": value}


@needs_transcoder
def test_what_is_refused(tmp_path):
    """Damage, which must not get a fresh digest; options that are for images."""
    source = caffes(tmp_path)
    data(tmp_path, "verify", "--index", "db")
    case_files.flip(source, "9")
    said = told(tmp_path, "import", "--prepare", "db", "out")
    assert "record `00000009_k9`: its bytes don't match" in said and "stagerun data verify" in said
    assert said.endswith("[65]") and not (tmp_path / "out").exists()
    said = told(tmp_path, "import", "--prepare", "db", "none", "--raw")
    assert "other options are for images" in said and said.endswith("[64]")


def test_where_it_cannot_be_done_it_is_said_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("STAGERUN_TURBOJPEG", "libnone.so.9")
    said = told(tmp_path, "import", "--prepare", caffes(tmp_path), "out")
    assert "can't prepare JPEGs" in said and "STAGERUN_TURBOJPEG" in said and said.endswith("[64]")
