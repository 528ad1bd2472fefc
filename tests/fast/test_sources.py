"""Folders and lists of images, told apart and read (mistakes: tests/cases/data_import_*.txt)."""

import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
from facade import DataError, RecipeError, SourceOptions, StorageError, open_source
from made_images import refused

NONE = SourceOptions()


def write(root: Path, *names: str) -> Path:
    """Files that hold their own name."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())
    return root


def items(source: Any) -> list[tuple[str, int]]:
    return [(item.name, item.label) for item in (source.item(i) for i in range(len(source)))]


def test_a_folder_is_in_the_order_of_torchvisions_imagefolder(tmp_path):
    root = write(
        tmp_path / "set",
        *("b/2.jpg", "b/10.JPEG", "b/deep/1.png", "b/deep-er/0.bmp", "b/deep/a/x.webp", "a/with space.jpg", "C/9.Tiff"),
        *("a/notes.txt", "a/.hidden.jpg", "a/.cache/x.jpg", ".git/a/x.jpg", "b/jpg", "readme.jpg"),
    )
    source = open_source(str(root), NONE)
    assert source.kind == "folder" and source.classes == ("C", "a", "b")
    assert source.ignored == ("readme.jpg", "a/notes.txt", "b/jpg")
    assert items(source) == [
        ("C/9.Tiff", 0), ("a/with space.jpg", 1), ("b/10.JPEG", 2), ("b/2.jpg", 2), ("b/deep/1.png", 2),
        ("b/deep-er/0.bmp", 2), ("b/deep/a/x.webp", 2),
    ]  # fmt: skip
    assert [source.read(i) for i in range(len(source))] == [name.encode() for name, _ in items(source)]


def test_links_are_followed_and_loops_are_not(tmp_path):
    write(tmp_path / "elsewhere", "1.jpg", "more/2.jpg")
    root = write(tmp_path / "set", "a/3.jpg")
    (root / "b").symlink_to(tmp_path / "elsewhere")
    (root / "a" / "again").symlink_to(root / "a")
    (root / "a" / "up").symlink_to(root)
    (root / "a" / "0.jpg").symlink_to(tmp_path / "elsewhere" / "1.jpg")
    found = items(open_source(str(root), NONE))
    expected = [("a/0.jpg", 0), ("a/3.jpg", 0), ("b/1.jpg", 1), ("b/more/2.jpg", 1)]
    assert [item for item in found if "/up/" not in item[0]] == expected


def test_what_has_an_images_name_is_an_item_whatever_it_is(tmp_path):
    """Skipped, a link into storage that isn't mounted would be an image less, and nobody would know."""
    root = write(tmp_path / "set", "a/1.jpg", "a/file", "a/folder.jpg/2.JFIF", "a/3.jpe")
    (root / "a" / "broken.jpg").symlink_to(tmp_path / "nowhere")
    (root / "a" / "itself.jpg").symlink_to("itself.jpg")
    (root / "a" / "through.jpg").symlink_to("file/1.jpg")
    (root / "a" / "broken.txt").symlink_to(tmp_path / "nowhere")
    os.mkfifo(root / "a" / "pipe.jpg")
    source = open_source(str(root), NONE)
    names = ["1.jpg", "3.jpe", "broken.jpg", "itself.jpg", "pipe.jpg", "through.jpg", "folder.jpg/2.JFIF"]
    assert items(source) == [(f"a/{name}", 0) for name in names]
    assert source.ignored == ("a/broken.txt", "a/file")
    (root / "a" / "3.jpe").unlink()
    said_of = ("No such file", "No such file", "symbolic links", "not a regular file, but a pipe", "Not a directory")
    for i, said in enumerate(said_of, 1):
        with pytest.raises(DataError, match=f"a/{names[i]}: .*{said}"):
            source.read(i)


def test_a_disk_that_fails_is_no_bad_image(tmp_path):
    (tmp_path / "set" / "a").mkdir(parents=True)
    (tmp_path / "set" / "a" / "1.jpg").symlink_to("/proc/self/mem")  # whose first byte gives EIO
    source = open_source(str(tmp_path / "set"), NONE)
    with pytest.raises(StorageError, match=r"a/1.jpg: can't be read: Input/output error"):
        source.read(0)


def test_a_file_that_is_no_image_by_its_size_is_not_read_into_memory(tmp_path):
    root = write(tmp_path / "set", "a/1.jpg")
    with (root / "a" / "1.jpg").open("wb") as file:
        file.truncate((1 << 28) + 1)
    source = open_source(str(root), NONE)
    with pytest.raises(DataError, match="larger than 256 MiB"):
        source.read(0)


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_or_a_device_is_not_waited_for(tmp_path, kind):
    """A pipe that nobody writes to would keep the import, and whoever tries to stop it, for ever."""
    write(tmp_path, "1.jpg")
    if kind == "pipe":
        os.mkfifo(tmp_path / "2.jpg")
    else:
        (tmp_path / "2.jpg").symlink_to("/dev/zero")
    (tmp_path / "list.txt").write_text("1.jpg 0\n2.jpg 1\n")
    source = open_source(str(tmp_path / "list.txt"), NONE)
    assert source.read(0) == b"1.jpg"
    with pytest.raises(DataError, match=f"2.jpg: is not a regular file, but a {kind}"):
        source.read(1)
    path = str(tmp_path / "2.jpg")
    assert f"a {kind}" in refused(path)
    for format in ("list", "csv", "tar", "idx", "tfrecord", "recordio"):
        refused(path, format=format)


def test_the_signature_follows_names_labels_and_place(tmp_path):
    one = write(tmp_path / "one", "a/1.jpg", "b/1.jpg")
    first = open_source(str(one), NONE).signature
    assert (
        open_source(str(one) + "/", NONE).signature == first == open_source(str(tmp_path / "." / "one"), NONE).signature
    )
    assert open_source(str(write(tmp_path / "two", "a/1.jpg", "b/1.jpg")), NONE).signature != first
    assert open_source(str(write(one, "b/2.txt")), NONE).signature == first
    assert open_source(str(write(one, "b/2.jpg")), NONE).signature != first


def test_a_list_as_convert_imageset_reads_it(tmp_path):
    root = write(tmp_path, "a/1.jpg", "two words 3.jpg", "c.jpg")
    (root / "train.txt").write_bytes(f"a/1.jpg 0\r\n\ntwo words 3.jpg 12\nc.jpg\t7  \n{root}/a/1.jpg 3".encode())
    source = open_source(str(root / "train.txt"), NONE)
    assert source.kind == "list" and source.classes == ()
    assert items(source) == [("a/1.jpg", 0), ("two words 3.jpg", 12), ("c.jpg", 7), (f"{root}/a/1.jpg", 3)]
    assert [source.read(i) for i in (1, 3)] == [b"two words 3.jpg", b"a/1.jpg"]


def test_a_list_of_a_tars_images(tmp_path):
    """ImageNet's validation set: val.txt of Caffe, and ILSVRC2012_img_val.tar."""
    with tarfile.open(tmp_path / "val.tar", "w") as archive:
        for name in ("2.JPEG", "1.JPEG"):
            archive.addfile(info := tarfile.TarInfo(name), None)
            assert info.size == 0
    (tmp_path / "val.txt").write_text("1.JPEG 65\n2.JPEG 970\n")
    source = open_source(str(tmp_path / "val.txt"), SourceOptions(root=str(tmp_path / "val.tar")))
    assert items(source) == [("1.JPEG", 65), ("2.JPEG", 970)] and source.read(0) == b""
    (tmp_path / "val.txt").write_text("1.JPEG 65\n3.JPEG 970\n")
    assert "3.JPEG" in refused(tmp_path / "val.txt", root=str(tmp_path / "val.tar"))


def test_a_list_of_something_else_stops_after_twenty(tmp_path):
    path = tmp_path / "list.txt"
    path.write_text("\x1b[31mred\n" * 1000)
    text = refused(path, RecipeError)
    assert "20 mistakes" in text and "\x1b" not in text
    path.write_bytes(b"a 1\n\0")
    assert "NUL" in refused(path, format="list")
    path.write_bytes(bytes(range(256)) * 9)
    assert "of no format that is imported" in refused(path)
