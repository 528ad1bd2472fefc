"""Fashion-MNIST: from where it is to be had, checked, imported, and the same again the second time."""

import gzip
import hashlib
import os
import threading
import urllib.request
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from facade import SIDE_FILE, DataError, Datum, LmdbSource
from test_sources_pixels import idx

from stagerun.tools.data import fashion

FIRST = np.load(Path(__file__).parents[1] / "golden" / "fashion_9664.npz")
NAMES = list(fashion.DIGESTS)


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A folder with a Fashion-MNIST of 30 + 10 pictures, which `fashion` takes for the real one."""
    folder = tmp_path / "published"
    folder.mkdir()
    for name in NAMES:
        n = 30 if name.startswith("train") else 10
        array = FIRST["images" if "images" in name else "labels"][:n]
        (folder / name).write_bytes(gzip.compress(idx(array)))
        monkeypatch.setitem(fashion.DIGESTS, name, hashlib.sha256(array.tobytes()).hexdigest())
    monkeypatch.setattr(fashion, "PARTS", (("train_lmdb", "train", 30), ("test_lmdb", "t10k", 10)))
    monkeypatch.delenv(fashion.ENVIRONMENT, raising=False)
    monkeypatch.setattr(fashion, "SYSTEM_FOLDER", str(tmp_path / "not-installed"))
    # urllib keeps the proxies of its first download in a process.
    urllib.request.install_opener(None)
    yield folder
    urllib.request.install_opener(None)


def test_fashion_from_a_named_folder_and_again(small, tmp_path, monkeypatch):
    monkeypatch.setenv(fashion.ENVIRONMENT, str(small))
    said: list[str] = []
    fashion.make(str(tmp_path / "out"), said.append)
    assert "is ready" in said[-1]
    assert sorted(os.listdir(tmp_path / "out")) == ["test_lmdb", "train_lmdb"]
    made = LmdbSource(str(tmp_path / "out" / "train_lmdb"))
    assert len(made) == 30 and made.index is not None
    datum = Datum.FromString(made.get(13)[1])
    assert (datum.channels, datum.height, datum.width, datum.label) == (1, 28, 28, int(FIRST["labels"][13]))
    assert datum.data == FIRST["images"][13].tobytes() and not datum.encoded
    assert made.index.facts.classes[2] == "Pullover" and len(made.index.facts.classes) == 10
    whole = (tmp_path / "out" / "train_lmdb" / "data.mdb").stat().st_mtime_ns
    (tmp_path / "out" / "test_lmdb" / "data.mdb").unlink()
    (tmp_path / "out" / "test_lmdb").rename(tmp_path / "out" / "test_lmdb.partial-0123")  # as a kill leaves it
    fashion.make(str(tmp_path / "out"), said.append)
    assert sorted(os.listdir(tmp_path / "out")) == ["test_lmdb", "train_lmdb"]
    assert (tmp_path / "out" / "train_lmdb" / "data.mdb").stat().st_mtime_ns == whole
    (tmp_path / "out" / "test_lmdb" / SIDE_FILE).unlink()  # as an older stagerun left it
    monkeypatch.setenv(fashion.ENVIRONMENT, "/nowhere")
    fashion.make(str(tmp_path / "out"), said.append)
    assert "nothing to do" in said[-1] and (tmp_path / "out" / "test_lmdb" / SIDE_FILE).exists()


@pytest.fixture
def mirror(small, monkeypatch):
    """A proxy that has the files of every server."""

    class Files(SimpleHTTPRequestHandler):
        def translate_path(self, path: str) -> str:
            return str(small / Path(path).name)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Files) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{server.server_address[1]}")
        monkeypatch.delenv("no_proxy", raising=False)
        yield
        server.shutdown()
        thread.join()


@pytest.mark.usefixtures("mirror")
def test_fashion_goes_on_to_the_next_source_when_one_holds_something_else(small, tmp_path):
    wrong = Path(fashion.SYSTEM_FOLDER)
    wrong.mkdir()
    for name in NAMES:
        (wrong / name).write_bytes(gzip.compress(idx(FIRST["labels"][:3])))
    said: list[str] = []
    fashion.make(str(tmp_path / "out"), said.append)
    assert any("something else than" in line for line in said) and "is ready" in said[-1]


def test_where_it_is_not_to_be_had_the_choices_are_named(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("PATH", str(tmp_path))  # no apt-get either
    assert fashion.main([str(tmp_path / "out")]) == 69
    text = capsys.readouterr().err
    assert "can't be had from anywhere" in text and "Connection refused" in text and "apt-get" in text
    assert fashion.ENVIRONMENT in text and fashion.PACKAGE in text and NAMES[0] in text
    assert list((tmp_path / "out").iterdir()) == []
    monkeypatch.setenv(fashion.ENVIRONMENT, str(tmp_path))
    with pytest.raises(DataError, match=r"\$FASHION_MNIST_DIR: .* is not there"):
        fashion.make(str(tmp_path / "out"), lambda _: None)
