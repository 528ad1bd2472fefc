"""`stagerun data import | index | info | verify` as a user meets them: what is printed, and the exit codes."""

import json
import os
import re
import shutil
from pathlib import Path

import cv2
import lmdb
import made_images
import numpy as np
import pytest
from click.testing import CliRunner, Result

from stagerun.cli import main
from stagerun.command import progress
from stagerun.data import index
from stagerun.language.proto.caffe_pb2 import Datum
from stagerun.system.imports import REPORT
from stagerun.system.lmdb_file import SIDE_FILE
from stagerun.tools.data import prepare


def data(*words: str | Path) -> Result:
    return CliRunner().invoke(main, ["data", *map(str, words)])


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `images` and the `lmdb` made of them; not to be changed."""
    root = tmp_path_factory.mktemp("imported")
    made_images.class_folders(root / "images")
    result = data("import", root / "images", root / "lmdb", "--threads", 2)
    assert result.exit_code == 0, result.output
    return root


@pytest.fixture
def copy(imported: Path, tmp_path: Path) -> Path:
    shutil.copytree(imported / "lmdb", tmp_path / "lmdb")
    return tmp_path / "lmdb"


def flip(lmdb_folder: Path, record: int) -> None:
    """One bit inside a record's image."""
    found = index.load(str(lmdb_folder))
    assert found is not None
    with (lmdb_folder / "data.mdb").open("r+b") as file:
        file.seek(int(found.offsets[record] + found.lengths[record] - 40))
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 16]))


def test_import_says_what_it_made_and_what_to_write(imported: Path, tmp_path: Path) -> None:
    result = data("import", imported / "images", tmp_path / "out")
    assert result.exit_code == 0
    assert f"{tmp_path}/out: 30 records (30 baseline JPEG)" in result.stdout
    assert f'source: "{tmp_path.resolve()}/out"  images: 30' in result.stdout
    again = data("import", imported / "images", tmp_path / "out")
    assert again.exit_code == 0 and "nothing to do" in again.stdout
    other = data("import", imported / "images", tmp_path / "out", "--seed", 2)
    assert other.exit_code == 65 and "exists already" in other.stderr


def test_images_beside_the_class_folders_are_named_or_refused(tmp_path: Path) -> None:
    source = made_images.class_folders(tmp_path / "images", 4, 2)
    for i in range(4):
        (source / f"loose{i}.jpg").write_bytes(made_images.jpeg(i))
    done = data("import", source, tmp_path / "out")
    said = "ignored: 4 files (.jpg 4)"
    assert done.exit_code == 0 and said in done.stderr and said in done.stdout
    assert f"\n{said}\nloose0.jpg\n" in (tmp_path / "out" / REPORT).read_text()
    (source / "loose4.jpg").write_bytes(made_images.jpeg(4))
    refused = data("import", source, tmp_path / "other")
    assert refused.exit_code == 65 and "5 files lie beside the class folders (loose0.jpg" in refused.stderr
    assert "and 4 images in them" in refused.stderr and "a list of `path label` lines" in refused.stderr
    assert not (tmp_path / "other.partial").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--resize-height", "5"], "go together"),
        (["--resize-shorter", "5", "--resize-height", "5", "--resize-width", "5"], "give one of them"),
        (["--raw", "--quality", "90"], "--raw stores pixels"),
        (["--no-shuffle", "--seed", "1"], "--no-shuffle turns off"),
        (["--quality", "101"], "101"),
        (["--limit", "0"], "0"),
        (["--threads", "0"], "0"),
        (["--max-bad", "-1"], "-1"),
        (["--format", "zip"], "zip"),
        (["--split", "train"], "--split means nothing for the format `folder`"),
        (["--labels", "x"], "--labels means nothing"),
        (["--root", "x"], "--root means nothing"),
        (["--background", "wite"], "--background `wite` is not an opaque colour"),
        (["--background", "#11223344"], "--background `#11223344` is not an opaque colour"),
    ],
)
def test_mistakes_on_the_command_line(imported: Path, tmp_path: Path, words: list[str], said: str) -> None:
    result = data("import", imported / "images", tmp_path / "out", *words)
    assert result.exit_code == 64 and said in result.stderr
    assert os.listdir(tmp_path) == []


def test_transparent_images_are_counted_with_what_is_behind_them(tmp_path: Path) -> None:
    source = made_images.class_folders(tmp_path / "images", 6, 2)
    holes = np.dstack([made_images.picture(1), np.zeros((40, 56), np.uint8)])
    for name, alpha in (("clear", 0), ("half", 128), ("opaque", 255)):
        holes[:, :, 3] = alpha
        cv2.imwrite(str(source / "n00000000" / f"{name}.png"), holes)
    white = data("import", source, tmp_path / "white")
    assert "  2 alpha\n" in white.stdout
    again = data("import", source, tmp_path / "white", "--background", "#FFF")
    assert again.exit_code == 0 and "nothing to do" in again.stdout
    other = data("import", source, tmp_path / "white", "--background", "teal")
    assert other.exit_code == 65 and "exists already" in other.stderr
    assert data("import", source, tmp_path / "teal", "--background", "teal").exit_code == 0
    prints = [index.load(str(tmp_path / name)).facts.fingerprint for name in ("white", "teal")]  # type: ignore[union-attr]
    assert prints[0] != prints[1]


@pytest.mark.parametrize("place", ["lmdb", "n00000001/deep/lmdb", "link"])
def test_out_inside_of_the_class_folders_is_refused(imported: Path, tmp_path: Path, place: str) -> None:
    """It and its .partial would be classes of the next import."""
    images = tmp_path / "images"
    shutil.copytree(imported / "images", images)
    (tmp_path / "link").symlink_to(images)
    out = tmp_path / "link" / "lmdb" if place == "link" else images / place
    before = sorted(images.rglob("*"))
    result = data("import", images, out)
    assert result.exit_code == 64 and f"lies in {images}" in result.stderr and "looking through" not in result.stderr
    assert sorted(images.rglob("*")) == before
    assert data("import", images, tmp_path / "images-lmdb").exit_code == 0  # beside it, though the name begins alike


def test_out_beside_the_files_of_another_format_is_not_refused(imported: Path, tmp_path: Path) -> None:
    shutil.copytree(imported / "images", tmp_path / "images")
    names = sorted(str(path.relative_to(tmp_path)) for path in (tmp_path / "images").rglob("*.JPEG"))
    (tmp_path / "list.txt").write_text("".join(f"{name} 0\n" for name in names))
    assert data("import", tmp_path / "list.txt", tmp_path / "lmdb").exit_code == 0


def test_bad_images_are_listed_before_anything_is_decided(imported: Path, tmp_path: Path) -> None:
    images = tmp_path / "images"
    shutil.copytree(imported / "images", images)
    (images / "n00000001" / "cut.JPEG").write_bytes(made_images.jpeg(1)[:300])
    (images / "n00000002" / "empty.JPEG").touch()
    refused = data("import", images, tmp_path / "out")
    assert refused.exit_code == 65 and "2 of 32 images" in refused.stderr and "--max-bad 2" in refused.stderr
    assert "n00000002/empty.JPEG: the file is empty" in refused.stderr
    allowed = data("import", images, tmp_path / "out", "--max-bad", 2)
    assert allowed.exit_code == 0 and "left out: 2 images" in allowed.stdout
    assert "goes on behind 30 records" in allowed.stderr


def test_verify_and_info_of_what_was_imported(imported: Path) -> None:
    verified = data("verify", imported / "lmdb", "--decode")
    assert verified.exit_code == 0
    assert "30 records" in verified.stdout and "digests compared, decoded" in verified.stdout
    info = data("info", imported / "lmdb")
    for words in ("30 baseline JPEG", "smallest 70 x 30", "largest 50 x 50", "classes: 3, from 10 to 10", "up to date"):
        assert words in info.stdout
    assert re.search(r"mean pixel .*\ndeviation +([0-9.]+, ){2}[0-9.]+ \(B, G, R\)\n", info.stdout)
    found = json.loads(data("info", imported / "lmdb", "--json").stdout)
    assert found["records"] == 30 and found["labels"] == [[0, 10], [1, 10], [2, 10]]
    assert len(found["mean_bgr"]) == 3 and found["decoders"] and not found["prepared"]
    full = data("info", imported / "lmdb", "--classes").stdout
    assert "  2      10      n00000002\n" in full


def test_verify_names_every_damaged_record(copy: Path) -> None:
    found = index.load(str(copy))
    assert found is not None
    keys = [found.key(i).decode() for i in (3, 17)]
    for i in (3, 17):
        flip(copy, i)
    result = data("verify", copy)
    assert result.exit_code == 65 and result.stdout.count("record `") == 2 and "2 mistakes" in result.stdout
    assert all(f"record `{key}`: its bytes are not those" in result.stdout for key in keys)
    assert [m["key"] for m in json.loads(data("verify", copy, "--json").stdout)["mistakes"]] == keys


def test_verify_and_info_without_a_side_file(copy: Path) -> None:
    (copy / SIDE_FILE).unlink()
    verified = data("verify", copy)
    assert verified.exit_code == 0 and "no side file" in verified.stdout
    info = data("info", copy)
    assert info.exit_code == 0 and f"`stagerun data index {copy}` makes it" in info.stdout


def test_index_makes_what_was_lost(copy: Path, imported: Path, tmp_path: Path) -> None:
    (copy / SIDE_FILE).unlink()
    names = tmp_path / "names.txt"
    names.write_text("n00000000\nn00000001\nn00000002\n")
    assert data("index", copy, "--classes", names).exit_code == 0
    whole = (imported / "lmdb" / SIDE_FILE).read_bytes()
    assert (copy / SIDE_FILE).read_bytes() == whole
    refused = data("index", copy)
    assert refused.exit_code == 64 and "--force" in refused.stderr
    assert data("index", copy, "--force", "--threads", 3).exit_code == 0
    assert (copy / SIDE_FILE).read_bytes() == whole  # the names too
    names.write_text("one\ntwo\n")
    short = data("index", copy, "--force", "--classes", names)
    assert short.exit_code == 65 and "label 2, but 2 class names" in short.stderr
    assert "--ignore-label N is for one that a net ignores" in " ".join(short.stderr.split())
    assert data("index", copy, "--force", "--classes", names, "--ignore-label", 2).exit_code == 0
    assert data("index", copy, "--force", "--classes", names, "--ignore-label", 1).exit_code == 65
    assert data("index", copy, "--force", "--classes", tmp_path).exit_code == 64


def test_index_with_a_record_that_cannot_be_used(copy: Path) -> None:
    (copy / SIDE_FILE).unlink()
    with lmdb.open(str(copy), map_size=1 << 30) as env, env.begin(write=True) as txn:
        whole = made_images.jpeg(0)
        txn.put(b"99999999_cut.JPEG", Datum(data=whole[:-50], encoded=True, label=1).SerializeToString())
    refused = data("index", copy)
    assert refused.exit_code == 65 and not (copy / SIDE_FILE).exists()
    assert "record `99999999_cut.JPEG`: the image is cut off" in refused.stderr and "--max-bad 1" in refused.stderr
    made = data("index", copy, "--max-bad", 1)
    assert made.exit_code == 0 and "1 record can't be used:\n  record `99999999_cut.JPEG`: " in made.stdout
    assert "1 unusable" in data("info", copy).stdout
    verified = data("verify", copy)
    assert verified.exit_code == 65 and "`99999999_cut.JPEG`" in verified.stdout


def test_a_changed_lmdb_is_said_by_all(copy: Path) -> None:
    with lmdb.open(str(copy), map_size=1 << 27) as env, env.begin(write=True) as txn:
        txn.put(b"99999999", Datum(data=made_images.jpeg(1), encoded=True, label=1).SerializeToString())
    verified = data("verify", copy)
    assert verified.exit_code == 65 and "stagerun data index --force" in verified.stderr
    info = data("info", copy)
    assert info.exit_code == 0 and "of another state" in info.stdout and "images: 31" in info.stdout
    assert data("index", copy, "--force", "--no-mean").exit_code == 0
    assert data("verify", copy).exit_code == 0
    assert "unknown" in data("info", copy).stdout


def test_where_nothing_can_be_written_the_hint_says_why(imported: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out, code, hint in [
        (Path("/proc/no-such"), 74, "no folder can be made there"),
        (tmp_path / "file" / "out", 74, "a part of that path is a file"),
        (tmp_path / ("n" * 300), 74, "give a shorter name"),
    ]:
        result = data("import", imported / "images", out)
        assert (result.exit_code, hint in result.stderr) == (code, True), result.stderr
        assert "space" not in result.stderr and str(out) in result.stderr


@pytest.mark.skipif(bool(prepare.can_prepare()), reason="needs the extra `fast`")
def test_prepare(imported: Path, tmp_path: Path) -> None:
    result = data("import", "--prepare", imported / "lmdb", tmp_path / "out")
    assert result.exit_code == 0 and f"{tmp_path}/out: 30 records" in result.stdout
    assert "prepared     yes" in data("info", tmp_path / "out").stdout
    assert data("verify", tmp_path / "out", "--decode").exit_code == 0
    result = data("import", "--prepare", imported / "lmdb", tmp_path / "none", "--limit", "3")
    assert result.exit_code == 64 and "--limit is for images" in result.stderr
    assert data("import", "--prepare", imported / "images", tmp_path / "direct").exit_code == 0
    assert "prepared     yes" in data("info", tmp_path / "direct").stdout
    mdb = (tmp_path / name / "data.mdb" for name in ("out", "direct"))
    assert len({file.read_bytes() for file in mdb}) == 1


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


@pytest.mark.parametrize(
    "folders, words",
    [
        ("apple/ train/apple/ train/pear/ val/apple/ val/pear/", "among its folders are `train` and `val`"),
        ("Training/a/ valid/a/", "its folders are `Training` and `valid`"),
        ("apple/ pear/ all/apple/ all/pear/", "the folder all holds folders named as others beside it"),
        ("fruit/apple/ fruit/pear/", "its one folder, fruit, holds only folders: `apple` and `pear`"),
        ("car/ train/steam/ train/diesel/", ""),  # classes, with pictures at any depth
        ("fruit/ fruit/pear/", ""),
    ],
)
def test_folders_of_sets_are_not_taken_for_classes(tmp_path: Path, folders: str, words: str) -> None:
    image = next((made_images.class_folders(tmp_path / "made", 1, 1)).rglob("*.*"))
    for folder in folders.split():
        (tmp_path / "photos" / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "photos" / folder / image.name).write_bytes(image.read_bytes())
    result = data("import", tmp_path / "photos", tmp_path / "lmdb")
    assert result.exit_code == (64 if words else 0), result.output
    assert words in result.output
    if words:
        first = next(
            name for name in ("train", "Training", "test", "all", "fruit") if f"/photos/{name}" in result.output
        )
        assert f"`stagerun data import {tmp_path}/photos/{first} LMDB_{first.upper()}`" in result.output
        assert not (tmp_path / "lmdb").exists()
