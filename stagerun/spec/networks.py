"""Every network by name, and what can be known of it without torch. Literal tables; `models` builds them.

From torchvision come all networks that its `models` lists as classifiers. What it has besides is left out: detection,
segmentation, key points, optical flow and video answer something else than one class per image, and the quantised
classifiers hold integers, which can't be trained.
"""

from dataclasses import dataclass

# moving_average_fraction and eps of BatchNorm where the network's authors wrote nothing else: 1 - momentum and eps of torch.
PLAIN = (0.9, 1e-5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """`batch_norm`: moving_average_fraction and eps as published, None where there is no BatchNorm.

    Images have at least `smallest` pixels on each side and at most `largest`. `zero_gamma`, `blur_pool`, `fc_weight`
    and `fc_bias` say whether these settings of Model mean something: the last two that there is a linear layer at the
    end, and that it has biases.
    """

    batch_norm: tuple[float, float] | None = PLAIN
    smallest: int = 1
    largest: int | None = None
    zero_gamma: bool = False
    blur_pool: bool = False
    fc_weight: bool = True
    fc_bias: bool = True

    @property
    def sizes(self) -> str:
        """`224 x 224 pixels only`, or `75 x 75 pixels or more`."""
        limit = "only" if self.smallest == self.largest else "or more"
        return f"{self.smallest} x {self.smallest} pixels {limit}"

    def fits(self, height: int, width: int) -> bool:
        """Whether it takes images of that many pixels."""
        return self.smallest <= min(height, width) and (self.largest is None or max(height, width) <= self.largest)


_RESNET = Network(zero_gamma=True, blur_pool=True)
_VGG = Network(smallest=32)
_VGG_WITHOUT = Network(smallest=32, batch_norm=None)
_SWIN = Network(smallest=4, batch_norm=None)
_VIT = Network(smallest=224, largest=224, batch_norm=None)
_CONVNEXT = Network(smallest=32, batch_norm=None)
_DENSENET = Network(smallest=29)
_EPS_3 = Network(batch_norm=(0.9, 1e-3))
_SLOW_EPS_3 = Network(batch_norm=(0.99, 1e-3))
_MNASNET = Network(batch_norm=(0.9997, 1e-5))

TORCHVISION: dict[str, Network] = {
    "alexnet": Network(smallest=63, batch_norm=None),
    "convnext_tiny": _CONVNEXT,
    "convnext_small": _CONVNEXT,
    "convnext_base": _CONVNEXT,
    "convnext_large": _CONVNEXT,
    "densenet121": _DENSENET,
    "densenet161": _DENSENET,
    "densenet169": _DENSENET,
    "densenet201": _DENSENET,
    "efficientnet_b0": Network(),
    "efficientnet_b1": Network(),
    "efficientnet_b2": Network(),
    "efficientnet_b3": Network(),
    "efficientnet_b4": Network(),
    "efficientnet_b5": _SLOW_EPS_3,
    "efficientnet_b6": _SLOW_EPS_3,
    "efficientnet_b7": _SLOW_EPS_3,
    "efficientnet_v2_s": _EPS_3,
    "efficientnet_v2_m": _EPS_3,
    "efficientnet_v2_l": _EPS_3,
    "googlenet": Network(smallest=15, batch_norm=(0.9, 1e-3)),
    "inception_v3": Network(smallest=75, batch_norm=(0.9, 1e-3)),
    "maxvit_t": Network(smallest=224, largest=224, batch_norm=(0.99, 1e-3), fc_bias=False),
    "mnasnet0_5": _MNASNET,
    "mnasnet0_75": _MNASNET,
    "mnasnet1_0": _MNASNET,
    "mnasnet1_3": _MNASNET,
    "mobilenet_v2": Network(),
    "mobilenet_v3_small": _SLOW_EPS_3,
    "mobilenet_v3_large": _SLOW_EPS_3,
    "regnet_x_400mf": Network(),
    "regnet_x_800mf": Network(),
    "regnet_x_1_6gf": Network(),
    "regnet_x_3_2gf": Network(),
    "regnet_x_8gf": Network(),
    "regnet_x_16gf": Network(),
    "regnet_x_32gf": Network(),
    "regnet_y_400mf": Network(),
    "regnet_y_800mf": Network(),
    "regnet_y_1_6gf": Network(),
    "regnet_y_3_2gf": Network(),
    "regnet_y_8gf": Network(),
    "regnet_y_16gf": Network(),
    "regnet_y_32gf": Network(),
    "regnet_y_128gf": Network(),
    "resnet18": _RESNET,
    "resnet34": _RESNET,
    "resnet50": _RESNET,
    "resnet101": _RESNET,
    "resnet152": _RESNET,
    "resnext50_32x4d": _RESNET,
    "resnext101_32x8d": _RESNET,
    "resnext101_64x4d": _RESNET,
    "shufflenet_v2_x0_5": Network(),
    "shufflenet_v2_x1_0": Network(),
    "shufflenet_v2_x1_5": Network(),
    "shufflenet_v2_x2_0": Network(),
    "squeezenet1_0": Network(smallest=21, batch_norm=None, fc_weight=False, fc_bias=False),
    "squeezenet1_1": Network(smallest=17, batch_norm=None, fc_weight=False, fc_bias=False),
    "swin_t": _SWIN,
    "swin_s": _SWIN,
    "swin_b": _SWIN,
    "swin_v2_t": _SWIN,
    "swin_v2_s": _SWIN,
    "swin_v2_b": _SWIN,
    "vgg11": _VGG_WITHOUT,
    "vgg13": _VGG_WITHOUT,
    "vgg16": _VGG_WITHOUT,
    "vgg19": _VGG_WITHOUT,
    "vgg11_bn": _VGG,
    "vgg13_bn": _VGG,
    "vgg16_bn": _VGG,
    "vgg19_bn": _VGG,
    "vit_b_16": _VIT,
    "vit_b_32": _VIT,
    "vit_l_16": _VIT,
    "vit_l_32": _VIT,
    "vit_h_14": _VIT,
    "wide_resnet50_2": _RESNET,
    "wide_resnet101_2": _RESNET,
}

NETWORKS: dict[str, Network] = {
    **TORCHVISION,
    "alexnet_bn": Network(smallest=15, fc_bias=False),
    # MXNet's own BatchNorm in November 2015; two months later its eps was 1e-3.
    "inception_bn": Network(batch_norm=(0.9, 1e-10)),
    "inception_bn_28_small": Network(batch_norm=(0.9, 1e-10)),
    "resnet50_intel_caffe": Network(smallest=3, batch_norm=(0.95, 1e-5), zero_gamma=True, blur_pool=True),
    "resnet9": Network(smallest=8, fc_bias=False),
    "resnet_small": Network(smallest=2, zero_gamma=True),
}

# The fillers, and which fields of FillerParameter each reads. `models.layers` has their functions, which a test holds equal.
FILLER_FIELDS: dict[str, tuple[str, ...]] = {
    "constant": ("value",),
    "gaussian": ("mean", "std"),
    "uniform": ("min", "max"),
    "xavier": ("variance_norm",),
    "msra": ("variance_norm",),
}
