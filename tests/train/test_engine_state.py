"""What of a state goes into a snapshot and comes back: capture, codec, restore."""

import contextlib
import json
import math
import struct
from dataclasses import replace

import pytest
import torch
from engine_help import CPU, SOLVER, ConvNet, assert_same, dataset, tensors, updates
from facade import (
    Capture,
    Knobs,
    ParamKind,
    ParamRule,
    Precision,
    decode,
    encode,
    make_state,
    momentum,
    restore,
    weights,
)
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from test_engine_solvers import EVERY, shown

from stagerun.comm import SoloComm

FP32 = replace(SOLVER, precision=Precision.FP32)
RULES = (ParamRule(name="bn1.*", lr_mult=0), ParamRule(kind=ParamKind.NORM, decay_mult=0, adapt=False))
BATCHES = [dataset(8, seed=i) for i in range(4)]


def trained(solver=FP32):
    return updates(ConvNet(), solver, BATCHES[:2], SoloComm())[0]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("solver", [FP32, *EVERY[:14]], ids=shown)
def test_captured_encoded_decoded_and_restored_is_the_same_bits_and_so_is_what_follows(channels_last, solver):
    solver = replace(solver, param=RULES, channels_last=channels_last)
    state = trained(solver)
    capture = Capture(state)
    capture.take(state)
    files = encode(capture.weights), encode(capture.momentum)
    fresh = make_state(ConvNet(), solver, CPU)
    formats = {k: v.stride() for k, v in weights(fresh).items()}
    restore(weights(fresh), decode(files[0]))
    restore(momentum(fresh), decode(files[1]))
    fresh.iter = 2
    assert_same(tensors(state), tensors(fresh))
    assert fresh.model.bn1.num_batches_tracked == 2 and fresh.model.bn1.num_batches_tracked.dtype == torch.int64
    assert {k: v.stride() for k, v in weights(fresh).items()} == formats
    assert fresh.model.conv2.weight.is_contiguous(memory_format=torch.channels_last) == channels_last
    # Running statistics are views into one vector: restoring has to fill that, not replace the buffers.
    assert torch.equal(fresh.statistics.running, state.statistics.running)
    assert "batch_mean" not in "".join(capture.weights)
    for one in (state, fresh):
        updates(one.model, solver, BATCHES[2:], SoloComm(), knobs=lambda i: Knobs(0.01 * i, 0.9, 0.01), state=one)
    assert_same(tensors(state), tensors(fresh))


def test_a_snapshot_has_the_same_bytes_whatever_the_memory_format():
    """So that a copy is found equal by its digest, and reads in any tool in torch's order."""
    files = []
    for channels_last in (False, True):
        state = make_state(ConvNet(), replace(FP32, channels_last=channels_last), CPU)
        capture = Capture(state)
        capture.take(state)
        files.append(encode(capture.weights))
    assert files[0] == files[1]


def test_a_snapshot_of_another_model_is_refused_by_name_and_nothing_is_copied():
    state = trained()
    saved = {k: v.clone() for k, v in weights(state).items()}
    fresh = make_state(ConvNet(), FP32, CPU)
    before = tensors(fresh)
    without = {k: v for k, v in saved.items() if k != "conv2.weight"}
    for other, words in (
        (without, ("`conv2.weight`", "not in the snapshot")),
        ({**saved, "head.weight": torch.zeros(2)}, ("`head.weight`", "not in the model")),
        ({**saved, "fc.weight": torch.zeros(10, 5)}, ("`fc.weight`", "(10, 5)", "(3, 5)")),
        ({**saved, "fc.bias": torch.zeros(())}, ("`fc.bias`", "()", "(3,)")),
    ):
        with pytest.raises(ValueError) as caught:
            restore(weights(fresh), other)
        assert all(word in str(caught.value) for word in words)
        assert_same(before, tensors(fresh))


# -- the file: byte for byte as the format's own library writes it

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12).filter(
    lambda n: n != "__metadata__"
)
SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)
TYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


@given(st.dictionaries(NAMES, st.tuples(st.sampled_from(TYPES), SHAPES), max_size=12))
def test_the_bytes_are_those_of_the_safetensors_library_and_what_is_decoded_is_what_was_encoded(drawn):
    made = {
        name: torch.arange(math.prod(shape)).remainder(2 if dtype == torch.bool else 100).reshape(shape).to(dtype)
        for name, (dtype, shape) in drawn.items()
    }
    data = encode(made)
    assert data == save(made)
    found = decode(data)
    assert found.keys() == made.keys()
    for name, tensor in made.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor)


def file(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(dtype: str, shape: list[int], size: int) -> dict[str, object]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x" * 100,
        b"\x80\x04K\x01.",  # a pickle
        b"\xff" * 8,
        file([]),
        file({"a": 1}),
        file(tensor("F32", [4], 16), b"123"),
        file(tensor("F32", [1], 4), b"12345678"),
        file(tensor("F32", [-1], 4), b"1234"),
        file(tensor("F32", [2**62, 8], 4), b"1234"),
        file(tensor("F32", [0, 2**63], 0)),
        file(tensor("Q9", [1], 1), b"1"),
        file(tensor("F8_E8M0", [1], 1), b"1"),
        file(tensor("F4", [2], 1), b"1"),
    ],
)
def test_what_is_not_a_file_of_tensors_is_a_value_error(data):
    with pytest.raises(ValueError):
        decode(data)


@given(st.data())
def test_damage_is_a_value_error_or_other_tensors(data):
    whole = bytearray(encode({"a": torch.arange(3.0), "b": torch.tensor(7), "c": torch.zeros(0, 2)}))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.integers(0, len(whole)))
    for damaged in (bytes(whole), bytes(whole[:end])):
        with contextlib.suppress(ValueError):
            assert isinstance(decode(damaged), dict)
