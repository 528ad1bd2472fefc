"""Archives of every format with random bytes changed: a source or an error that a user can read, nothing else."""

import random

import numpy as np
import pytest
from facade import DataError, SourceOptions, StagerunError, open_source
from test_sources_pixels import idx
from test_sources_records import BODIES, image, imagenet, packed, record
from test_sources_tar import put, tar

SEEDS = {
    "inner.tar": tar(*((f"n0000000{c}.tar", tar(("a.JPEG", b"x" * 700), ("b.JPEG", b"y"))) for c in (1, 2, 3))),
    "folders.tar": tar(*((f"top/c{c}/{'deep/' * 30}{i}.jpg", b"abc") for c in (1, 2) for i in (1, 2))),
    "x.tfrecord": b"".join(record(imagenet(i)) for i in range(4)),
    "x.rec": b"".join(packed(image(float(i), i, body)) for i, body in enumerate(BODIES)),
    "train-images-idx3-ubyte": idx(np.zeros((12, 5, 7), np.uint8)),
    "list.txt": b"a/1.jpg 0\nb/2.jpg 1\nc d/3.jpg 2\n",
}


def with_right_checksums(data: bytearray) -> None:
    """The data with those of its tar headers, so that damage gets behind them."""
    for at in range(0, len(data) - 511, 512):
        if data[at + 257 : at + 262] == b"ustar":
            data[at + 148 : at + 156] = b" " * 8
            data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])


@pytest.mark.parametrize("name", SEEDS)
def test_damage_ends_in_a_message(tmp_path, name):
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.arange(12, dtype=np.uint8)))
    for line in SEEDS["list.txt"].splitlines():  # a list whose files are all missing is refused
        image_file = tmp_path / line.rpartition(b" ")[0].decode()
        image_file.parent.mkdir(exist_ok=True)
        image_file.write_bytes(b"abc")
    path = tmp_path / name
    chance = random.Random(name)
    opened = refused = 0
    for _ in range(120):
        data = bytearray(SEEDS[name])
        for _ in range(chance.choice((1, 1, 5, 30))):
            at = int(len(data) * chance.random() ** chance.choice((1, 4)))
            data[at] = chance.choice((0, 0xFF, 0x30, 0x37, 0x20, chance.randrange(256)))
        if chance.random() < 0.2:
            del data[chance.randrange(len(data)) :]
        if name.endswith(".tar") and chance.random() < 0.7:
            with_right_checksums(data)
        put(path, bytes(data))
        try:
            source = open_source(str(path), SourceOptions())
        except StagerunError as error:
            assert error.render()
            refused += 1
            continue
        opened += 1
        for i in range(len(source)):
            try:
                assert source.item(i).label >= 0
                source.read(i)
            except DataError as error:
                assert error.message
    assert opened and refused
