"""JPEGs without decoding: a file whose parts can be cut out, with the same pixels; and what a header says."""

import made_images
import numpy as np
import pytest
from facade import DataError, prepare, read_header
from facade import jpeg as decoding
from jpeg_pictures import END, FRAME, SAMPLINGS, SCAN, by_pillow, changed, jpeg, whole

from stagerun.data.jpeg import decoder as slices

needs_library = pytest.mark.skipif(not made_images.prepared([jpeg(60, 90)]), reason="needs the extra `fast`")


@needs_library
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("size", [(60, 90), (61, 91), (17, 200), (200, 17), (129, 128)])
def test_the_pixels_stay_and_parts_can_be_cut(sampling, size):
    for options in ({}, {"progressive": True}, {"grey": True}, {"interval": 7}):
        data = jpeg(*size, sampling, **options)
        prepared = prepare(data)
        header = read_header(prepared)
        assert np.array_equal(whole(prepared), whole(data))
        assert not header.progressive and header.restart_interval and slices.grid(header) is not None
        assert prepare(prepared) is prepared


@needs_library
def test_colour_spaces_are_kept_and_metadata_are_not():
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\1\x01\x12\0\3\0\0\0\1\0\6\0\0\0\0\0\0"
    for mode, options in (("RGB", {"keep_rgb": True}), ("RGB", {"exif": exif, "comment": b"taken by"}), ("L", {})):
        data = by_pillow(mode, **options)
        prepared = prepare(data)
        assert np.array_equal(whole(prepared), whole(data))
        assert b"Exif" not in prepared and b"taken by" not in prepared


@needs_library
def test_what_gains_nothing_comes_back_as_it_is():
    for data in (by_pillow("CMYK"), jpeg(8, 8), jpeg(16, 16), jpeg(8, 8, grey=True)):
        assert prepare(data) is data


@needs_library
def test_damaged_files_are_refused():
    data = jpeg(60, 90)
    tables = data.index(b"\xff\xc4")
    with pytest.raises(DataError, match="can't be prepared"):
        prepare(changed(data, tables + 5, b"\xff" * 16))
    with pytest.raises(DataError, match="cut off"):
        prepare(data[:100])
    with pytest.raises(DataError, match="ends before its end marker"):
        prepare(data[:-200])
    progressive = jpeg(60, 90, progressive=True)
    second = progressive.index(SCAN, progressive.index(SCAN) + 2)
    with pytest.raises(DataError, match="pixels would change"):
        prepare(progressive[:second] + b"\xff\xd9")  # smoothed by libjpeg


# -- jpeg.header: what is read without decoding, and what is said of files that can't be read

PHOTO = jpeg(60, 90, interval=2)


def refused(data: bytes) -> str:
    with pytest.raises(DataError) as error:
        read_header(data)
    assert error.value.hint
    return error.value.message


def test_size_components_and_restarts():
    header = read_header(PHOTO)
    assert (header.height, header.width, header.components) == (60, 90, 3)
    assert (header.restart_interval, header.progressive) == (2, False)
    assert read_header(jpeg(33, 7)).restart_interval == 0
    assert read_header(jpeg(33, 7, grey=True)).components == 1
    assert read_header(jpeg(33, 7, progressive=True)).progressive
    assert read_header(by_pillow("CMYK")).components == 4


def test_a_thumbnail_in_the_metadata_is_not_the_picture():
    thumbnail = jpeg(8, 8)
    segment = b"\xff\xe1" + (len(thumbnail) + 2).to_bytes(2, "big") + thumbnail
    data = PHOTO[:2] + segment + PHOTO[2:]
    assert (read_header(data).height, read_header(data).width) == (60, 90)
    cut = data[: 2 + len(segment)]
    assert cut.endswith(END) and decoding.is_complete(cut)
    assert "cut off" in refused(cut)


def test_bytes_between_markers_are_passed_over_as_libjpeg_does():
    at = PHOTO.index(FRAME)
    assert read_header(PHOTO[:at] + b"\0\1\2\xff\xff" + PHOTO[at:]).height == 60


def test_a_file_that_ends_early_is_not_complete():
    scan = PHOTO.index(SCAN)
    assert not any(decoding.is_complete(PHOTO[:n]) for n in range(len(PHOTO)))
    assert not decoding.is_complete(PHOTO[: scan + 20] + b"\0")
    assert decoding.is_complete(PHOTO + b"camera's own bytes")


def test_what_is_no_picture():
    at = PHOTO.index(FRAME)
    assert "not a JPEG" in refused(b"") and "not a JPEG" in refused(b"\x89PNG\r\n\x1a\n")
    assert "12 bits per channel" in refused(changed(PHOTO, at + 4, b"\x0c"))
    assert "0 x 90 pixels" in refused(changed(PHOTO, at + 5, b"\0\0"))
    assert "60 x 0 pixels" in refused(changed(PHOTO, at + 7, b"\0\0"))
    assert "two frame headers" in refused(PHOTO[:at] + PHOTO[at : at + 19] + PHOTO[at:])
    assert "no frame header" in refused(PHOTO[:at] + PHOTO[at + 19 :])
    assert "malformed" in refused(changed(PHOTO, at + 9, b"\2"))
    assert "ends without a picture" in refused(PHOTO[:at] + END + PHOTO[at:])
    assert "segment without a length" in refused(changed(PHOTO, at + 2, b"\0\1"))


def test_pictures_that_would_take_all_memory_or_time():
    at = PHOTO.index(FRAME)
    assert f"{decoding.MAX_PIXELS:,}" in refused(changed(PHOTO, at + 5, b"\xff\xff\xff\xff"))
    progressive = jpeg(16, 16, progressive=True)
    scan = progressive.rindex(SCAN)
    bomb = progressive[:-2] + progressive[scan:-2] * 100 + END
    assert "scans, more than 100" in refused(bomb)
    assert not read_header(jpeg(500, 500, quality=99, seed=1)).progressive  # one scan, however often FF DA stands in it
