"""Mistakes in net prototxts: each at its place, all at once; and texts that want time or memory."""

import time

import net_texts
import pytest
from net_texts import DATA, END, IMAGE, between, mistakes

from stagerun.base.errors import Problems, RecipeError
from stagerun.language.net import read, resolve

# One layer between the images, 3 x 32 x 32, and a linear layer; the mistakes by line and column.
CONV = 'layer { name: "c" type: "Convolution" bottom: "data" top: "last"\n  convolution_param { INSIDE } }'
LAYER = 'layer { name: "c" type: "TYPE" bottom: "data" top: "last"\n  INSIDE }'


@pytest.mark.parametrize(
    ("inside", "expected"),
    [
        (
            "num_output: 4 kernel_size: 3 group: 5",
            [
                "3:59 layer c: bottom data has 3 channels, group 5 does not divide it",
                "3:59 layer c: `num_output: 4`, and group 5 does not divide it",
            ],
        ),
        ("kernel_size: 3", ["3:3 layer c: `num_output` must be at least 1"]),
        ("num_output: 4", ["3:3 layer c: `kernel_size` is missing"]),
        ("num_output: 4 kernel_h: 3", ["3:47 layer c: `kernel_h` and `kernel_w` are given together or not at all"]),
        (
            "num_output: 4 kernel_size: 3 kernel_h: 3 kernel_w: 3",
            ["3:50 layer c: both `kernel_size` and `kernel_h` are given"],
        ),
        ("num_output: 4 kernel_size: 0", ["3:50 layer c: `kernel_size` must be at least 1"]),
        (
            "num_output: 4 kernel_size: 40",
            ["3:50 layer c: a kernel of 40 x 40 is larger than bottom data, 32 x 32, with its pad"],
        ),
        ("num_output: 4 kernel_sizes: 3", ["3:37 ConvolutionParameter has no field `kernel_sizes`"]),
        (
            'num_output: 4 kernel_size: 3 weight_filler { type: "gabor" }',
            ["3:74 layer c: there is no filler `gabor`"],
        ),
        (
            'num_output: 4 kernel_h: 3 kernel_w: 5 weight_filler { type: "bilinear" } bias_filler { type: "bilinear" }',
            [
                "3:83 layer c: `bilinear` fills maps of squares, and these weights are 4 x 3 x 3 x 5",
                "3:116 layer c: `bilinear` fills maps of squares, and these weights are 4",
            ],
        ),
        (
            "num_output: 1000000000 kernel_size: 3",
            [
                "2:1 layer c: its weight has 27000000000 values, more than 2147483647",
                "2:59 layer c: top last has 900000000000 values for an image, more than 2147483647",
            ],
        ),
        (
            "num_output: 4 kernel_size: 3 pad: 4000000000",
            ["2:59 layer c: top last has 256000001920000003600 values for an image, more than 2147483647"],
        ),
    ],
)
def test_of_a_convolution(inside: str, expected: list[str]) -> None:
    assert mistakes(between(CONV.replace("INSIDE", inside))) == expected


@pytest.mark.parametrize(
    ("kind", "inside", "expected"),
    [
        ("ReLU", 'bottom: "data"', "2:15 layer c: 2 bottoms, and ReLU has 1"),
        ("Eltwise", "", "2:15 layer c: 1 bottom, and Eltwise has at least 2"),
        ("ReLU", "param { }", "3:3 layer c: 1 `param`, and the layer has 0 parameters"),
        ("BatchNorm", 'param { name: "m" }', "3:17 layer c: statistics that layers share are not built"),
        ("ReLU", "blobs { num: 1 }", "3:3 layer c: weights in a net's text aren't read"),
        ("ReLU", "propagate_down: false", "3:19 layer c: `propagate_down: false` isn't known here"),
        (
            "ReLU",
            "include { phase: TRAIN }",
            "4:49 layer ip: bottom last is there in training alone, not in testing",
        ),
        ("Pooling", "pooling_param { pool: STOCHASTIC kernel_size: 2 }", "3:25 layer c: `STOCHASTIC` is not built"),
        (
            "Pooling",
            "pooling_param { kernel_size: 2 pad: 2 }",
            "3:39 layer c: a pad of 2 x 2 is not smaller than the kernel, 2 x 2",
        ),
        (
            "Pooling",
            "pooling_param { kernel_size: 1 stride: 32 }",
            "3:42 layer c: the last window begins beyond bottom data, 32 x 32",
        ),
        ("LRN", "lrn_param { local_size: 4 }", "3:27 layer c: `local_size: 4` is not odd"),
        ("LRN", "lrn_param { alpha: -1 }", "3:22 layer c: `alpha: -1` is not at least 0"),
        ("LRN", "lrn_param { k: 0 }", "3:18 layer c: `k: 0` is not above 0"),
        ("BatchNorm", "batch_norm_param { eps: 1e-60 }", "3:27 layer c: `eps: 0` is not above 0"),
        (
            "BatchNorm",
            "batch_norm_param { moving_average_fraction: 1.5 }",
            "3:47 layer c: `moving_average_fraction: 1.5` is not between 0 and 1",
        ),
        (
            "PReLU",
            'prelu_param { filler { type: "uniform" min: 2 } }',
            "3:47 layer c: `min: 2` is not at most `max: 1`",
        ),
        (
            "PReLU",
            'prelu_param { filler { type: "gaussian" std: -1 } }',
            "3:48 layer c: `std: -1` is not at least 0",
        ),
        ("Dropout", "dropout_param { dropout_ratio: 1 }", "3:34 layer c: `dropout_ratio: 1` is not between 0 and 1"),
        (
            "Flatten",
            "flatten_param { axis: 0 }",
            "3:25 layer c: axis 0 is that of the images, which are computed apart",
        ),
        (
            "Reshape",
            "reshape_param { shape { dim: 0 dim: 7 dim: -1 } }",
            "3:19 layer c: 3072 values of 3 x 32 x 32 can't be put in `-1` x 7",
        ),
        (
            "Reshape",
            "reshape_param { shape { dim: 6 dim: -1 } }",
            "3:19 layer c: the first axis is that of the images, and has to stay",
        ),
        ("Slice", 'top: "b"', "2:1 layer c: 2 tops don't divide 3 evenly"),
        (
            "Slice",
            'top: "b" slice_param { slice_point: 3 }',
            "3:39 layer c: the points don't ascend between 0 and 3",
        ),
        ("Power", "power_param { shift: 1e39 }", "3:24 layer c: `shift: 1e+39` is too large for Caffe's numbers"),
    ],
)
def test_of_other_layers(kind: str, inside: str, expected: str) -> None:
    found = mistakes(between(LAYER.replace("TYPE", kind).replace("INSIDE", inside)))
    assert found == [expected]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ('layer { name: "c" type: "ReLU" bottom: "dta" top: "last" }', ["2:40 layer c: no layer has the top dta"]),
        (
            'layer { name: "c" type: "ReLU" bottom: "d" top: "last" }\nlayer { name: "d" type: "ReLU" bottom: "last" top: "d" }',
            ["2:40 layer c: bottom d comes from layer d in line 3, and not from a layer before"],
        ),
        (
            'layer { name: "c" type: "ReLU" bottom: "last" top: "last" }',
            ["2:40 layer c: bottom last comes from itself, and not from a layer before"],
        ),
        (
            'layer { name: "c" type: "ReLU" bottom: "data" top: "last" }\nlayer { name: "c" type: "TanH" bottom: "data" top: "last" }',
            ["3:15 layer c: there is another layer of this name", "3:52 layer c: top last is there already"],
        ),
        (
            'layer { name: "c" type: "Flatten" bottom: "data" top: "data" }\nlayer { name: "d" type: "ReLU" bottom: "data" top: "last" }',
            ["2:55 layer c: Flatten can't be computed in place"],
        ),
        (
            'layer { name: "c" type: "ReLU" bottom: "data" top: "last" include { } exclude { } }',
            ["2:71 layer c: it has both `include` and `exclude`"],
        ),
        (
            'layer { name: "d" type: "Data" top: "data2" }\nlayer { name: "e" type: "Eltwise" bottom: "data" bottom: "data2" top: "last" }',
            ["2:37 layer d: data are images already"],
        ),
        (
            'layer { name: "c" type: "InnerProduct" bottom: "data" top: "c" param { name: "w" } inner_product_param { num_output: 4 } }\n'
            'layer { name: "d" type: "InnerProduct" bottom: "c" top: "last" param { name: "w" } inner_product_param { num_output: 4 } }',
            ["3:78 layer d: parameter w is 4 x 4 here and 4 x 3072 in line 2"],
        ),
    ],
)
def test_of_how_layers_follow_each_other(layers: str, expected: list[str]) -> None:
    assert mistakes(between(layers)) == expected


def test_unknown_layers_are_one_list_and_their_own_fields_no_mistakes() -> None:
    text = between(
        'layer { name: "c" type: "Convolutio" bottom: "data" top: "c" }',
        'layer { name: "d" type: "RoIPooling" bottom: "c" top: "last" roi_pooling_param { pooled_w: 6 } }',
        'layer { name: "e" type: "ReLU" bottom: "last" top: "last" quantization_param { } }',
        'layer { name: "f" type: "ReLU" bottom: "last" top: "last" quantization_param { } }',
    )
    assert mistakes(text) == [
        "2:25 layer c: unknown type `Convolutio`",
        "3:25 layer d: unknown type `RoIPooling`",
        "4:59 LayerParameter has no field `quantization_param`, here and 1 more time",
    ]


def test_one_layer_with_parameters_or_statistics_may_have_no_name() -> None:
    unnamed = 'layer { type: "TYPE" bottom: "last" top: "last" }'
    first = 'layer { name: "r" type: "ReLU" bottom: "data" top: "last" }'
    net_texts.net_from(between(first, *(unnamed.replace("TYPE", kind) for kind in ("ReLU", "PReLU", "Dropout"))))
    two = between(first, unnamed.replace("TYPE", "PReLU"), unnamed.replace("TYPE", "BatchNorm"))
    assert mistakes(two) == ["4:1 layer BatchNorm: it has no `name`, as the layer in line 3"]


def test_what_is_no_classifier() -> None:
    assert mistakes("") == mistakes('name: "x"') == ["1:1 the file has no `layer`"]
    assert mistakes(DATA) == ["1:1 no layer computes anything"]
    loss = 'layer { name: "l" type: "SoftmaxWithLoss" bottom: "c" bottom: "label" }'
    conv = CONV.replace("last", "c").replace("INSIDE", "num_output: 3 kernel_size: 1")
    what = "is the net's output, and a classifier has one number for each class of an image"
    assert mistakes(DATA + conv + loss) == [f"2:1 layer c: its top c, 3 x 32 x 32, {what}"]
    smoothed = loss.replace('"c"', '"ip"').replace(" }", " loss_param { label_smoothing: 1 } }")
    said = mistakes(DATA + END.partition('layer { name: "loss"')[0].replace("LAST", "data") + smoothed)
    assert [one.partition(" ")[2] for one in said] == ["layer l: `label_smoothing: 1` is not at least 0 and below 1"]
    assert mistakes(DATA + "layers { }") == ["2:1 the net has both `layer` and `layers`"]


def test_the_phases_have_to_be_one_network() -> None:
    ip = 'layer {{ name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param {{ num_output: {} }} include {{ phase: {} }} }}\n'
    loss = 'layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" }'
    assert mistakes(DATA + ip.format(10, "TRAIN") + ip.format(12, "TEST") + loss) == [
        "1:1 the number of classes is 10 in training and 12 in testing",
        "2:1 ip.weight is 10 x 3072 in training and 12 x 3072 in testing",
        "2:1 ip.bias is 10 in training and 12 in testing",
    ]


def test_without_the_images_size_what_can_be_checked_is_checked() -> None:
    conv = CONV.replace("INSIDE", "num_output: 8 kernel_size: 3")
    grouped = conv.replace('"data"', '"last"').replace('name: "c"', 'name: "d"').replace('top: "last"', 'top: "d"')
    text = between(conv, grouped.replace("kernel_size: 3", "kernel_size: 3 group: 3"))
    assert mistakes(text, None)[0] == "5:59 layer d: bottom last has 8 channels, group 3 does not divide it"
    problems = Problems()
    found = read(between(conv), "net", problems)
    assert found is not None
    assert (resolve(found, None, problems), problems.all()) == (None, ())


# -- texts that want time or memory

MANY = 4_000  # layers; the reader takes linear time


def chain(layer: str) -> str:
    return DATA + "".join(layer.format(i=i, above=i - 1, below=i + 1) for i in range(MANY))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('layer { type: "ReLU" }\n' * 1_000_000, "the file is larger than 1 MB"),
        ("layer{}" * 21_000, "the net has 21000 layers, and at most 20000 are read"),
        (chain('layer{{name:"a{i}" type:"ReLU" bottom:"y{below}" top:"y{i}"}}'), "more than 100 mistakes"),
        (chain('layer{{name:"a{i}" type:"Nothing"}}'), "more than 100 mistakes"),
        ("layer { " * 30_000, "`{` is never closed"),
        ("layers { layer { x { " + "y { " * 30_000, "`{` is never closed"),
        (DATA + 'layer { name: "c" type: "Concat" top: "c"' + 'bottom: "data" ' * 20_000 + "}", "20000 bottoms"),
        (DATA + 'layer { name: "c" type: "Split" bottom: "data"' + 'top: "c" ' * 20_000 + "}", "20000 tops"),
        (
            'layer { name: "i" type: "Input" top: "data" input_param { shape {' + "dim: 9 " * 20_000 + "} } }",
            "a shape of 20000 axes",
        ),
        (
            chain('layer{{name:"a{i}" type:"Concat" bottom:"y{above}" bottom:"y{above}" top:"y{i}"}}').replace(
                "y-1", "data"
            ),
            "values for an image, more than 2147483647",
        ),
        (
            DATA
            + 'layer { name: "p" type: "Pooling" bottom: "data" top: "p" pooling_param { global_pooling: true } }'
            + END.replace("LAST", "p").replace("10", "500000000"),
            "the net has 2,000,000,000 parameters",
        ),
    ],
    ids=("million", "empty", "cyclic", "unknown", "deep", "deep_fields", "bottoms", "tops", "axes", "doubling", "outputs"),
)  # fmt: skip
def test_hostile_nets_end_soon_in_few_mistakes(text: str, expected: str) -> None:
    problems = Problems()
    start = time.process_time()
    found = read(text, "net", problems)
    assert found is None or resolve(found, IMAGE, problems) is None
    rendered = RecipeError(problems.all()).render()
    assert expected in rendered
    assert len(problems.all()) < 150
    assert len(rendered) < 50_000
    assert time.process_time() - start < 20


def test_a_net_of_many_layers_is_read() -> None:
    text = chain('layer{{name:"a{i}" type:"ReLU" bottom:"data" top:"data"}}') + END.replace("LAST", "data")
    assert len(net_texts.net_from(text).train.layers) == MANY + 3


def damaged_braces() -> list[str]:
    """LeNet with each line that has a brace, and each brace alone, left out or doubled."""
    lines = net_texts.lenet().splitlines(keepends=True)
    found = []
    for i, line in enumerate(lines):
        if "{" in line or "}" in line:
            found += ["".join([*lines[:i], *instead, *lines[i + 1 :]]) for instead in ([], [line, line])]
        for at in (at for at, c in enumerate(line) if c in "{}"):
            one = [line[:at] + line[at + 1 :], line[:at] + line[at] * 2 + line[at + 1 :]]
            found += ["".join([*lines[:i], instead, *lines[i + 1 :]]) for instead in one]
    return found


def test_a_brace_too_few_or_too_many_is_a_mistake_with_a_place() -> None:
    refused = 0
    for text in damaged_braces():
        problems = Problems()
        net = read(text, "net", problems)
        found = resolve(net, (1, 28, 28), problems) if net is not None else None
        assert (found is None) == bool(problems), text
        refused += bool(problems)
    assert refused > 50


def test_a_layer_without_name_and_type() -> None:
    problems = Problems()
    assert read("layer { }", "net", problems) is None
    assert [p.message for p in problems.all()] == ["a layer has no `type`"]
