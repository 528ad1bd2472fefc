"""Networks of all kinds through one weight update of the engine."""

from dataclasses import replace

import pytest
import torch
from engine_help import CPU, KNOBS, SOLVER, arithmetic, cut, dataset, tensors
from facade import Determinism, Model, Normalise, ParamKind, Precision, kind_of, make_state, update
from on_meta import on_meta

from stagerun.comm import SoloComm, make_reducer
from stagerun.models import BatchNorm2d, build

pytestmark = pytest.mark.long

CLASSES = 3


SIDES = {
    "mobilenet_v3_small": 32,
    "shufflenet_v2_x0_5": 32,
    "squeezenet1_1": 33,  # without any BatchNorm
    "resnet50_intel_caffe": 32,
    "inception_bn": 64,
}
SLOW = {"alexnet": 63, "inception_v3": 75, "maxvit_t": 224, "vit_b_16": 224} | dict.fromkeys(
    ["convnext_tiny", "densenet121", "efficientnet_b0", "googlenet", "mnasnet0_5", "regnet_y_400mf", "resnext50_32x4d", "swin_v2_t", "vgg11_bn", "wrn_16_8"],
    32,
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "side"),
    [
        *SIDES.items(),
        ("swin_t", 32),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW.items()),
    ],
)
def test_one_update(name, side):
    """On two device batches of two images: a finite loss, every parameter moves, and every BatchNorm layer sees the iteration."""
    torch.manual_seed(1)
    solver = replace(SOLVER, batch_size=4, device_batch_size=2, precision=Precision.FP32)
    state = make_state(build(Model(name=name, num_classes=CLASSES)), solver, CPU)
    before = tensors(state)
    reducer = make_reducer(Determinism.FIXED, [p.tensor for p in state.solver.parameters], SoloComm(), 2)
    how = arithmetic(solver, normalise=Normalise(solver.transform, 3, CPU, torch.float32, solver.channels_last))
    data = dataset(4, side, channels=3, classes=CLASSES)
    pieces = [(0, cut(data, 0, 2), False), (1, cut(data, 2, 4), True)]
    outcome = update(state, pieces, replace(KNOBS, lr=0.01), reducer, how, lambda: False)
    assert 0 < outcome.loss < 100 and state.iter == 1
    after = tensors(state)
    assert all(torch.isfinite(t).all() for t in after.values())
    still = [n for n, _ in state.model.named_parameters() if torch.equal(after[n], before[n]) and before[n].any()]
    assert not still
    for layer, norm in state.model.named_modules():
        if isinstance(norm, BatchNorm2d):
            assert norm.num_batches_tracked == 1 and norm.running_mean.any(), layer


# -- kinds of parameters


@pytest.mark.parametrize(
    ("name", "norm", "bias", "weight"),
    [
        ("convnext_tiny", "features.1.0.block.2.bias", "classifier.2.bias", "features.1.0.layer_scale"),
        ("vit_b_32", "encoder.ln.bias", "encoder.layers.encoder_layer_0.self_attention.in_proj_bias", "class_token"),
    ],
)
def test_kinds_of_parameters_of_other_networks(name, norm, bias, weight):
    with on_meta():
        net = build(Model(name=name, num_classes=CLASSES))
    assert [kind_of(net, n) for n in (norm, bias, weight)] == [ParamKind.NORM, ParamKind.BIAS, ParamKind.WEIGHT]
    assert all(kind_of(net, n) is not ParamKind.WEIGHT for n, p in net.named_parameters() if p.dim() == 1)
