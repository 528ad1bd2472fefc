"""Names of layers that torch's modules can't have: tensors are `LAYER.PART` all the same, in the state, in Caffe's files and out of them."""

import hypothesis.strategies as st
import pytest
import torch
from drawn import examples
from facade import Model, binary, caffe_pb2, caffemodel, net_of, tensors_in
from google.protobuf import text_format
from hypothesis import given
from torch import nn

from stagerun.models import build

NET = """
layer {{ name: "data" type: "Input" top: "data" input_param {{ shape {{ dim: 1 dim: 2 dim: 3 dim: 3 }} }} }}
layer {{ name: {0} type: "Convolution" bottom: "data" top: "a" convolution_param {{ num_output: 4 kernel_size: 2
        weight_filler {{ type: "xavier" }} }} }}
layer {{ name: {1} type: "BatchNorm" bottom: "a" top: "b" }}
layer {{ name: {2} type: "Scale" bottom: "b" top: "c" scale_param {{ bias_term: true }} }}
layer {{ name: {3} type: "InnerProduct" bottom: "c" top: "d" inner_product_param {{ num_output: 3
        weight_filler {{ type: "xavier" }} }} }}
"""
NORM = ("running_mean", "running_var", "num_batches_tracked")
PARTS = (("weight", "bias"), NORM, ("weight", "bias"), ("weight", "bias"))
AWKWARD = [
    *("train", "type", "forward", "training", "state_dict", "_train", "_modules", "weight", "__class__"),
    *("a.", ".a", ".", "..", "a", "a.b", "a.b.c", "a.weight", "a.weight.bias", "a.bias", "train.x", "a.train", "a.momentum"),
    *("a.running_mean", "a.batch_mean", "layer_with_another_name_0", "layer_with_another_name_1", "é/ü", "卷积", "a b\n\t\"'\\"),
]  # fmt: skip
LAYERS = st.sampled_from(AWKWARD) | st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6
)


def quoted(name: str) -> str:
    return text_format.MessageToString(caffe_pb2.LayerParameter(name=name)).partition(": ")[2]


def network_of(names: list[str]) -> tuple[nn.Module, Model]:
    net = net_of(NET.format(*map(quoted, names)), (2, 3, 3))
    model = Model(name="x", num_classes=3, net=net.text, input_shape=(2, 3, 3), moving_average_fraction=None, eps=None)
    torch.manual_seed(1)
    return build(model), model


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@examples(60)
@given(st.lists(LAYERS.filter(lambda name: name not in ("data", "")), min_size=4, max_size=4, unique=True))
def test_any_name_from_net_to_caffemodel_and_back(names):
    network, model = network_of(names)
    state = network.state_dict()
    expected = {f"{name}.{part}" for name, parts in zip(names, PARTS, strict=True) for part in parts}
    assert set(state) == expected
    assert {*dict(network.named_parameters()), *dict(network.named_buffers())} - expected == {
        f"{names[1]}.batch_mean",
        f"{names[1]}.batch_var",
    }
    assert all(network.get_parameter(name) is value for name, value in network.named_parameters())
    network(torch.randn(2, 2, 3, 3)).sum().backward()

    data = caffemodel(model, state, double=False, resumable=True)
    assert [layer.name for layer in binary.read_net(data) if layer.blobs] == names
    file = tensors_in(data, "x.caffemodel")
    assert set(file) == expected
    again, _ = network_of(names)
    again.load_state_dict(file)
    assert same({**again.state_dict()}, {**file})
    assert caffemodel(model, again.state_dict(), double=False, resumable=True) == data


NAMES = ["train", "bn", "s.", "a..b"]


def test_what_does_not_fit_is_said_of_the_layers_own_names():
    network, _ = network_of(NAMES)
    state = network.state_dict()
    del state["train.weight"], state["bn.running_mean"]
    state["a..b.another"] = state["s..bias"]
    found = network.load_state_dict(state, strict=False)
    assert found.missing_keys == ["train.weight", "bn.running_mean"] and found.unexpected_keys == ["a..b.another"]
    state = network_of(NAMES)[0].state_dict()
    state["s..weight"] = state["train.weight"] = torch.zeros(9)
    for module, prefix in ((network, ""), (torch.nn.Sequential(network), "0.")):
        with pytest.raises(RuntimeError) as error:
            module.load_state_dict({prefix + name: tensor for name, tensor in state.items()})
        assert f"size mismatch for {prefix}train.weight:" in str(error.value)
        assert f"size mismatch for {prefix}s..weight:" in str(error.value) and "another_name" not in str(error.value)
