"""Coded vectors: every bit comes back, they are never larger than what they code, and a damaged one is an error."""

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagerun.comm import planes
from stagerun.comm.planes import PLANES, RAW, Codec, most_bytes

CODEC = Codec()


def coded(values: np.ndarray) -> np.ndarray:
    room = np.empty(most_bytes(len(values)), np.uint8)
    return room[: CODEC.encode(values, room)]


def decoded(piece: np.ndarray, elements: int) -> np.ndarray:
    values = np.full(elements, 7, np.float32)
    CODEC.decode(piece, values)
    return values


def assert_comes_back(bits: np.ndarray) -> None:
    values = np.ascontiguousarray(bits, np.uint32).view(np.float32)
    assert np.array_equal(decoded(coded(values), len(values)).view(np.uint32), bits)


def gradients(n: int = 100_000) -> np.ndarray:
    rng = np.random.default_rng(1)
    return (rng.standard_normal(n) * np.repeat(10.0 ** rng.integers(-6, 0, 10), n // 10)).astype(np.float32)


def rounded_to_bf16(values: np.ndarray) -> np.ndarray:
    return (values.view(np.uint32) & 0xFFFF0000).view(np.float32)


NAN, DENORMAL, MINUS_ZERO, INFINITY = 0x7FC12345, 1, 1 << 31, 0x7F800000
SIGNALLING = 0xFFA00001


@given(
    st.lists(
        st.one_of(st.integers(0, 2**32 - 1), st.sampled_from([0, NAN, DENORMAL, MINUS_ZERO, INFINITY, SIGNALLING]))
    )
)
def test_all_bits_come_back(bits):
    assert_comes_back(np.array(bits, np.uint32))


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 3000), st.integers(0, 99))
def test_all_bits_come_back_where_it_pays_to_code_them(keep, fill, n, seed):
    """Bits that `keep` doesn't name are those of `fill` in all values, so that some planes are coded, others not."""
    noise = np.random.default_rng(seed).integers(0, 2**32, n, dtype=np.uint32)
    assert_comes_back(noise & np.uint32(keep) | np.uint32(fill) & ~np.uint32(keep))


@pytest.mark.parametrize("elements", [planes.STRIP - 1, planes.STRIP, planes.STRIP + 1, 3 * planes.STRIP + 5])
def test_strips_leave_no_seam(elements):
    assert_comes_back(np.resize(gradients(), elements).view(np.uint32))


def test_one_codec_serves_vectors_of_any_size_in_turn():
    for n in (1000, 10, 50_000, 0, 3):
        assert_comes_back(gradients()[:n].view(np.uint32))


def test_what_it_saves():
    values = gradients()
    assert len(coded(values)) < 0.87 * values.nbytes
    assert len(coded(rounded_to_bf16(values))) < 0.40 * values.nbytes
    assert len(coded(np.zeros_like(values))) < 0.01 * values.nbytes


@given(st.integers(0, 5000))
def test_noise_takes_one_byte_more(n):
    noise = np.random.default_rng(n).integers(0, 2**32, n, dtype=np.uint32).view(np.float32)
    piece = coded(noise)
    assert len(piece) == most_bytes(n) and piece[0] == RAW


@given(st.data())
def test_a_damaged_piece_is_a_value_error_or_values(data):
    values = rounded_to_bf16(gradients(1000))
    piece = coded(values).copy()
    assert piece[0] == PLANES
    for _ in range(data.draw(st.integers(1, 3))):
        piece[data.draw(st.integers(0, len(piece) - 1))] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.sampled_from([None, None, data.draw(st.integers(0, len(piece)))]))
    with contextlib.suppress(ValueError):
        decoded(piece[:cut], len(values))


def test_damage_within_a_frame_is_found():
    """Each frame has a checksum: no bit of the exponents changes unseen."""
    values = gradients(1000)
    piece = coded(values)
    length = int(piece[1:9].view(np.uint64)[0])
    for at in range(33, 33 + length, 7):
        bad = piece.copy()
        bad[at] ^= 0x10
        with pytest.raises(ValueError):
            decoded(bad, len(values))


@pytest.mark.parametrize(
    "change", [lambda p: p[:0], lambda p: p[:1], lambda p: p[:30], lambda p: p[:-1], lambda p: np.append(p, p[:9])]
)
def test_pieces_of_another_length_are_errors(change):
    values = rounded_to_bf16(gradients(1000))
    with pytest.raises(ValueError):
        decoded(change(coded(values)), len(values))


@pytest.mark.parametrize("elements", [0, 1, 999, 1001])
def test_a_piece_of_another_number_of_values_is_an_error(elements):
    for values in (
        gradients(1000),
        np.random.default_rng(1).integers(0, 2**32, 1000, dtype=np.uint32).view(np.float32),
    ):
        with pytest.raises(ValueError):
            decoded(coded(values), elements)


def test_a_frame_that_says_it_is_huge_is_refused_before_room_is_made():
    huge = CODEC.zstd.ZstdCompressor().compress(bytes(1 << 28))
    lengths = np.frombuffer(planes.LENGTHS.pack(len(huge), 0, 0, 0), np.uint8)
    piece = np.concatenate([np.array([PLANES], np.uint8), lengths, np.frombuffer(huge, np.uint8)])
    with pytest.raises(ValueError, match=f"{1 << 28} bytes where 1000 are expected"):
        decoded(piece, 1000)
