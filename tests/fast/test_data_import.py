"""IDX files and Fashion-MNIST: checked, imported, and the same again the second time."""

import gzip
import hashlib
from pathlib import Path

import numpy as np
import pytest

from stagerun.base.errors import DataError, PeerError
from stagerun.data.records import LmdbSource
from stagerun.language.proto.caffe_pb2 import Datum
from stagerun.system.lmdb_file import SIDE_FILE
from stagerun.tools.data import fashion
from stagerun.tools.data.fashion import Unavailable
from stagerun.tools.data.sources import idx

FIRST = np.load(Path(__file__).parents[1] / "golden" / "fashion_9664.npz")
NAMES = list(fashion.DIGESTS)


def idx_bytes(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


def pair(folder: Path, n: int = 20) -> tuple[str, str]:
    (folder / "images").write_bytes(idx_bytes(FIRST["images"][:n]))
    (folder / "labels").write_bytes(gzip.compress(idx_bytes(FIRST["labels"][:n])))
    return str(folder / "images"), str(folder / "labels")


def test_the_golden_pictures_are_what_they_say() -> None:
    assert FIRST["images"].shape == (9664, 28, 28) and FIRST["images"].dtype == np.uint8
    assert FIRST["labels"][:10].tolist() == [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]


def test_idx_becomes_datums_in_file_order(tmp_path: Path) -> None:
    assert idx.import_idx(*pair(tmp_path), str(tmp_path / "db")) == 20
    source = LmdbSource(str(tmp_path / "db"), 20)
    key, value = source.get(13)
    datum = Datum.FromString(value)
    assert key == b"00000013"
    assert (datum.channels, datum.height, datum.width, datum.label) == (1, 28, 28, int(FIRST["labels"][13]))
    assert datum.data == FIRST["images"][13].tobytes() and not datum.encoded


def test_damaged_idx_files_are_refused(tmp_path: Path) -> None:
    whole = idx_bytes(FIRST["labels"][:50])
    zipped = gzip.compress(whole)
    bad = {
        "another": whole[:-1],
        "another ": whole + b"\0",
        "not an IDX": b"",
        "not an IDX ": b"\0\0\x0d\1" + whole[4:],
        "ends within its header": whole[:6],
        "can't be read": zipped[:-9],
        "can't be read ": zipped[:20] + b"\xff\xff" + zipped[22:],
    }
    for words, content in bad.items():
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(DataError, match=words.strip()):
            idx.read_idx(str(tmp_path / "file"))
    with pytest.raises(DataError, match="no such file"):
        idx.read_idx(str(tmp_path / "nowhere"))


def test_images_and_labels_must_belong_together(tmp_path: Path) -> None:
    images, labels = pair(tmp_path)
    for first, second in ((labels, images), (images, images)):
        with pytest.raises(DataError, match=r"not images and their labels|not pictures"):
            idx.import_idx(first, second, str(tmp_path / "db"))
    assert not (tmp_path / "db").exists()


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a Fashion-MNIST of 30 + 10 pictures, which `fashion` takes for the real one."""
    folder = tmp_path / "published"
    folder.mkdir()
    digests = {}
    for name in NAMES:
        n = 30 if name.startswith("train") else 10
        array = FIRST["images" if "images" in name else "labels"][:n]
        (folder / name).write_bytes(gzip.compress(idx_bytes(array)))
        digests[name] = hashlib.sha256(array.tobytes()).hexdigest()
    monkeypatch.setattr(fashion, "DIGESTS", digests)
    monkeypatch.setattr(fashion, "PARTS", (("train_lmdb", "train", 30), ("test_lmdb", "t10k", 10)))
    monkeypatch.delenv(fashion.ENVIRONMENT, raising=False)
    monkeypatch.setattr(fashion, "SYSTEM_FOLDER", str(tmp_path / "not-installed"))
    return folder


def no_network(*_: object) -> Path:
    raise Unavailable("no network here")


def test_fashion_from_a_named_folder_and_again(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fashion.ENVIRONMENT, str(small))
    said: list[str] = []
    fashion.make(str(tmp_path / "out"), said.append)
    assert "is ready" in said[-1]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["test_lmdb", "train_lmdb"]
    made = LmdbSource(str(tmp_path / "out" / "train_lmdb"))
    assert len(made) == 30 and made.index is not None
    assert made.index.facts.classes[2] == "Pullover" and len(made.index.facts.classes) == 10
    (tmp_path / "out" / "test_lmdb" / SIDE_FILE).unlink()  # as an older stagerun left it
    monkeypatch.setenv(fashion.ENVIRONMENT, "/nowhere")
    fashion.make(str(tmp_path / "out"), said.append)
    assert "nothing to do" in said[-1] and (tmp_path / "out" / "test_lmdb" / SIDE_FILE).exists()


def test_fashion_takes_what_a_killed_run_left(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fashion.ENVIRONMENT, str(small))
    fashion.make(str(tmp_path / "out"), lambda _: None)
    made = (tmp_path / "out" / "train_lmdb" / "data.mdb").stat().st_mtime_ns
    (tmp_path / "out" / "test_lmdb" / "data.mdb").unlink()
    (tmp_path / "out" / "test_lmdb").rename(tmp_path / "out" / "test_lmdb.partial-0123")
    fashion.make(str(tmp_path / "out"), lambda _: None)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["test_lmdb", "train_lmdb"]
    assert (tmp_path / "out" / "train_lmdb" / "data.mdb").stat().st_mtime_ns == made


def test_fashion_goes_on_to_the_next_source_when_one_holds_something_else(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    for name in NAMES:
        (wrong / name).write_bytes(gzip.compress(idx_bytes(FIRST["labels"][:3])))
    monkeypatch.setattr(fashion, "SYSTEM_FOLDER", str(wrong))
    monkeypatch.setattr(fashion, "_download", lambda *_: small)
    said: list[str] = []
    fashion.make(str(tmp_path / "out"), said.append)
    assert any("something else than" in line for line in said) and "is ready" in said[-1]


def test_fashion_from_nowhere_is_one_message_with_the_choices(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fashion, "_download", no_network)
    monkeypatch.setattr(fashion, "_unpack", no_network)
    with pytest.raises(PeerError) as error:
        fashion.make(str(tmp_path / "out"), lambda _: None)
    text = error.value.render()
    assert text.count("no network here") == 2
    assert fashion.ENVIRONMENT in text and fashion.PACKAGE in text and NAMES[0] in text
    assert list((tmp_path / "out").iterdir()) == []
    assert fashion.main([str(tmp_path / "out")]) == 69
    assert "can't be had from anywhere" in capsys.readouterr().err


def test_a_named_folder_without_the_files_is_not_passed_over(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(fashion.ENVIRONMENT, str(tmp_path))
    with pytest.raises(DataError, match=r"\$FASHION_MNIST_DIR: .* is not there"):
        fashion.make(str(tmp_path / "out"), lambda _: None)
