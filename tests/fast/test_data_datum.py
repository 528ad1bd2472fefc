"""datum: what is in a record, and what is said of each kind of bad one."""

import cv2
import numpy as np
import pytest
from facade import DataError, Datum
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from made_images import decoded as decode
from made_images import raw
from made_images import stored as record

RNG = np.random.default_rng(0)
PHOTO = cv2.GaussianBlur(RNG.integers(0, 256, (60, 90, 3), np.uint8), (9, 9), 0)
GREY = PHOTO[:, :, 0].copy()
GREY_JPEG = cv2.imdecode(cv2.imencode(".jpg", GREY)[1], cv2.IMREAD_GRAYSCALE)[:, :, None]


def encode(image: np.ndarray, kind: str = ".jpg", *options: int) -> bytes:
    return cv2.imencode(kind, image, list(options))[1].tobytes()


@pytest.mark.parametrize(
    ("value", "channels", "expected"),
    [
        (raw(PHOTO, 7), 3, PHOTO),
        (raw(GREY[:, :, None], 7), 1, GREY[:, :, None]),
        (record(encode(PHOTO, ".png"), 7), 3, PHOTO),
        (record(encode(GREY), 7), 1, GREY_JPEG),
        (record(encode(GREY), 7), 3, np.dstack([GREY_JPEG] * 3)),
    ],
    ids=["raw", "raw grey", "PNG", "grey", "grey among colours"],
)
def test_a_record_becomes_rows_of_blue_green_red(value, channels, expected):
    image, label = decode(value, channels)
    assert np.array_equal(image, expected) and label == 7


@pytest.mark.parametrize("kind", [".jpg", ".png"])
@pytest.mark.parametrize("options", [(), (cv2.IMWRITE_JPEG_PROGRESSIVE, 1), (cv2.IMWRITE_JPEG_RST_INTERVAL, 2)])
def test_a_cut_off_file_is_never_half_a_picture(kind, options):
    whole = encode(PHOTO, kind, *(options if kind == ".jpg" else ()))
    assert np.array_equal(decode(record(whole))[0], decode(record(whole + b"camera's own bytes"))[0])
    for length in {*range(20, len(whole) - 1, 97), len(whole) // 2, len(whole) - 1, len(whole) - 2}:
        with pytest.raises(DataError, match="cut off"):
            decode(record(whole[:length]))


def garbled(start: int, length: int) -> bytes:
    data = encode(PHOTO)
    return record(data[:start] + bytes(length) + data[start + length :])


ENORMOUS = encode(PHOTO, ".png")[:16] + (60_000).to_bytes(4, "big") * 2 + encode(PHOTO, ".png")[24:]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"", "is empty"),
        (b"\xff" * 40, "not a Caffe Datum"),
        (Datum(float_data=[1.0, 2.0]).SerializeToString(), "float_data"),
        (Datum(label=1).SerializeToString(), "no image"),
        (record(b"GIF89a" + bytes(50)), "neither JPEG nor PNG"),
        (garbled(2, 198), "neither JPEG nor PNG"),
        (garbled(encode(PHOTO).index(b"\xff\xc0") + 5, 4), "can't be decoded"),
        (record(ENORMOUS), "60000 x 60000 pixels"),
        (
            Datum(channels=3, height=60, width=90, data=bytes(16199)).SerializeToString(),
            "says 3 x 60 x 90 (channels x height x width) bytes, but holds 16199",
        ),
        (Datum(channels=3, height=60, width=90, data=encode(PHOTO)).SerializeToString(), "encoded: true"),
        (Datum(channels=-1, height=60, width=-90, data=GREY.tobytes()).SerializeToString(), "-1"),
        (raw(GREY[:, :, None]), "`channels: 1`"),
        (record(encode(np.dstack([PHOTO, GREY]), ".png")), "alpha"),
        (record(encode(PHOTO.astype(np.uint16) * 256, ".png")), "16 bits"),
        (record(encode(PHOTO), label=10), "label is 10, but num_classes is 10"),
        (record(encode(PHOTO), label=-1), "below 0"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_every_kind_of_bad_record_is_named(value, words):
    with pytest.raises(DataError) as error:
        decode(value)
    assert error.value.hint and words in error.value.render()


# A Datum's fields in any order and number, and what is no field.
PIECES = [b"\x08\x01", b"\x10\x02", b"\x18\x01", b"\x28\x07", b"\x22\x02ab", b"\x22\x02cd", b"\x38\0", b"\x38\x80\x02", b"\x10\x82\x80\x00",
    b"\x48\x05", b"\x22\x05ab", b"\x28\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\x28\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\x28", b"\x35\0\0\x80\x3f", b"\x32\x04\0\0\x80\x3f", b"\x0b", b"\xa8\x00\x01", b"\x00"]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=6).map(b"".join), st.booleans())
def test_odd_bytes_are_what_protobuf_says_they_are(value, usual):
    value = (raw(np.full((2, 1, 1), 9, np.uint8), 3) if usual else b"\x28\x01") + value
    try:
        datum = Datum.FromString(value)
    except DecodeError:
        with pytest.raises(DataError, match="not a Caffe Datum"):
            decode(value, 1)
        return
    shape = (datum.height, datum.width, datum.channels)
    readable = not datum.encoded and shape == (2, 1, 1) and len(datum.data) == 2
    if readable and 0 <= datum.label < 10:
        image, label = decode(value, 1)
        assert (image.tobytes(), label) == (datum.data, datum.label)
    else:
        with pytest.raises(DataError) as error:
            decode(value, 1)
        assert "not a Caffe Datum" not in error.value.message


def test_other_channels_are_the_recipes_mistake():
    for value in (record(encode(PHOTO)), record(encode(PHOTO, ".png")), raw(PHOTO)):
        with pytest.raises(DataError, match="3 channels, the network takes 1") as error:
            decode(value, 1)
        assert "`channels: 3`" in error.value.hint
    with pytest.raises(DataError, match="1 channel, the network takes 3"):
        decode(raw(GREY[:, :, None]))
