"""Damaged files of Caffe's: solver folders give a schedule, or mistakes with their places; binary files are read as protobuf reads them."""

import random
import re
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import contract
import numpy as np
import pytest
from caffe_lies import field, layer_bytes, layer_with
from drawn import examples
from facade import binary, caffe_pb2, is_caffes
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

# Folders as file names and bytes.
CASES = [
    contract.Case.read(path) for path in sorted(contract.CASES.glob("caffe_folder_*.txt")) if "lenet" not in path.stem
]
SEEDS = [{Path(name).name: text.encode() for name, text in case.files.items()} for case in CASES]
WORDS = sorted({w for seed in SEEDS for data in seed.values() for w in re.findall(r"[\w.:{}\"/-]+", data.decode())})
ODD = ["", "[]", "{", "}", "<", '"', "'", "#", "\0", "\x85", "\r", "\t", "-1", "0", "1e999", "nan", "9" * 30, "%s", "é"]


def damaged(files: Mapping[str, bytes], random: random.Random) -> dict[str, bytes]:
    """A few words of a few files taken out, doubled, moved, or replaced by others."""
    result = dict(files)
    for _ in range(random.randint(1, 6)):
        name = random.choice(sorted(result))
        words = re.split(r"(\s+)", result[name].decode(errors="replace"))
        at = random.randrange(len(words))
        changes = {
            0: words[:at] + words[at + 1 :],
            1: [*words[:at], random.choice(words), *words[at:]],
            2: [*words[:at], random.choice(WORDS), *words[at + 1 :]],
            3: [*words[:at], random.choice(ODD), *words[at + 1 :]],
            4: [*words[:at], words[at][: random.randint(0, len(words[at]))] + random.choice(ODD), *words[at + 1 :]],
            5: words[at:] + words[:at],
        }
        result[name] = "".join(changes[random.randrange(6)]).encode(errors="replace")
    return result


def imported(files: Mapping[str, bytes], *words: str) -> None:
    with tempfile.TemporaryDirectory() as held:
        for name, data in files.items():
            (Path(held) / name).write_bytes(data)
        done = contract.stagerun(["import", "caffe", ".", "--out", "out", "--images", "1000", *words], Path(held))
    assert done.exit_code in (0, 64, 65), done.output
    if done.exit_code == 64 and "mistake" in done.output:
        assert re.search(r"^\S.*:\d+:\d+: ", done.stderr, re.MULTILINE), done.output


@examples(150, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32), st.sampled_from(["", "", "main", "collapse,main", "main,drop"]))
def test_damaged_folders(seed, order):
    chance = random.Random(seed)
    imported(damaged(chance.choice(SEEDS), chance), *(["--order", order] if order else []))


@examples(50)
@given(st.binary(max_size=300), st.binary(max_size=300))
def test_any_bytes(solver, script):
    net = SEEDS[0]["net.prototxt"]
    imported({"solver.prototxt": b'net: "net.prototxt" base_lr: 1 ' + solver, "a.sh": script, "net.prototxt": net})


# -- Caffe's binary files: those that real Caffe wrote against protobuf's reading of them, old forms, and files that lie

GOLDEN = Path(__file__).parents[1] / "golden" / "caffe"
FILES = sorted(GOLDEN.rglob("*.caffemodel"))


def protobufs(blob: caffe_pb2.BlobProto) -> np.ndarray:
    kind = np.float64 if blob.double_data else np.float32
    return np.array(blob.double_data or blob.data, kind).reshape(tuple(blob.shape.dim))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_what_caffe_wrote_is_read_and_written_again_as_it_is(path):
    data = path.read_bytes()
    net, theirs = binary.read_net(data), caffe_pb2.NetParameter.FromString(data)
    assert [(one.name, one.type) for one in net] == [(one.name, one.type) for one in theirs.layer]
    for ours, other in zip(net, theirs.layer, strict=True):
        for blob, expected in zip(ours.blobs, other.blobs, strict=True):
            assert blob.data.reshape(blob.shape).dtype == protobufs(expected).dtype
            np.testing.assert_array_equal(blob.data.reshape(blob.shape), protobufs(expected))
    again = binary.net_bytes(
        "", [(layer_bytes(one.name, one.type), [b.data.reshape(b.shape) for b in one.blobs]) for one in net]
    )
    assert caffe_pb2.NetParameter.FromString(again).layer[1].blobs == theirs.layer[1].blobs
    assert list(binary.learnable(again)) == list(binary.learnable(data))


def test_a_solverstate_is_read_and_written_again():
    data = (GOLDEN / "lenet_m09_A_resume75" / "start.solverstate").read_bytes()
    state = binary.read_state(data)
    assert (state.iter, state.learned_net, state.current_step) == (75, "lenet_m09_A_iter_75.caffemodel", 0)
    again = binary.state_bytes(state.iter, state.learned_net, [b.data.reshape(b.shape) for b in state.history])
    assert caffe_pb2.SolverState.FromString(again).history == caffe_pb2.SolverState.FromString(data).history


def test_a_path_need_not_be_utf8():
    name = b"\xff.caffemodel"
    assert name in binary.state_bytes(1, name.decode(errors="surrogateescape"), [])


def test_statistics_are_divided_and_counted_as_caffe_does():
    data = (GOLDEN / "bnnet_m09_A" / "end.caffemodel").read_bytes()
    found, blobs = binary.tensors(data), {layer.name: layer.blobs for layer in binary.read_net(data)}
    mean, _, factor = blobs["bn_conv1"]
    np.testing.assert_array_equal(found["bn_conv1.running_mean"], mean.data * (1 / factor.data[0]))
    assert found["bn_conv1.num_batches_tracked"] == 150  # iterations that went into them
    start = binary.tensors((GOLDEN / "init_bnnet_iter_0.caffemodel").read_bytes())
    assert not start["bn_conv1.running_var"].any() and start["bn_conv1.num_batches_tracked"] == 0


def named(net: caffe_pb2.NetParameter) -> dict[str, tuple[int, ...]]:
    return binary.shapes(net.SerializeToString())


def test_names_by_kind_of_layer():
    def blob(*shape: int) -> caffe_pb2.BlobProto:
        return caffe_pb2.BlobProto.FromString(binary.blob_bytes(np.ones(shape, np.float32)))

    net = caffe_pb2.NetParameter()
    net.layer.add(name="m", type="BatchNorm", blobs=[blob(2), blob(2), blob(1), blob(2), blob(2)])
    net.layer.add(name="s", type="Scale", bottom=["a", "b"], blobs=[blob(2)])
    net.layer.add(name="b", type="Bias", blobs=[blob(2)])
    net.layer.add(name="p", type="PReLU", blobs=[blob(3)])
    assert set(named(net)) == {
        "m.running_mean", "m.running_var", "m.num_batches_tracked", "m.weight", "m.bias", "s.bias", "b.bias", "p.weight"
    }  # fmt: skip
    net.layer.add(name="x", type="BatchNorm", blobs=[blob(2), blob(2)])
    with pytest.raises(ValueError, match="BatchNorm layer `x` has 2 blobs"):
        named(net)


def test_old_shapes_and_old_layers():
    """V1 layers, and num, channels, height, width in place of a shape: as the published AlexNets and VGGs have them."""

    def blob(n: int, c: int, h: int, w: int) -> bytes:
        made = caffe_pb2.BlobProto(num=n, channels=c, height=h, width=w)
        made.data.extend(range(n * c * h * w))
        return made.SerializeToString()

    conv = field(4, b"c") + b"\x28\x04" + field(6, blob(2, 1, 3, 3)) + field(6, blob(1, 1, 1, 2))
    fc = field(4, b"fc") + b"\x28\x0e" + field(6, blob(1, 1, 4, 1)) + field(6, blob(1, 1, 1, 4))
    net = field(1, b"n") + field(2, conv) + field(2, fc)
    assert binary.shapes(net) == {"c.weight": (2, 1, 3, 3), "c.bias": (2,), "fc.weight": (4, 1), "fc.bias": (4,)}
    with pytest.raises(ValueError, match="form of 2013"):
        binary.shapes(net + field(2, field(1, field(1, b"old"))))


def test_numbers_that_are_not_packed():
    floats = b"".join(b"\x2d" + np.float32(i).tobytes() for i in range(40))
    doubles = b"".join(b"\x41" + np.float64(i).tobytes() for i in range(40))
    for data, kind in ((floats, np.float32), (doubles, np.float64)):
        (layer,) = binary.read_net(layer_with(data))
        np.testing.assert_array_equal(layer.blobs[0].data, np.arange(40, dtype=kind))


def test_a_blob_without_axes():
    """Caffe writes the one slope of a PReLU with `channel_shared` so."""
    net = caffe_pb2.NetParameter()
    net.layer.add(name="r", type="PReLU", blobs=[caffe_pb2.BlobProto(data=[0.25])])
    read = net.SerializeToString()
    assert binary.shapes(read) == {"r.weight": ()} and binary.tensors(read)["r.weight"] == 0.25


def test_a_net_with_a_brace_where_safetensors_has_one():
    data = binary.net_bytes("Test", [(layer_bytes("d" * 115, "Data"), [])])
    assert data[6] == 0xA2 and data[8] == ord("{")  # the length of the first layer
    assert is_caffes(data[:9], "x.caffemodel")
    assert not is_caffes((200).to_bytes(8, "little") + b"{", "x.caffemodel")


def test_a_shared_blob_is_once_in_a_history_and_among_tensors():
    one = binary.blob_bytes(np.ones(2, np.float32))
    net = caffe_pb2.NetParameter()
    for name in ("a", "b"):
        layer = net.layer.add(name=name, type="InnerProduct", blobs=[caffe_pb2.BlobProto.FromString(one)] * 2)
        layer.param.add(name="w")
        layer.param.add()
    read = net.SerializeToString()
    assert binary.learnable(read) == ("a.weight", "a.bias", "b.bias")
    assert [*binary.shapes(read)] == [*binary.tensors(read)] == ["a.weight", "a.bias", "b.bias"]


# -- files that lie: test_caffe_hostile.py has more


def test_a_state_of_very_many_fields_is_not_read_to_its_end():
    for one in (b"\xa2\x06\x00", b"\x1a\x00"):  # unknown ones took half a minute
        with pytest.raises(ValueError, match="more than 100000 fields"):
            binary.read_state(one * 10_000_000)


SMALL = FILES[-1].read_bytes()


def test_hdf5_is_refused():
    for read in (binary.read_net, binary.read_state):
        with pytest.raises(ValueError, match="snapshot_format: BINARYPROTO"):
            read(b"\x89HDF\r\n\x1a\n" + bytes(90))


@given(st.binary(max_size=300), st.integers(0, len(SMALL)), st.integers(0, 30))
def test_random_bytes_are_one_error(noise, at, cut):
    for data in (noise, SMALL[:at], SMALL[:at] + noise + SMALL[at + cut :]):
        with suppress(ValueError):
            binary.shapes(data)
            binary.tensors(data)
            binary.learnable(data)
        with suppress(ValueError):
            binary.read_state(data)
