"""Folders and lists of images, told apart and read; what is wrong with them is said with its place."""

import errno
import os
from pathlib import Path

import pytest

from stagerun.base.errors import DataError, RecipeError, StagerunError, StorageError, UsageError
from stagerun.tools.data.sources import Source, SourceOptions, open_source

NONE = SourceOptions()


def write(root: Path, *names: str) -> Path:
    """Files that hold their own name."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())
    return root


def items(source: Source) -> list[tuple[str, int]]:
    return [(item.name, item.label) for item in (source.item(i) for i in range(len(source)))]


def refused(path: Path | str, kind: type[StagerunError] = DataError, **options: str) -> str:
    with pytest.raises(kind) as error:
        open_source(str(path), SourceOptions(**options))
    text = error.value.render()
    assert "hint: " in text and str(path) in text
    return text


# folders


def test_a_folder_is_in_the_order_of_torchvisions_imagefolder(tmp_path: Path) -> None:
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


def test_links_are_followed_and_loops_are_not(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere", "1.jpg", "more/2.jpg")
    root = write(tmp_path / "set", "a/3.jpg")
    (root / "b").symlink_to(tmp_path / "elsewhere")
    (root / "a" / "again").symlink_to(root / "a")
    (root / "a" / "up").symlink_to(root)
    (root / "a" / "0.jpg").symlink_to(tmp_path / "elsewhere" / "1.jpg")
    found = items(open_source(str(root), NONE))
    assert [item for item in found if "/up/" not in item[0]] == [
        ("a/0.jpg", 0),
        ("a/3.jpg", 0),
        ("b/1.jpg", 1),
        ("b/more/2.jpg", 1),
    ]


def test_what_has_an_images_name_is_an_item_whatever_it_is(tmp_path: Path) -> None:
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
    for i, said in (
        (2, "No such file"),
        (3, "symbolic links"),
        (4, "not a regular file, but a pipe"),
        (5, "Not a directory"),
    ):
        with pytest.raises(DataError, match=f"a/{names[i]}: .*{said}"):
            source.read(i)


def test_folders_that_are_no_classes(tmp_path: Path) -> None:
    assert "no images in the class folder b" in refused(write(tmp_path / "1", "a/1.jpg", "b/1.txt"))
    assert "which are not classes" in refused(write(tmp_path / "2", "train/a/1.jpg", "val/a/1.jpg"), UsageError)
    assert "images without class folders" in refused(write(tmp_path / "3", "1.jpg", "2.jpg"))
    assert "nothing in it that is known" in refused(write(tmp_path / "4", "1.doc"))
    assert "no such file" in refused(tmp_path / "5")
    assert "LMDB already" in refused(write(tmp_path / "6", "data.mdb", "lock.mdb"), UsageError)
    assert "no class folders" in refused(write(tmp_path / "7", "x"), format="folder")


def test_synsets_give_a_folder_its_labels_and_names(tmp_path: Path) -> None:
    root = write(tmp_path / "set", "n00000001/1.jpg", "n00000003/1.jpg")
    words = tmp_path / "synset_words.txt"
    words.write_text("n00000003 crane\nn00000002 heron, bird\nn00000001 crane\n")
    source = open_source(str(root), SourceOptions(synsets=str(words)))
    assert items(source) == [("n00000001/1.jpg", 2), ("n00000003/1.jpg", 0)]
    assert source.classes == ("n00000003 crane", "n00000002 heron, bird", "n00000001 crane")
    write(root, "dogs/1.jpg")
    assert "dogs is not in" in refused(root, synsets=str(words))


def test_a_file_that_vanished_is_one_bad_image(tmp_path: Path) -> None:
    source = open_source(str(write(tmp_path / "set", "a/1.jpg", "a/2.jpg")), NONE)
    (tmp_path / "set" / "a" / "1.jpg").unlink()
    with pytest.raises(DataError, match=r"a/1.jpg: can't be read: No such file"):
        source.read(0)
    assert source.read(1) == b"a/2.jpg"


def test_a_disk_that_fails_is_no_bad_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(str(write(tmp_path / "set", "a/1.jpg")), NONE)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr("builtins.open", fail)
    with pytest.raises(StorageError, match=r"a/1.jpg: can't be read: Stale file handle"):
        source.read(0)


def test_a_file_that_is_no_image_by_its_size_is_not_read_into_memory(tmp_path: Path) -> None:
    root = write(tmp_path / "set", "a/1.jpg")
    with (root / "a" / "1.jpg").open("wb") as file:
        file.truncate((1 << 28) + 1)
    source = open_source(str(root), NONE)
    with pytest.raises(DataError, match="larger than 256 MiB"):
        source.read(0)


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_or_a_device_is_not_waited_for(tmp_path: Path, kind: str) -> None:
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
    for format in ("list", "imagenet", "cifar", "idx", "tfrecord", "recordio"):
        refused(path, format=format)
    tar = str(tmp_path / "list.txt")
    refused(path, format="folder"), refused(path, format="imagenet", ground_truth=tar)


def test_the_signature_follows_names_labels_and_place(tmp_path: Path) -> None:
    one = write(tmp_path / "one", "a/1.jpg", "b/1.jpg")
    first = open_source(str(one), NONE).signature
    assert (
        open_source(str(one) + "/", NONE).signature == first == open_source(str(tmp_path / "." / "one"), NONE).signature
    )
    assert open_source(str(write(tmp_path / "two", "a/1.jpg", "b/1.jpg")), NONE).signature != first
    assert open_source(str(write(one, "b/2.txt")), NONE).signature == first
    assert open_source(str(write(one, "b/2.jpg")), NONE).signature != first


def test_a_list_as_convert_imageset_reads_it(tmp_path: Path) -> None:
    root = write(tmp_path, "a/1.jpg", "two words 3.jpg", "c.jpg")
    (root / "train.txt").write_bytes(b"a/1.jpg 0\r\n\ntwo words 3.jpg 12\nc.jpg\t7  \na/1.jpg 3")
    source = open_source(str(root / "train.txt"), NONE)
    assert source.kind == "list" and source.classes == ()
    assert items(source) == [("a/1.jpg", 0), ("two words 3.jpg", 12), ("c.jpg", 7), ("a/1.jpg", 3)]
    assert source.read(1) == b"two words 3.jpg"


def test_a_lists_root_is_given(tmp_path: Path) -> None:
    write(tmp_path / "images", "x.jpg")
    (tmp_path / "list").write_text("x.jpg 1\n" + f"{tmp_path}/images/x.jpg 2\n")
    source = open_source(str(tmp_path / "list"), SourceOptions(root=str(tmp_path / "images")))
    assert source.read(0) == source.read(1) == b"x.jpg"
    with pytest.raises(DataError, match=r"nowhere: no such folder"):
        open_source(str(tmp_path / "list"), SourceOptions(root=str(tmp_path / "nowhere")))


def test_a_list_none_of_whose_files_is_there_wants_another_root(tmp_path: Path) -> None:
    write(tmp_path / "images", "x.jpg", "y.jpg")
    path = tmp_path / "lists" / "list.txt"
    path.parent.mkdir()
    path.write_text("x.jpg 1\ny.jpg 2\n")
    text = refused(path)
    assert "none of its 2 files is there" in text and "--root" in text and f"{tmp_path}/lists/x.jpg" in text
    assert "--root" in refused(path, root=str(tmp_path / "lists"))
    assert len(open_source(str(path), SourceOptions(root=str(tmp_path / "images")))) == 2
    path.write_text("/x.jpg 1\n")
    assert "begin with `/`" in refused(path, root=str(tmp_path / "images"))
    path.write_text("gone.jpg 1\nx.jpg 2\n")
    source = open_source(str(path), SourceOptions(root=str(tmp_path / "images")))  # one is there: so is the folder
    assert source.read(1) == b"x.jpg"


def test_the_mistakes_of_a_list_come_all_at_once_with_their_places(tmp_path: Path) -> None:
    path = tmp_path / "val.txt"
    path.write_text(
        "good.jpg 1\nno-label.jpg\na b.jpg -1\nx.jpg 2.5\nx.jpg 99999999999\nx.jpg one\nx.jpg ١\nlast.jpg 2\n"
    )
    text = refused(path, RecipeError, format="list")
    places = [line.split(": ")[0] for line in text.splitlines() if line.startswith(str(path))]
    assert places == [f"{path}:{line}" for line in ("2:1", "3:9", "4:7", "5:7", "6:7", "7:7")]
    assert "`-1` is not a label: a whole number from 0 to" in text and "6 mistakes" in text
    assert "  a b.jpg -1\n          ^^\n" in text


def test_a_list_of_something_else_stops_after_twenty(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_text("\x1b[31mred\n" * 1000)
    text = refused(path, RecipeError)
    assert "more than 20 mistakes" in text and "21 mistakes" in text and "\x1b" not in text


def test_empty_lists_and_files(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("\n\n")
    assert "no images" in refused(tmp_path / "list.txt")
    (tmp_path / "empty").write_bytes(b"")
    assert "empty" in refused(tmp_path / "empty")
    (tmp_path / "a.bin").write_bytes(bytes(range(256)) * 9)
    assert "of no format that is known" in refused(tmp_path / "a.bin")
    (tmp_path / "a.json").write_text('{"images": []}')
    assert "not a list of images" in refused(tmp_path / "a.json")
    assert "is a folder" in refused(tmp_path, format="list")
    (tmp_path / "nul.txt").write_bytes(b"a 1\n\0")
    assert "NUL" in refused(tmp_path / "nul.txt", format="list")


def test_options_that_would_do_nothing_are_refused(tmp_path: Path) -> None:
    root = write(tmp_path / "set", "a/1.jpg")
    for option in ("root", "labels"):
        with pytest.raises(UsageError, match=f"--{option} means nothing for the format `folder`"):
            open_source(str(root), SourceOptions(**{option: str(root)}))
    with pytest.raises(UsageError, match="`foldr` is not a format") as error:
        open_source(str(root), SourceOptions(format="foldr"))
    assert error.value.hint == "did you mean `folder`?"
    with pytest.raises(UsageError, match="is not a split"):
        open_source(str(root), SourceOptions(split="dev"))
