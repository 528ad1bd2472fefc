"""ImageNet's archive and others, read in place; and tars that lie."""

import gzip
import io
import os
import tarfile
from pathlib import Path

import pytest
from facade import DataError, SourceOptions, StagerunError, open_source
from made_images import everything, refused

NONE = SourceOptions()


def tar(*files: tuple[str, bytes] | tarfile.TarInfo, format: int = tarfile.GNU_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as archive:
        for file in files:
            if isinstance(file, tarfile.TarInfo):
                archive.addfile(file)
                continue
            info = tarfile.TarInfo(file[0])
            info.size = len(file[1])
            archive.addfile(info, io.BytesIO(file[1]))
    return out.getvalue()


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def put(path: Path, data: bytes | str) -> str:
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return str(path)


SYNSETS = ("n00000001", "n00000002", "n00000003")


def train(tmp_path: Path) -> str:
    inner = {s: tar(*((f"{s}_{i}.JPEG", f"{s}{i}".encode() * 300) for i in (10, 2))) for s in reversed(SYNSETS)}
    return put(tmp_path / "ILSVRC2012_img_train.tar", tar(*((f"{s}.tar", data) for s, data in inner.items())))


def test_imagenets_train_is_a_tar_of_tars_with_sorted_synsets_as_labels(tmp_path):
    source = open_source(train(tmp_path), NONE)
    assert source.kind == "imagenet" and source.classes == SYNSETS
    assert everything(source) == [
        (f"{s}/{s}_{i}.JPEG", label, f"{s}{i}".encode() * 300) for label, s in enumerate(SYNSETS) for i in (10, 2)
    ]


def test_a_synsets_file_gives_the_labels_and_their_names(tmp_path):
    words = put(tmp_path / "synset_words.txt", "n00000002 9 iron\nn00000009 none here\nn00000001 x\nn00000003 y, z\n")
    source = open_source(train(tmp_path), SourceOptions(synsets=words))
    assert [label for _, label, _ in everything(source)] == [2, 2, 0, 0, 3, 3]
    assert source.classes[0] == "n00000002 9 iron" and len(source.classes) == 4
    short = put(tmp_path / "short.txt", "n00000002\n")
    assert "the class n00000001 is not in" in refused(train(tmp_path), synsets=short)


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("top", ["", "./", "train/", "./data/"])
def test_a_tar_of_class_folders(tmp_path, top, format):
    long = "b/" + "deep/" * 15 + "x" * 90 + ".jpg"  # needs ustar's prefix, GNU's long name or pax
    data = tar(
        special(top + "b", tarfile.DIRTYPE),
        *((top + name, name.encode()) for name in (long, "b/2.png", "a/1.jpg", "a/caf\xe9.jpg", "a/._1.jpg", "notes.txt")),
        format=format,
    )  # fmt: skip
    source = open_source(put(tmp_path / "train.tar", data), NONE)
    assert source.kind == "folder" and source.classes == ("a", "b")
    assert everything(source) == [
        (name, label, name.encode())
        for name, label in (("a/1.jpg", 0), ("a/caf\xe9.jpg", 0), ("b/2.png", 1), (long, 1))
    ]


def raw(name: bytes, size: bytes, kind: bytes = b"0", body: bytes = b"") -> bytes:
    """A header made by hand, with the right checksum."""
    header = bytearray(512)
    header[: len(name)], header[124 : 124 + len(size)], header[156:157], header[257:263] = name, size, kind, b"ustar\0"
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + body + bytes(-len(body) % 512)


GOOD = raw(b"a/1.jpg", b"3", body=b"abc")
HOSTILE = {
    "dot dot": (tar(("a/1.jpg", b"x"), ("a/../../etc/passwd.jpg", b"x")), "outside of the archive"),
    "absolute": (tar(("/a/1.jpg", b"x")), "outside of the archive"),
    "a symbolic link": (tar(("a/1.jpg", b"x"), special("a/2.jpg", tarfile.SYMTYPE, "/etc/passwd")), "is a link, a device"),
    "a hard link": (tar(("a/1.jpg", b"x"), special("a/2.jpg", tarfile.LNKTYPE, "a/1.jpg")), "is a link, a device"),
    "a device": (tar(special("a/2.jpg", tarfile.CHRTYPE)), "is a link, a device"),
    "a negative size": (GOOD + raw(b"a/2.jpg", b"\xff" * 11 + b"\0") + bytes(1024), "x.tar"),
    "a negative octal size": (GOOD + raw(b"a/2.jpg", b"-0000001000") + bytes(1024), "has -512 bytes"),
    "a huge size": (GOOD + raw(b"a/2.jpg", b"\x80" + b"\0" * 6 + b"\x7f" * 5) + bytes(1024), "1024 remain"),
    "a thousand long names": ((raw(b"x", b"1", b"L", b"y") * 2000) + bytes(1024), "damaged"),
    "pax that goes nowhere": (raw(b"x", b"10", b"x", b"0 path=a") + GOOD + bytes(1024), "damaged"),
    "pax of a negative size": (raw(b"x", b"14", b"x", b"11 size=-5\n\0") + GOOD + bytes(1024), "has -5 bytes"),
    "pax of a huge size": (raw(b"x", b"30", b"x", b"24 size=99999999999999\n\0") + GOOD + bytes(1024), "has 99999999999999 bytes"),
    "cut off in a file": (tar(("a/1.jpg", bytes(5000)))[:3000], "`a/1.jpg` has 5000 bytes, and 2488 remain"),
    "cut off in a header": (tar(("a/1.jpg", b"x"))[:1300], "cut off within one"),
    "a damaged header": (GOOD + b"\1" * 512 + GOOD + bytes(1024), "at byte 1024: not a tar header"),
    "no images": (tar(("readme", b"x")), "no images in it"),
    "tars and images": (tar(("a.tar", tar(("1.jpg", b"x"))), ("2.jpg", b"x")), "some in no class folder"),
    "an image in no class": (tar(("a/1.jpg", b"x"), ("2.jpg", b"x")), "some in no class folder"),
    "a validation set": (tar(("1.jpg", b"x"), ("2.jpg", b"x")), "the tar as --root"),
    "train and val": (tar(("train/a/1.jpg", b"x"), ("val/a/2.jpg", b"x")), "which are not classes"),
    "an inner tar that is none": (tar(("n00000001.tar", b"x" * 600)), "not a tar"),
    "zeros where a download went on": (GOOD + bytes((1 << 24) + 512), "not a tar header"),
    "gzipped": (gzip.compress(GOOD), "gunzip"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_and_broken_tars(tmp_path, case):
    data, words = HOSTILE[case]
    path = put(tmp_path / "x.tar", data)
    text = refused(path, StagerunError, format="tar")
    assert words in text and path in text and "hint: " in text


def test_an_inner_tar_cannot_read_beyond_its_end(tmp_path):
    inner = GOOD + raw(b"n1_2.JPEG", b"2000")  # says that the image goes on where the next class begins
    path = put(tmp_path / "x.tar", tar(("n00000001.tar", inner), ("n00000002.tar", bytes(4096))))
    assert "n00000001.tar: `n1_2.JPEG` has 1024 bytes, and 0 remain" in refused(path)


def test_an_archive_that_shrinks_under_us(tmp_path):
    path = train(tmp_path)
    source = open_source(path, NONE)
    before = source.signature
    data = Path(path).read_bytes()
    with open(path, "r+b") as file:
        file.truncate(3000)
    with pytest.raises(DataError, match="became shorter"):
        source.read(len(source) - 1)
    Path(path).write_bytes(data)
    os.utime(path, ns=(1, 1))
    assert open_source(path, NONE).signature != before  # the same bytes, of another time: it may be anything
