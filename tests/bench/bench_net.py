"""Time of a training step of nets of Caffe's: stagerun with the prototxt against the same network by hand, a plain nn.Module with torch's
layers, in a loop by hand. In turn and printed as by bench_step. AlexNet is Caffe's, with groups and LRN; ResNet-50 is the published one, with
BatchNorm and Scale as two layers.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch
from bench_step import Case, by_hand, compare, make_batches, seconds
from torch import nn

from stagerun.base import recipe
from stagerun.models.vision import torchvision_models

sys.path.append(str(Path(__file__).parents[1] / "help"))
import net_texts


def alexnet() -> nn.Module:
    def conv(inputs: int, outputs: int, kernel: int, **more: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, kernel, **more), nn.ReLU(inplace=True)]

    def normed() -> list[nn.Module]:
        return [nn.LocalResponseNorm(5, alpha=1.0, beta=0.75, k=1.0), nn.MaxPool2d(3, 2, ceil_mode=True)]

    return nn.Sequential(
        *conv(3, 96, 11, stride=4), *normed(),
        *conv(96, 256, 5, padding=2, groups=2), *normed(),
        *conv(256, 384, 3, padding=1),
        *conv(384, 384, 3, padding=1, groups=2),
        *conv(384, 256, 3, padding=1, groups=2), nn.MaxPool2d(3, 2, ceil_mode=True), nn.Flatten(),
        nn.Linear(9216, 4096), nn.ReLU(inplace=True), nn.Dropout(),
        nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(),
        nn.Linear(4096, 1000),
    )  # fmt: skip


def resnet50() -> nn.Module:
    """torchvision's, with the steps of 2 where they were published."""
    net: nn.Module = torchvision_models().resnet50()
    net.maxpool = nn.MaxPool2d(3, 2, ceil_mode=True)
    for layer in (net.layer2, net.layer3, net.layer4):
        layer[0].conv1.stride, layer[0].conv2.stride = (2, 2), (1, 1)
    return net


def case(name: str, text: str, side: int, batch: int) -> Case:
    model = recipe.Model(name=f"{name} of Caffe's", num_classes=1000, net=text, input_shape=(3, side, side))
    model = replace(model, moving_average_fraction=None, eps=None)
    return Case(model, side=side, batch=batch, by_hand={"alexnet": alexnet, "resnet50": resnet50}[name])


CASES = {
    "alexnet": case("alexnet", net_texts.alexnet(), 227, 32),
    "resnet50": case("resnet50", net_texts.resnet50(), 224, 16),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, nargs="+", default=list(CASES))
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=8.0, help="length of a block, about")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--batch", type=int, default=None)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    device, precision = torch.device(options.device), recipe.Precision(options.precision.upper())
    for name in options.case:
        one = replace(CASES[name], precision=precision, device=device, batch=options.batch or CASES[name].batch)
        probe = by_hand(one, make_batches(one))
        probe(1)
        compare(one, False, options.pairs, max(1, round(options.seconds / seconds(probe, 1, device)[0])))


if __name__ == "__main__":
    main()
