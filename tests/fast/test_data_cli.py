"""`stagerun data` beside what tests/cases shows of it."""

import json
from pathlib import Path

import contract
import made_images
import pytest

from stagerun.command import progress
from stagerun.tools.data import prepare


def data(folder: Path, *words: object) -> str:
    done = contract.stagerun(["data", *words], folder)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.skipif(bool(prepare.can_prepare()), reason="needs the extra `fast`")
def test_prepare(tmp_path: Path) -> None:
    made_images.class_folders(tmp_path / "images")
    data(tmp_path, "import", "images", "lmdb")
    assert "out: 30 records" in data(tmp_path, "import", "--prepare", "lmdb", "out")
    data(tmp_path, "verify", "out", "--decode")
    data(tmp_path, "import", "--prepare", "images", "direct")
    infos = [json.loads(data(tmp_path, "info", name, "--json")) for name in ("lmdb", "out", "direct")]
    assert [info["prepared"] for info in infos] == [False, True, True]
    assert all(info["records"] == 30 and info["labels"] == [[0, 10], [1, 10], [2, 10]] for info in infos)
    assert all(info["decoders"] and info["mean_bgr"] == infos[0]["mean_bgr"] for info in infos)
    assert len({(tmp_path / name / "data.mdb").read_bytes() for name in ("out", "direct")}) == 1
    refused = contract.stagerun(["data", "import", "--prepare", "lmdb", "none", "--limit", 3], tmp_path)
    assert refused.exit_code == 64 and "--limit is for images" in refused.stderr


def test_progress_without_a_terminal_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with progress.Shown("import") as shown:
        for done in range(1000, 6000):  # an earlier process made 1000
            shown.progress(done, 101_000)
            now += 0.01
    # 100 a second from 1000 on: after 10 s 2000 are done, and 99,000 take 990 s.
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("import: 2000 of 101000 images, 100 images/s, 16 min 30 s left")
