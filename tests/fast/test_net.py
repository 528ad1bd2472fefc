"""Net prototxts of Caffe's, read and resolved: sizes, older forms, phases, shared parameters, the canonical form, and `plan --net`."""

import contract
import net_texts
import pytest
from drawn import examples
from facade import Problems, RecipeError, layers, net_of, resolve
from hypothesis import given
from hypothesis import strategies as st
from net_texts import between, canonical, net_from, only

# -- sizes


# Looked up:
# [m] github.com/imistyrain/mrcv, README: Caffe's flops.py on AlexNet says 724406816, and 60954656 weights beside 10568 biases
# [t] torchvision 0.28, `meta` of its weights: num_params, and _ops in billions
@pytest.mark.parametrize(
    ("text", "parameters", "multiply_adds"),
    [
        (net_texts.alexnet(), 60_954_656 + 10_568, 724_406_816),  # [m]
        (net_texts.resnet50(), 25_557_032, 3_857_973_248),  # [t]
    ],
    ids=("alexnet", "resnet50"),
)
def test_parameters_and_multiply_adds_are_the_published_ones(text, parameters, multiply_adds, tmp_path):
    (tmp_path / "net").write_text(text)
    done = contract.stagerun(["plan", "--net", "net"], tmp_path)
    (total,) = (line.split()[1:] for line in done.output.splitlines() if line.startswith("total "))
    assert total == [f"{parameters:,}", f"{multiply_adds:,}"]
    found = net_from(text, None)
    assert (found.num_classes, found.test.labels) == (1000, "")


@pytest.mark.parametrize(
    ("layer", "shapes"),
    [
        ('type: "Slice" top: "last" top: "b" slice_param { axis: 1 slice_point: 2 }', ((2, 8, 8), (4, 8, 8))),
        ('type: "Slice" top: "last" top: "b" top: "c" slice_param { slice_dim: 1 }', ((2, 8, 8),) * 3),
        ('type: "Slice" top: "last" top: "b" slice_param { axis: -2 }', ((6, 4, 8),) * 2),
        ('type: "Flatten" top: "last"', ((384,),)),
        ('type: "Flatten" top: "last" flatten_param { axis: 2 end_axis: -1 }', ((6, 64),)),
        ('type: "Reshape" top: "last" reshape_param { shape { dim: 0 dim: -1 dim: 2 } }', ((192, 2),)),
        ('type: "Reshape" top: "last" reshape_param { shape { dim: 0 dim: 0 dim: 4 dim: -1 } }', ((6, 4, 16),)),
        ('type: "Reshape" top: "last" reshape_param { shape { dim: -1 dim: 384 } }', ((384,),)),
        ('type: "Reshape" top: "last" reshape_param { shape { dim: 3 dim: 2 } axis: 1 num_axes: 1 }', ((3, 2, 8, 8),)),
        ('type: "InnerProduct" top: "last" inner_product_param { num_output: 5 axis: 2 }', ((6, 5),)),
        ('type: "Pooling" top: "last" pooling_param { pool: AVE global_pooling: true }', ((6, 1, 1),)),
        (
            'type: "Convolution" top: "last" convolution_param { num_output: 4 group: 2 kernel_h: 3 kernel_w: 1 stride_h: 2 }',
            ((4, 3, 8),),
        ),
        (
            'type: "Convolution" top: "last" convolution_param { num_output: 4 kernel_size: 3 pad: 1 dilation: 2 }',
            ((4, 6, 6),),
        ),
        (
            'type: "Deconvolution" top: "last" convolution_param { num_output: 4 kernel_size: 3 stride: 2 pad: 1 }',
            ((4, 15, 15),),
        ),
        ('type: "Split" top: "last" top: "b"', ((6, 8, 8),) * 2),
        ('type: "Concat" bottom: "data" top: "last"', ((12, 8, 8),)),
        ('type: "Concat" bottom: "data" top: "last" concat_param { concat_dim: 2 }', ((6, 16, 8),)),
        ('type: "Eltwise" bottom: "data" top: "last" eltwise_param { coeff: 1 coeff: -1 }', ((6, 8, 8),)),
    ],
)
def test_shapes(layer, shapes):
    found = net_from(between(f'layer {{ name: "x" bottom: "data" {layer} }}'), (6, 8, 8))
    assert only(found, "x").shapes == shapes


def test_parameters_of_the_smaller_layers():
    text = between(
        'layer { name: "s" type: "Scale" bottom: "data" top: "s" scale_param { axis: 1 num_axes: 2 bias_term: true } }',
        'layer { name: "b" type: "Bias" bottom: "s" top: "b" bias_param { num_axes: -1 filler { value: 2 } } }',
        'layer { name: "p" type: "PReLU" bottom: "b" top: "p" }',
        'layer { name: "q" type: "PReLU" bottom: "p" top: "q" prelu_param { channel_shared: true } }',
        'layer { name: "t" type: "InnerProduct" bottom: "q" top: "last" inner_product_param { num_output: 7 transpose: true } }',
    )
    found = net_from(text, (6, 8, 8))
    shapes = {b.name: b.shape for layer in found.train.layers for b in layer.blobs}
    assert shapes == {
        "s.weight": (6, 8), "s.bias": (6, 8), "b.bias": (6, 8, 8), "p.weight": (6,), "q.weight": (), "t.weight": (384, 7), "t.bias": (7,),
        "ip.weight": (10, 7), "ip.bias": (10,),
    }  # fmt: skip
    fillers = {b.name: (b.filler.type, b.filler.value) for layer in found.train.layers for b in layer.blobs}
    assert fillers["s.weight"] == ("constant", 1.0)
    assert fillers["b.bias"] == ("constant", 2.0)
    assert fillers["p.weight"] == ("constant", 0.25)
    assert fillers["ip.weight"] == ("constant", 0.0)


# -- older forms

TODAY = """
layer { name: "data" type: "Data" top: "data" top: "label" include { phase: TRAIN } transform_param { scale: 0.5 crop_size: 24 }
  data_param { source: "train" batch_size: 4 } }
layer { name: "conv1" type: "Convolution" bottom: "data" top: "conv1" param { lr_mult: 1 decay_mult: 1 } param { lr_mult: 2 decay_mult: 0 }
  convolution_param { num_output: 8 kernel_size: 5 pad: 2 stride: 2 group: 1 weight_filler { type: "xavier" } } }
layer { name: "relu1" type: "ReLU" bottom: "conv1" top: "conv1" }
layer { name: "pool1" type: "Pooling" bottom: "conv1" top: "pool1" pooling_param { pool: AVE kernel_size: 3 stride: 2 } }
layer { name: "norm1" type: "LRN" bottom: "pool1" top: "norm1" lrn_param { local_size: 3 alpha: 0.1 } }
layer { name: "ip" type: "InnerProduct" bottom: "norm1" top: "ip" inner_product_param { num_output: 10 } }
layer { name: "drop" type: "Dropout" bottom: "ip" top: "ip" dropout_param { dropout_ratio: 0.25 } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" }
"""
V1 = """
layers { name: "data" type: DATA top: "data" top: "label" include { phase: TRAIN }
  data_param { source: "train" batch_size: 4 scale: 0.5 crop_size: 24 } }
layers { name: "conv1" type: CONVOLUTION bottom: "data" top: "conv1" blobs_lr: 1 blobs_lr: 2 weight_decay: 1 weight_decay: 0
  convolution_param { num_output: 8 kernel_size: 5 pad: 2 stride: 2 weight_filler { type: "xavier" } } }
layers { name: "relu1" type: RELU bottom: "conv1" top: "conv1" }
layers { name: "pool1" type: POOLING bottom: "conv1" top: "pool1" pooling_param { pool: AVE kernel_size: 3 stride: 2 } }
layers { name: "norm1" type: LRN bottom: "pool1" top: "norm1" lrn_param { local_size: 3 alpha: 0.1 } }
layers { name: "ip" type: INNER_PRODUCT bottom: "norm1" top: "ip" inner_product_param { num_output: 10 } }
layers { name: "drop" type: DROPOUT bottom: "ip" top: "ip" dropout_param { dropout_ratio: 0.25 } }
layers { name: "loss" type: SOFTMAX_LOSS bottom: "ip" bottom: "label" }
"""


def test_an_older_form_is_the_same_net():
    assert canonical(V1) == canonical(TODAY) and net_from(V1) == net_from(TODAY)
    (reader,) = resolve.read(V1, "net", Problems()).readers("TRAIN")
    crop = reader.block("transform_param").entries["crop_size"]
    assert reader.entries["type"].values[0].value == "Data" and crop.values[0].value == 24


def test_the_form_of_2013_is_refused():
    problems = Problems()
    assert resolve.read('layers { layer { name: "pad1" type: "padding" pad: 2 } top: "a" }', "net", problems) is None
    assert [problem.message for problem in problems.all()] == [
        "`layer` within `layers` is Caffe's form of 2013, which is not read"
    ]


def test_inputs_beside_the_layers():
    end = 'layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 10 } }'
    one = net_from(f'input: "data" input_dim: 9 input_dim: 3 input_dim: 5 input_dim: 7 {end}', None)
    other = net_from(f'input: "data" input_shape {{ dim: 1 dim: 3 dim: 5 dim: 7 }} {end}', None)
    assert one == other
    assert (one.shape, one.train.images, one.train.logits, one.num_classes) == ((3, 5, 7), "data", "ip", 10)


def test_fields_that_caffe_passes_over():
    """`input` without shapes where a layer has that top."""
    ip = 'layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 10 } }'
    given = 'layer { name: "d" type: "Input" top: "data" input_param { shape { dim: 1 dim: 3 dim: 5 dim: 7 } } }'
    assert net_from(f'input: "data" {given} {ip}', None) == net_from(given + ip, None)


def test_the_two_names_of_shared_parameters():
    text = """
    layers { name: "data" type: DATA top: "data" top: "label" }
    layers { name: "a" type: INNER_PRODUCT bottom: "data" top: "a" param: "w" param: "" inner_product_param { num_output: 10 } }
    layers { name: "b" type: INNER_PRODUCT bottom: "data" top: "b" param: "w" inner_product_param { num_output: 10 } }
    layers { name: "sum" type: ELTWISE bottom: "a" bottom: "b" top: "sum" }
    layers { name: "loss" type: SOFTMAX_LOSS bottom: "sum" bottom: "label" }
    """
    found = net_from(text)
    assert [b.name for b in only(found, "b").blobs] == ["a.weight", "b.bias"]
    assert only(found, "b").blobs[0].shape == (10, 3072)


# -- phases

PHASES = """
layer { name: "data" type: "Data" top: "data" top: "label" include { phase: TRAIN } }
layer { name: "drop" type: "Dropout" bottom: "data" top: "data" exclude { phase: TEST } exclude { phase: TRAIN stage: "sure" } }
layer { name: "deep" type: "ReLU" bottom: "data" top: "data" include { min_level: 2 max_level: 3 } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 10 } }
layer { name: "acc" type: "Accuracy" bottom: "ip" bottom: "label" top: "acc" include { phase: TEST not_stage: "quick" } include { stage: "all" } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""


def test_phase_level_and_stage():
    """Level 0, without stages. A net without images for testing is tested with those of training."""
    found = net_from(PHASES)
    names = [" ".join(layer.name for layer in p.layers) for p in (found.train, found.test)]
    assert names == ["data drop ip loss", "data ip acc loss"]
    again = net_of(found.text, found.shape)
    assert (again.train, again.test) == (found.train, found.test)


def test_batch_norm_alone_as_intels_merged_one_and_its_filler_for_the_scale_after_it():
    norm = 'layer { name: "bn" type: "BatchNorm" bottom: "data" top: "data" INSIDE }'
    scale = 'layer { name: "sc" type: "Scale" bottom: "data" top: "last" scale_param { bias_term: true } }'
    three = "param { lr_mult: 0 } param { lr_mult: 0 } param { lr_mult: 0 }"

    def blobs(inside: str) -> dict[str, float]:
        found = net_from(between(norm.replace("INSIDE", inside), scale))
        return {b.name: b.filler.value for layer in found.train.layers[1:3] for b in layer.blobs}

    assert blobs(three) == blobs("") == {"sc.weight": 1.0, "sc.bias": 0.0}
    assert blobs("batch_norm_param { filler { value: 0 } }") == {"sc.weight": 0.0, "sc.bias": 0.0}
    merged = "batch_norm_param { use_weight_bias: true bias_filler { value: 3 } }"
    assert blobs(merged) == {"bn.weight": 1.0, "bn.bias": 3.0, "sc.weight": 1.0, "sc.bias": 0.0}


def test_caffes_own_engine_reads_no_fillers_of_a_norm():
    """With it a Scale after it starts at 1; and the canonical form, which has no engine, says so, too."""
    norm = 'layer { name: "bn" type: "BatchNorm" bottom: "data" top: "data" OWN batch_norm_param { filler { value: 0 } INSIDE } }'
    scale = 'layer { name: "sc" type: "Scale" bottom: "data" top: "last" }'

    def start(own: str = "", inside: str = "", beside: str = "") -> float:
        text = beside + between(norm.replace("OWN", own).replace("INSIDE", inside), scale)
        once, again = net_from(text), net_of(canonical(text), net_texts.IMAGE)
        assert only(once, "sc").blobs == only(again, "sc").blobs
        return only(once, "sc").blobs[0].filler.value

    assert start() == start('engine: "MKLDNN"', beside='engine: "CAFFE" ') == 0
    assert start('engine: "CAFFE"', "engine: MKLDNN") == 0
    assert start('engine: "CAFFE"') == start(inside="engine: CAFFE") == start(beside='engine: "CAFFE" ') == 1


def test_multipliers_of_a_shared_parameter_are_those_of_the_first_layer_that_says_them():
    layer = 'layer {{ name: "{0}" type: "PReLU" bottom: "{1}" top: "{2}" param {{ name: "w" {3} }} }}'

    def text(*said: str) -> str:
        return (
            between(*(layer.format(f"p{i}", f"t{i}", f"t{i + 1}", one) for i, one in enumerate(said)))
            .replace('"t0"', '"data"')
            .replace(f'"t{len(said)}"', '"last"')
        )

    found = net_from(text("", "lr_mult: 2", "lr_mult: 2 decay_mult: 0", ""))
    blobs = [only(found, f"p{i}").blobs[0] for i in range(4)]
    assert {(blob.name, blob.lr_mult, blob.decay_mult) for blob in blobs} == {("p0.weight", 2.0, 0.0)}


def test_numbers_are_single_as_in_caffe():
    found = net_from(between('layer { name: "p" type: "Power" bottom: "data" top: "last" power_param { scale: 0.1 } }'))
    assert only(found, "p").settings == layers.Power(scale=0.10000000149011612)
    assert only(net_from(TODAY), "conv1").blobs[1].lr_mult == 2


# -- the canonical form


NUMBERS = st.floats(-4, 4, width=32)
DRAWN = {
    "Convolution": "convolution_param {{ num_output: 3 kernel_size: 1 pad: 1 weight_filler {{ type: 'gaussian' mean: {x} }} }} param {{ }}",
    "Pooling": "pooling_param {{ pool: AVE kernel_size: 2 }}",
    "Power": "power_param {{ power: {x} scale: {y} shift: {x} }}",
    "PReLU": "",
    "BatchNorm": "batch_norm_param {{ use_global_stats: true }}",
    "Scale": "param {{ decay_mult: {x} }} scale_param {{ filler {{ value: {y} }} }}",
    "Eltwise": 'bottom: "data" eltwise_param {{ operation: PROD }}',
    "LRN": "lrn_param {{ k: 2 }}",
}


@examples(100)
@given(st.sampled_from(list(DRAWN)), NUMBERS, NUMBERS)
def test_a_canonical_form_read_again_is_the_same_net(kind, x, y):
    found = net_from(
        between(f'layer {{ name: "x" type: "{kind}" bottom: "data" top: "last" {DRAWN[kind].format(x=x, y=y)} }}')
    )
    again = net_of(found.text, net_texts.IMAGE)
    assert (again.train, again.test, again.text) == (found.train, found.test, found.text)


def test_the_canonical_form_is_that_of_what_is_computed():
    text = TODAY.replace("\n  ", " ")
    noisy = "# a comment\nname: 'other'\n" + text.replace('top: "conv1" param', 'top: "conv1" # here\n param').replace(
        "kernel_size: 5", "engine: CUDNN, kernel_size: 5; dilation: 1 bias_term: true"
    ).replace('source: "train" batch_size: 4', 'source: "elsewhere" batch_size: 64 backend: LMDB')
    assert canonical(noisy) == canonical(text)
    assert canonical(text.replace("kernel_size: 5", "kernel_size: 3")) != canonical(text)


def test_a_stored_form_without_the_images_size_is_refused():
    with pytest.raises(RecipeError, match="the size of the images is unknown"):
        net_of(canonical(TODAY), None)
