"""Fashion-MNIST for the quickstart: made of the published files, and once."""

import gzip
import subprocess
import sys
from pathlib import Path

import numpy as np
from facade import Datum, LmdbSource
from test_sources_pixels import idx

SCRIPT = """
import sys, runpy
sys.argv = ["fashion.py"]
made = runpy.run_path("scripts/fashion.py", run_name="fashion")
made["SETS"].update(train_lmdb=("train", 30), test_lmdb=("t10k", 10))
made["main"](sys.stdin.read(), "--split")
"""


def test_fashion_from_a_named_folder_and_again(tmp_path, monkeypatch):
    root = Path(__file__).parents[2]
    stored = np.load(root / "tests" / "golden" / "fashion_9664.npz")
    for first, n in (("train", 30), ("t10k", 10)):
        for part, name in (("images-idx3", "images"), ("labels-idx1", "labels")):
            array = stored[name][:n].reshape((n, 28, 28) if name == "images" else n)
            (tmp_path / f"{first}-{part}-ubyte.gz").write_bytes(gzip.compress(idx(array)))
    monkeypatch.setenv("FASHION_MNIST_DIR", str(tmp_path))
    for _ in range(2):
        command = [sys.executable, "-c", SCRIPT]
        done = subprocess.run(
            command, input=str(tmp_path / "out"), capture_output=True, text=True, cwd=root, check=False
        )
        assert done.returncode == 0, done.stderr
    assert "records" not in done.stdout and "is ready" in done.stdout
    made = LmdbSource(str(tmp_path / "out" / "train_lmdb"))
    assert len(made) == 30 and made.index is not None and made.index.facts.classes[2] == "Pullover"
    datum = Datum.FromString(made.get(13)[1])
    assert (datum.channels, datum.height, datum.width, datum.label) == (1, 28, 28, int(stored["labels"][13]))
    assert datum.data == stored["images"][13].tobytes() and not datum.encoded
    labels = LmdbSource(str(tmp_path / "out" / "four_test_lmdb")).index.labels
    assert set(labels.tolist()) <= {0, 1, 2, 3}
