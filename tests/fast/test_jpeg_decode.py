"""jpeg decoders: every tier, every kind of file, whole, part or reduced: the pixels that OpenCV gives, bit for bit."""

import numpy as np
import pytest
from drawn import examples
from facade import DataError, Rectangle, UsageError, read_header
from facade import jpeg as decoding
from hypothesis import given
from hypothesis import strategies as st
from jpeg_pictures import END, FRAME, INTERVAL, SAMPLINGS, SCAN, by_pillow, changed, jpeg, whole

NAMES = ("compiled", "simplejpeg", "opencv")
DECODERS = {state.name: decoding.make_decoder(state.name) for state in decoding.tiers() if state.available}
PHOTO = jpeg(60, 90, interval=2)


@pytest.fixture(params=NAMES)
def decoder(request):
    if request.param not in DECODERS:
        pytest.skip(f"{request.param} isn't available here")
    return DECODERS[request.param]


def expected(data: bytes, channels: int, part: Rectangle | None, shrink: int) -> np.ndarray:
    pixels = whole(data, channels, shrink)
    if part is None:
        return pixels
    top, left = part.top // shrink, part.left // shrink
    return pixels[top : top + part.height // shrink, left : left + part.width // shrink]


def check(
    decoder: decoding.Decoder, data: bytes, channels: int = 3, part: Rectangle | None = None, shrink: int = 1
) -> None:
    pixels = decoder.decode(data, read_header(data), channels, part, shrink)
    assert pixels.dtype == np.uint8 and np.array_equal(pixels, expected(data, channels, part, shrink))


def shape_and_part(draw: st.DrawFn, shrink: int, longest: int = 150) -> tuple[int, int, Rectangle | None]:
    height, width = draw(st.integers(shrink, longest)), draw(st.integers(shrink, longest))
    if draw(st.integers(0, 9)) == 0:
        return height, width, None
    rows, columns = draw(st.integers(shrink, height)), draw(st.integers(shrink, width))
    part = Rectangle(draw(st.integers(0, height - rows)), draw(st.integers(0, width - columns)), rows, columns)
    return height, width, part


@st.composite
def cases(draw: st.DrawFn) -> tuple[bytes, int, Rectangle | None, int]:
    """(data, channels, part, shrink)"""
    shrink = draw(st.sampled_from((1, 1, 1, 2, 4, 8)))
    height, width, part = shape_and_part(draw, shrink)
    grey = draw(st.integers(0, 5)) == 0
    data = jpeg(
        height,
        width,
        draw(st.sampled_from(tuple(SAMPLINGS))),
        draw(st.sampled_from((0, 1, 1, 2, 3, 4, 5, 8, 16))),
        grey=grey,
        progressive=draw(st.integers(0, 9)) == 0,
        quality=draw(st.sampled_from((60, 90, 97))),
        seed=draw(st.integers(0, 3)),
    )
    return data, draw(st.sampled_from((1, 3))) if grey else 3, part, shrink


@pytest.mark.parametrize("name", NAMES[:-1])
def test_any_part_of_any_picture(name):
    if name not in DECODERS:
        pytest.skip(f"{name} isn't available here")

    @given(cases())
    @examples(150)
    def tried(case: tuple[bytes, int, Rectangle | None, int]) -> None:
        check(DECODERS[name], *case)

    tried()


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_parts_along_the_edges_of_segments(decoder, sampling):
    """Where the colour's smoothing needs the next segment, and where the last one is so narrow that it gets none."""
    for width in (65, 66, 68, 72):
        data = jpeg(50, width, sampling, interval=1)
        for left in (0, 14, 15, 16, 17, 31, 32, 33, 63, 64):
            for columns in {1, 2, width - left}:
                if left + columns <= width:
                    check(decoder, data, 3, Rectangle(15, left, 2, columns))
                    check(decoder, data, 3, Rectangle(0, left, 50, columns))


@pytest.mark.parametrize(
    "mode, options", [("CMYK", {}), ("L", {}), ("RGB", {"keep_rgb": True}), ("RGB", {"subsampling": 2})]
)
def test_other_colour_spaces(decoder, mode, options):
    data = by_pillow(mode, **options)
    for part in (None, Rectangle(10, 20, 30, 31)):
        check(decoder, data, 3, part)
        check(decoder, data, 3, part, 2)


def test_sampling_factors_that_no_encoder_writes(decoder):
    """4:4:4 said as 1x2, 1x2, 1x2: MCUs are 8 x 16, which none of the known samplings has."""
    data = jpeg(64, 48, "4:4:4")
    at = data.index(FRAME) + 11
    for factors in (b"\x12\x12\x12", b"\x21\x21\x21", b"\x22\x11\x21", b"\x31\x11\x11"):
        odd = data
        for component in range(3):
            odd = changed(odd, at + 3 * component, factors[component : component + 1])
        check(decoder, odd, 3, Rectangle(5, 6, 7, 8))


def test_restart_markers_that_are_not_as_the_header_says(decoder):
    """Missing, one too many, wrongly numbered, none at all, or another interval: as in the whole."""
    pairs = range(PHOTO.index(SCAN), len(PHOTO) - 1)
    marks = [i for i in pairs if PHOTO[i] == 0xFF and 0xD0 <= PHOTO[i + 1] <= 0xD7]
    interval = PHOTO.index(INTERVAL) + 4
    odd = [
        PHOTO[: marks[4]] + PHOTO[marks[4] + 2 :],
        PHOTO[: marks[4]] + PHOTO[marks[4] : marks[4] + 2] + PHOTO[marks[4] :],
        changed(PHOTO, marks[4], b"\xff\xd7"),
        changed(PHOTO, marks[-1], b"\xff\xd9"),
        changed(PHOTO, interval, b"\xff\xff"),
        changed(PHOTO, interval, b"\0\1"),
        changed(PHOTO, interval, b"\0\3"),
        changed(PHOTO, interval, b"\0\0"),
        changed(jpeg(60, 90), jpeg(60, 90).index(SCAN), INTERVAL + b"\0\4\0\2" + SCAN)[:-6] + END,
        PHOTO[:-2] + b"\xff\xd3" + END,
    ]
    for data in odd:
        for part in (Rectangle(0, 0, 20, 20), Rectangle(20, 40, 39, 30), Rectangle(50, 70, 9, 19)):
            try:
                reference = expected(data, 3, part, 1)
            except AttributeError:  # OpenCV gives None
                continue
            assert np.array_equal(decoder.decode(data, read_header(data), 3, part), reference)


def test_files_beyond_decoding(decoder):
    tables = PHOTO.index(b"\xff\xc4")
    quantization = PHOTO.index(b"\xff\xdb")
    bogus = changed(PHOTO, tables + 5, b"\xff" * 16)
    for data in (
        bogus,
        PHOTO[:quantization] + b"\0\0" + bogus[quantization:],  # a warning first: what stopped later is no warning
        changed(PHOTO, quantization, b"\xff\xfe"),  # a comment now, so that the table is missing
        changed(PHOTO, PHOTO.index(SCAN) + 5, b"\x77"),
    ):
        decoder.decode(PHOTO, read_header(PHOTO), 3)  # its tables and pixels must not help out
        with pytest.raises(DataError, match="can't be decoded"):
            decoder.decode(data, read_header(data), 3)
        check(decoder, PHOTO)


def test_changed_files_neither_crash_nor_differ():
    """Whatever is in the bytes; a file is refused by all or by none."""
    rng = np.random.default_rng(2)
    sources = [jpeg(33, 50, sampling, interval) for sampling in SAMPLINGS for interval in (0, 1, 3)]
    sources += [jpeg(60, 90, progressive=True, quality=quality) for quality in (60, 75, 90, 95)]
    for number in range(700):
        data = bytearray(sources[number % len(sources)])
        for at in rng.integers(0, len(data), rng.choice((1, 2, 10))):
            at %= len(data)
            kind = rng.integers(4)
            if kind == 0:
                del data[at : at + int(rng.integers(1, 20))]
            elif kind == 1:
                marker = b"\xd8\xd9\xc0\xc2\xc4\xc8\xda\xdb\xdd\xd0\xd3\xe0\xfe\x01"[rng.integers(14)]
                data[at:at] = bytes((0xFF, marker, 0, rng.integers(20)))
            else:
                data[at] = rng.integers(256)
        try:
            header = read_header(data)
        except DataError:
            continue
        if header.height * header.width > 1_000_000:
            continue
        part = Rectangle(header.height // 3, header.width // 3, header.height // 2 or 1, header.width // 2 or 1)
        outcomes: list[np.ndarray | None] = []
        for decoder in DECODERS.values():
            try:
                outcomes.append(decoder.decode(data, header, 3, part).copy())
            except DataError:
                outcomes.append(None)
        if decoding.is_complete(data):
            assert all(np.array_equal(pixels, outcomes[0]) for pixels in outcomes)


def test_without_the_fast_parts(monkeypatch):
    monkeypatch.setenv("STAGERUN_TURBOJPEG", "libnone.so.9")
    states = {state.name: state for state in decoding.tiers()}
    assert not states["compiled"].available and "libnone.so.9" in states["compiled"].reason
    assert decoding.make_decoder("simplejpeg").tier == "simplejpeg"
    for tier in (None, "compiled"):
        with pytest.raises(UsageError, match="STAGERUN_TURBOJPEG names what is not a libjpeg-turbo"):
            decoding.make_decoder(tier)


def test_a_tier_with_other_pixels_is_not_taken(monkeypatch):
    simple = type(DECODERS["simplejpeg"])
    fast = simple.fast
    monkeypatch.setattr(simple, "fast", lambda *arguments: fast(*arguments) ^ 1)
    monkeypatch.setenv("STAGERUN_TURBOJPEG", "libanother.so.9")  # what was found is kept by this
    state = next(state for state in decoding.tiers() if state.name == "simplejpeg")
    assert not state.available and "other pixels" in state.reason
