"""Packed tensors: the memory of a snapshot's copy is the file, byte for byte as the format's own library writes it."""

import numpy as np
import pytest
import torch
from facade import decode, encode
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from stagerun.engine.codec import TYPES, Packed

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12).filter(
    lambda n: n != "__metadata__"
)
SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)
DRAWN = st.dictionaries(NAMES, st.tuples(st.sampled_from(list(TYPES)), SHAPES), max_size=12)


def made(drawn: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, torch.Tensor]:
    rng = np.random.RandomState(len(drawn))
    return {
        name: torch.from_numpy(rng.randint(0, 2 if dtype == torch.bool else 100, shape)).to(dtype)
        for name, (dtype, shape) in drawn.items()
    }


@given(DRAWN)
def test_the_bytes_are_those_of_the_safetensors_library(drawn):
    tensors = made(drawn)
    assert encode(tensors) == save(tensors) and encode({}) == save({})


@given(DRAWN)
def test_what_is_decoded_is_what_was_encoded(drawn):
    tensors = made(drawn)
    found = decode(encode(tensors))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor)


def test_what_is_written_to_the_tensors_stands_in_the_file_at_once():
    packed = Packed({"b": torch.empty(2, 3), "a": torch.empty((), dtype=torch.int64)})
    data = packed.data
    for value in (1.0, -7.5):
        packed.tensors["b"].fill_(value)
        packed.tensors["a"].fill_(int(value))
        expected = {"b": torch.full((2, 3), value), "a": torch.tensor(int(value))}
        assert bytes(data) == save(expected)


def test_all_tensors_of_a_type_are_one_vector():
    like = {"x": torch.empty(3), "y": torch.empty(2, 2), "n": torch.empty((), dtype=torch.int64), "z": torch.empty(0)}
    packed = Packed(like)
    for number, name in enumerate(sorted(like)):
        packed.tensors[name].fill_(number)
    found = {v.dtype: v.tolist() for v in packed.vectors}
    assert found == {torch.float32: [1.0] * 3 + [2.0] * 4, torch.int64: [0]}


def test_a_type_that_the_format_does_not_have_here():
    with pytest.raises(KeyError):
        Packed({"x": torch.empty(2, dtype=torch.complex128)})
