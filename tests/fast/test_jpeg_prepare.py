"""jpeg.transcode: the same pixels in a file whose parts can be cut out."""

import numpy as np
import pytest
from facade import DataError, read_header
from jpeg_pictures import SAMPLINGS, SCAN, by_pillow, changed, jpeg, whole

from stagerun.data.jpeg import slices
from stagerun.tools.data.prepare import can_prepare, prepare

needs_library = pytest.mark.skipif(bool(can_prepare()), reason=can_prepare())


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
@pytest.mark.parametrize("width, interval", [(500, 4), (640, 4), (800, 5), (333, 3), (17 * 16, 1), (48, 3), (16, 1)])
def test_the_interval_divides_a_row(width, interval):
    assert read_header(prepare(jpeg(40, width, "4:2:0"))).restart_interval == interval


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
def test_bytes_do_not_grow():
    """Tables made for the picture save more than the markers take."""
    data = jpeg(375, 500, quality=90)
    assert len(prepare(data)) < len(data)


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
