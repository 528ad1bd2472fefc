"""TFRecord shards and RecordIO files, made by hand after their published formats: read, and refused where they are damaged."""

import struct
from pathlib import Path

import google_crc32c
import pytest
from facade import DataError, SourceOptions, open_source, tfexample_pb2
from made_images import everything, refused

NONE = SourceOptions()
MAGIC = struct.pack("<I", 0xCED7230A)


# TFRecord


def test_a_flipped_bit_is_found(tmp_path):
    path = tmp_path / "x.tfrecord"
    whole = record(example(image__encoded=bytes(5000), image__class__label=3))
    for at in (500, 4000, len(whole) - 1):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        source = open_source(str(path), NONE)
        for what in (source.item, source.read):
            with pytest.raises(DataError, match="record 0 at byte 12: its data have a wrong checksum"):
                what(0)


def masked_crc(data: bytes) -> int:
    crc = int(google_crc32c.value(data))
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc(length)) + data + struct.pack("<I", masked_crc(data))


def example(**features: bytes | int | list[int]) -> bytes:
    """`image__encoded=...` is the key image/encoded."""
    message = tfexample_pb2.Example()
    for name, value in features.items():
        feature = message.features.feature[name.replace("__", "/")]
        if isinstance(value, bytes):
            feature.bytes_list.value.append(value)
        else:
            feature.int64_list.value.extend(value if isinstance(value, list) else [value])
    return message.SerializeToString(deterministic=True)  # of a map: tests are named by it


def imagenet(i: int, synset: bytes = b"n01440764") -> bytes:
    return example(
        image__encoded=b"jpeg %d" % i,
        image__class__label=i + 1,
        image__class__synset=synset,
        image__filename=synset + b"_%d.JPEG" % i,
        image__height=3,
        image__format=b"JPEG",
    )


def shards(folder: Path, split: str = "train", n: int = 3, each: int = 2) -> Path:
    folder.mkdir(exist_ok=True)
    for shard in range(n):
        data = b"".join(record(imagenet(shard * each + i)) for i in range(each))
        (folder / f"{split}-{shard:05d}-of-{n:05d}").write_bytes(data)
    return folder


def test_imagenets_shards_in_their_order_with_labels_from_1(tmp_path):
    folder = shards(tmp_path / "tf")
    shards(folder, "validation", 2, 1)
    expected = [(f"n01440764/n01440764_{i}.JPEG", i, b"jpeg %d" % i) for i in range(6)]
    source = open_source(str(folder), NONE)
    assert source.kind == "tfrecord" and source.classes == () and everything(source) == expected
    assert everything(open_source(str(folder), SourceOptions(split="val"))) == expected[:2]
    assert everything(open_source(f"{folder}/train-00001-of-00003", NONE)) == expected[2:4]
    assert "no records of the split `test`" in refused(folder, split="test")


def test_without_synsets_labels_count_from_0(tmp_path):
    path = tmp_path / "flowers.tfrecord"
    path.write_bytes(record(example(image__encoded=b"a", image__class__label=0)))
    assert everything(open_source(str(path), NONE)) == [("flowers.tfrecord/000000", 0, b"a")]
    assert everything(open_source(str(tmp_path), NONE)) == [("flowers.tfrecord/000000", 0, b"a")]


def test_missing_shards_are_named(tmp_path):
    folder = shards(tmp_path / "tf", n=4)
    (folder / "train-00002-of-00004").unlink()
    assert "1 of the 4 shards of train are missing" in refused(folder)


@pytest.mark.parametrize(
    "data, words",
    [
        (example(image__class__label=1), "0 values of `image/encoded` (bytes_list), not one"),
        (example(image=b"x", label=1), "0 values of `image/class/label`"),
        (example(image__encoded=b"x", image__class__label=[1, 2]), "2 values of `image/class/label`"),
        (example(image__encoded=b"x", image__class__label=b"1"), "0 values of `image/class/label`"),
        (example(image__encoded=b"x", image__class__label=0, image__class__synset=b"n"), "`image/class/label` is 0"),
        (example(image__encoded=b"x", image__class__label=-1), "`image/class/label` is -1"),
        (b"\x0a\xff\xff", "not a tf.train.Example"),
        (b"", "0 values of `image/class/label`"),
    ],
)
def test_a_record_of_another_kind_is_one_bad_image_with_its_place(tmp_path, data, words):
    path = tmp_path / "x.tfrecord"
    path.write_bytes(record(imagenet(0)) + record(data))
    source = open_source(str(path), NONE)
    with pytest.raises(DataError) as error:
        source.item(1), source.read(1)
    assert words in error.value.message and f"{path}: record 1 at byte " in error.value.message
    assert source.item(0).label == 0


def test_damaged_shards_say_where(tmp_path):
    good = record(imagenet(0))
    cases = {
        "goes on": (good + record(imagenet(1))[:-5], f"no record at byte {len(good)}"),
        "within the length": (good + record(b"x")[:7], f"12 bytes at {len(good)}, but the file ends at"),
        "a wrong length": (good + b"\1" + record(imagenet(1))[1:], f"no record at byte {len(good)}"),
        "a huge length": (
            good + struct.pack("<Q", 1 << 62) + struct.pack("<I", masked_crc(struct.pack("<Q", 1 << 62))),
            f"no record at byte {len(good)}",
        ),
        "nothing": (b"", "no records"),
        "gzip": (b"\x1f\x8b" + bytes(30), "no record at byte 0"),
    }
    for name, (data, words) in cases.items():
        path = tmp_path / "x.tfrecord"
        path.write_bytes(data)
        text = refused(path, format="tfrecord")
        assert words in text and str(path) in text, name


def part(kind: int, data: bytes) -> bytes:
    return MAGIC + struct.pack("<I", kind << 29 | len(data)) + data + bytes(-len(data) % 4)


def packed(data: bytes) -> bytes:
    """A record as dmlc's writer makes it: cut where the magic number stands at a multiple of 4."""
    cuts = [at for at in range(0, len(data) - 3, 4) if data[at : at + 4] == MAGIC]
    edges = [0, *(at + 4 for at in cuts)]
    pieces = [data[a:b] for a, b in zip(edges, [*cuts, len(data)], strict=True)]
    if len(pieces) == 1:
        return part(0, data)
    return b"".join(part(1 if i == 0 else 3 if i == len(pieces) - 1 else 2, p) for i, p in enumerate(pieces))


def image(label: float, number: int, body: bytes, flag: int = 0) -> bytes:
    return struct.pack("<IfQQ", flag, label, number, 0) + body


BODIES = [b"jpeg", b"tiny", b"12" + MAGIC + b"x", MAGIC * 3, b"abcd" + MAGIC, b"abcd" + MAGIC + b"odd", b"q" * 1001]


def rec(folder: Path, idx: bool = True, lst: bool = True) -> Path:
    data, offsets = b"", []
    for i, body in enumerate(BODIES):
        offsets.append(len(data))
        data += packed(image(float(i % 3), 100 + i, body))
    (folder / "x.rec").write_bytes(data)
    if idx:
        (folder / "x.idx").write_text("".join(f"{100 + i}\t{at}\n" for i, at in enumerate(offsets)))
    if lst:
        (folder / "x.lst").write_text("".join(f"{100 + i}\t{i % 3}.000000\tdir {i}/{i}.jpg\n" for i in range(9)))
    return folder / "x.rec"


def test_recordio_with_its_list(tmp_path):
    source = open_source(str(rec(tmp_path)), NONE)
    assert source.kind == "recordio" and source.classes == ()
    assert everything(source) == [(f"dir {i}/{i}.jpg", i % 3, body) for i, body in enumerate(BODIES)]


def test_recordio_alone_is_named_by_its_ids(tmp_path):
    source = open_source(str(rec(tmp_path, idx=False, lst=False)), NONE)
    assert everything(source) == [(f"x/{100 + i:08d}", i % 3, body) for i, body in enumerate(BODIES)]


WHOLE = packed(image(1.0, 0, b"x" * 50))
BROKEN = {
    "several labels": (
        WHOLE + packed(image(0.0, 1, bytes(12), flag=3)),
        f"at byte {len(WHOLE)} has the label 0, and 3 more",
    ),
    "half a label": (packed(image(1.5, 1, b"body")), "has the label 1.5"),
    "no number": (packed(image(float("nan"), 1, b"body")), "the label nan"),
    "a negative label": (packed(image(-1.0, 1, b"body")), "the label -1"),
    "infinite": (packed(image(float("inf"), 1, b"body")), "the label inf"),
    "too short": (packed(b"short"), "too short"),
    "no magic": (WHOLE + bytes(40), f"no record at byte {len(WHOLE)}"),
    "cut off": (WHOLE + WHOLE[:-8], f"but the file ends at {2 * len(WHOLE) - 8}"),
    "cut off in the head": (WHOLE + WHOLE[:5], f"8 bytes at {len(WHOLE)}, but"),
    "no last part": (part(1, image(1.0, 0, b"x")) + WHOLE, "not all parts of one"),
    "no first part": (part(3, image(1.0, 0, b"x")), "not all parts of one"),
    "an unknown part": (part(5, image(1.0, 0, b"x")), "not all parts of one"),
    "a part that ends the file": (part(1, image(1.0, 0, b"x")), "bytes"),
    "empty": (b"", "no records"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_recordio_says_where(tmp_path, case):
    data, words = BROKEN[case]
    (tmp_path / "x.rec").write_bytes(data)
    text = refused(tmp_path / "x.rec", format="recordio")
    assert words in text and str(tmp_path / "x.rec") in text


def test_records_that_the_list_lacks_are_named_by_their_ids(tmp_path):
    path = rec(tmp_path)
    (tmp_path / "x.lst").write_text("101\t0\ta.jpg\n")
    assert [name for name, _, _ in everything(open_source(str(path), NONE))][:3] == [
        "x/00000100",
        "a.jpg",
        "x/00000102",
    ]
