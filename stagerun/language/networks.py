"""Every network by name, its function, and its facts that need no torch. Literal tables; `models` builds the networks.

A new network is a function in stagerun/models, which makes it from a `recipe.Model`, and a row of NETWORKS here. Add its
name to the comment of `Model.name` in protos/stagerun.proto, which `stagerun help` shows.

The table has all networks that torchvision's `models` lists as classifiers. It leaves out detection, segmentation, key points,
optical flow and video, which don't return one class per image, and the quantised classifiers, whose integers can't be trained.
"""

import re
from dataclasses import dataclass

from stagerun.base import recipe
from stagerun.base.code import Code, WrongCode, code_of, names_code
from stagerun.language.lexer import shown

# moving_average_fraction and eps of BatchNorm unless the network's authors chose others: 1 - momentum and eps of torch.
PLAIN = (0.9, 1e-5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Facts of a network. `made_by`: its function, `MODULE.NAME` in stagerun/models; '' for torchvision's of the same
    name. `batch_norm`: moving_average_fraction and eps as published, None without BatchNorm. Images have at least
    `smallest` pixels on each side and at most `largest`. `zero_gamma`, `blur_pool`, `fc_weight` and `fc_bias`: whether
    these settings of Model apply; the last two mean a final linear layer, and biases in it. `foreign`: it comes from
    outside, and all facts are unknown."""

    made_by: str = ""
    batch_norm: tuple[float, float] | None = PLAIN
    smallest: int = 1
    largest: int | None = None
    zero_gamma: bool = False
    blur_pool: bool = False
    fc_weight: bool = True
    fc_bias: bool = True
    foreign: bool = False

    @property
    def sizes(self) -> str:
        """Return `224 x 224 pixels only`, or `75 x 75 pixels or more`."""
        limit = "only" if self.smallest == self.largest else "or more"
        return f"{self.smallest} x {self.smallest} pixels {limit}"

    def fits(self, height: int, width: int) -> bool:
        """Return whether the network takes images of this size."""
        return self.smallest <= min(height, width) and (self.largest is None or max(height, width) <= self.largest)


def _all(network: Network, names: str) -> dict[str, Network]:
    return dict.fromkeys(names.split(), network)


# All of torchvision's classifiers, similar ones together.
TORCHVISION: dict[str, Network] = {
    "alexnet": Network(smallest=63, batch_norm=None),
    **_all(
        Network(smallest=32, batch_norm=None),
        "convnext_tiny convnext_small convnext_base convnext_large vgg11 vgg13 vgg16 vgg19",
    ),
    **_all(Network(smallest=29), "densenet121 densenet161 densenet169 densenet201"),
    **_all(
        Network(),
        """
        efficientnet_b0 efficientnet_b1 efficientnet_b2 efficientnet_b3 efficientnet_b4 mobilenet_v2
        regnet_x_400mf regnet_x_800mf regnet_x_1_6gf regnet_x_3_2gf regnet_x_8gf regnet_x_16gf regnet_x_32gf
        regnet_y_400mf regnet_y_800mf regnet_y_1_6gf regnet_y_3_2gf regnet_y_8gf regnet_y_16gf regnet_y_32gf regnet_y_128gf
        shufflenet_v2_x0_5 shufflenet_v2_x1_0 shufflenet_v2_x1_5 shufflenet_v2_x2_0
        """,
    ),
    **_all(
        Network(batch_norm=(0.99, 1e-3)),
        "efficientnet_b5 efficientnet_b6 efficientnet_b7 mobilenet_v3_small mobilenet_v3_large",
    ),
    **_all(Network(batch_norm=(0.9, 1e-3)), "efficientnet_v2_s efficientnet_v2_m efficientnet_v2_l"),
    "googlenet": Network(smallest=15, batch_norm=(0.9, 1e-3)),
    "inception_v3": Network(smallest=75, batch_norm=(0.9, 1e-3)),
    "maxvit_t": Network(smallest=224, largest=224, batch_norm=(0.99, 1e-3), fc_bias=False),
    **_all(Network(batch_norm=(0.9997, 1e-5)), "mnasnet0_5 mnasnet0_75 mnasnet1_0 mnasnet1_3"),
    **_all(
        Network(zero_gamma=True, blur_pool=True),
        """
        resnet18 resnet34 resnet50 resnet101 resnet152 resnext50_32x4d resnext101_32x8d resnext101_64x4d
        wide_resnet50_2 wide_resnet101_2
        """,
    ),
    "squeezenet1_0": Network(smallest=21, batch_norm=None, fc_weight=False, fc_bias=False),
    "squeezenet1_1": Network(smallest=17, batch_norm=None, fc_weight=False, fc_bias=False),
    **_all(Network(smallest=4, batch_norm=None), "swin_t swin_s swin_b swin_v2_t swin_v2_s swin_v2_b"),
    **_all(Network(smallest=32), "vgg11_bn vgg13_bn vgg16_bn vgg19_bn"),
    **_all(Network(smallest=224, largest=224, batch_norm=None), "vit_b_16 vit_b_32 vit_l_16 vit_l_32 vit_h_14"),
}

NETWORKS: dict[str, Network] = {
    **TORCHVISION,
    "alexnet_bn": Network(made_by="small.alexnet_bn", smallest=15, fc_bias=False),
    # MXNet's BatchNorm in November 2015; two months later its eps was 1e-3.
    "inception_bn": Network(made_by="small.inception_bn", batch_norm=(0.9, 1e-10)),
    "inception_bn_28_small": Network(made_by="small.inception_bn_28_small", batch_norm=(0.9, 1e-10)),
    "resnet50_intel_caffe": Network(
        made_by="catalog.resnet50_intel_caffe", smallest=3, batch_norm=(0.95, 1e-5), zero_gamma=True, blur_pool=True
    ),
    "resnet9": Network(made_by="small.resnet9", smallest=8, fc_bias=False),
    "resnet_small": Network(made_by="small.resnet_small", smallest=2, zero_gamma=True),
    **_all(Network(made_by="small.wide_resnet"), "wrn_16_8 wrn_28_10 wrn_40_4"),
}

# A file of the user's, a package, or timm.
_FOREIGN = Network(fc_weight=False, fc_bias=False, foreign=True)
# A Caffe net, whose text has these facts.
NET = Network(batch_norm=None, fc_weight=False, fc_bias=False)
TIMM = "timm/"
_TIMM = re.compile(r"timm/[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)?")
# Arguments of timm's networks that need no consent: they load no weights, open no file, and don't change the kind of output.
TIMM_ARGUMENTS = frozenset(
    """
    aa_layer act_layer always_partition attn_drop_rate avg_down base_width block_reduce_first bn_eps bn_momentum
    bn_tf cardinality channel_multiplier class_token conv_bias conv_mlp depth depth_mult depths dims
    down_kernel_size drop_block_rate drop_path_rate drop_rate dynamic_img_pad dynamic_img_size embed_dim embed_dims
    expand_ratio fc_norm final_norm fix_init fix_stem global_pool growth_rate head_dim head_hidden_size
    head_init_scale head_norm_first img_size init_values kernel_size kernel_sizes layer_scale_init_value layers
    ls_init_value mlp_ratio mlp_ratios no_embed_class norm_eps norm_layer num_features num_heads output_stride
    pad_type patch_drop_rate patch_size pool_type pos_drop_rate pos_embed pre_norm proj_bias proj_drop_rate qk_norm
    qkv_bias reg_tokens replace_stem_pool se_ratio sr_ratios stem_chs stem_size stem_type stem_width strict_img_size
    use_grn use_pos_embed weight_init width_factor width_mult window_size zero_init_last
    """.split()
)


def network_of(name: str) -> Network:
    """Return the facts of a network that `check` accepts. KeyError."""
    return _FOREIGN if is_foreign(name) else NETWORKS[name]


def known_of(model: recipe.Model) -> Network:
    """Return the facts of a checked network, which may be a Caffe net."""
    return NET if model.net is not None else network_of(model.name)


def from_outside(model: recipe.Model) -> bool:
    """Return whether someone's Python makes the network. A Caffe net is data."""
    return model.net is None and is_foreign(model.name)


def is_foreign(name: str) -> bool:
    """Return whether the network comes from a file, a package or timm; `code_in` checks the name."""
    return names_code(name) or name.startswith(TIMM)


def code_in(name: str) -> Code | None:
    """Return the code that makes a network from outside; None for one of stagerun's. WrongCode."""
    if name.startswith(TIMM):
        if _TIMM.fullmatch(name):
            return Code("", "timm", "create_model")
        hint = 'write a name such as `"timm/resnet26d"`, without timm\'s tag of weights'
        raise WrongCode(f"`{shown(name)}` is not a network of timm", hint)
    return code_of(name) if names_code(name) else None


# The fillers, and the fields of FillerParameter that each reads. `models.layers` has their functions; a test compares both.
FILLER_FIELDS: dict[str, tuple[str, ...]] = {
    "constant": ("value",),
    "gaussian": ("std",),
    "uniform": ("min", "max"),
    "xavier": ("variance_norm",),
    "msra": ("variance_norm",),
}
