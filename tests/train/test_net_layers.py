"""Each layer of Caffe's, forward and backward in double, against its formula."""

import math

import caffe_layers as caffe
import numpy as np
import pytest
import torch
from drawn import examples
from facade import FUNCTIONS, layers, losses, map_layers
from hypothesis import given
from hypothesis import strategies as st
from net_texts import between, net_from, only

SEEDS = st.integers(0, 2**32 - 1)


def compare(settings, formula, bottoms, blobs=(), seed=0, channels_last=False) -> None:
    """1e-12 of the largest number, of the top and of every gradient."""
    ours, theirs = ([torch.tensor(b, requires_grad=True) for b in (*bottoms, *blobs)] for _ in "ab")
    n = len(bottoms)
    given = [b.to(memory_format=torch.channels_last) if channels_last and b.ndim == 4 else b for b in ours[:n]]
    top = FUNCTIONS[type(settings)](settings, *given, *ours[n:])
    wanted = formula(settings, theirs[:n], theirs[n:])
    g = torch.tensor(np.random.default_rng(seed).standard_normal(tuple(wanted.shape)))
    top.backward(g)
    wanted.backward(g)
    for got, want in zip((top, *(t.grad for t in ours)), (wanted, *(t.grad for t in theirs)), strict=True):
        assert got.shape == want.shape and (got - want).abs().max() <= 1e-12 * max(1.0, want.abs().max())


@st.composite
def windows(draw, largest_pad=None):
    """(size of the map, kernel, stride, pad) along one axis, with at least one window."""
    kernel = draw(st.integers(1, 4))
    pad = draw(st.integers(0, kernel // 2 if largest_pad is None else largest_pad))
    return draw(st.integers(max(1, kernel - 2 * pad), 7)), kernel, draw(st.integers(1, 4)), pad


@examples(60)
@given(st.data(), SEEDS, st.booleans(), st.booleans())
def test_convolution_and_deconvolution(data, seed, transposed, has_bias):
    rng = np.random.default_rng(seed)
    rows, columns = (data.draw(windows(largest_pad=2)) for _ in "hw")
    group, per_in, per_out = (data.draw(st.integers(1, 3)) for _ in range(3))
    dilation = tuple(
        d if d * (k - 1) < n + 2 * p and not transposed else 1
        for (n, k, _, p), d in zip((rows, columns), data.draw(st.tuples(*[st.integers(1, 2)] * 2)), strict=True)
    )
    if transposed and any(s * (n - 1) + k - 2 * p < 1 for n, k, s, p in (rows, columns)):
        return
    settings = map_layers.Convolution(
        kernel=(rows[1], columns[1]), stride=(rows[2], columns[2]), pad=(rows[3], columns[3]),
        dilation=dilation, group=group, transposed=transposed,
    )  # fmt: skip
    inputs, outputs = group * per_in, group * per_out
    shape = (inputs, per_out) if transposed else (outputs, per_in)
    blobs = [rng.standard_normal((*shape, *settings.kernel))] + [rng.standard_normal(outputs)] * has_bias
    compare(settings, caffe.convolution, [rng.standard_normal((2, inputs, rows[0], columns[0]))], blobs, seed)


@examples(30)
@given(SEEDS, st.integers(1, 2), st.booleans(), st.booleans())
def test_inner_product(seed, axis, transpose, has_bias):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((2, 3, 2, 4))
    weight = rng.standard_normal((5, math.prod(x.shape[axis:])))
    blobs = [weight.T.copy() if transpose else weight] + [rng.standard_normal(5)] * has_bias
    compare(layers.InnerProduct(axis=axis, transpose=transpose), caffe.inner_product, [x], blobs, seed)


@examples(150)
@given(windows(), windows(), st.sampled_from(("MAX", "AVE")), st.booleans(), st.booleans(), SEEDS)
def test_pooling(rows, columns, method, ceil, channels_last, seed):
    """Few numbers, so that many are equal; AVE divides by the window with its padding, but not beyond."""
    padded = rows[3] > 0 or columns[3] > 0
    for size, kernel, stride, pad in (rows, columns):
        if (caffe.pooled(size, kernel, stride, pad, ceil, padded) - 1) * stride >= size + pad:
            return  # a window beyond the map, of which Caffe makes -FLT_MAX; such a net is refused
    x = np.random.default_rng(seed).integers(0, 3, (2, 3, rows[0], columns[0])).astype(float)
    settings = map_layers.Pooling(
        method=method, kernel=(rows[1], columns[1]), stride=(rows[2], columns[2]), pad=(rows[3], columns[3]), ceil=ceil
    )
    for side, one in enumerate((rows, columns)):
        assert settings.windows(side, one[0]) == caffe.pooled(*one, ceil, padded)
    compare(settings, caffe.pooling, [x], (), seed, channels_last)


@examples(60)
@given(
    SEEDS, st.sampled_from([1, 3, 5, 7]), st.integers(1, 6), st.booleans(), st.sampled_from([0.5, 0.75]), st.booleans()
)
def test_lrn(seed, size, channels, within, beta, channels_last):
    x = 3 * np.random.default_rng(seed).standard_normal((2, channels, 4, 3))
    settings = layers.LRN(local_size=size, alpha=0.3, beta=beta, k=1.0 if within else 2.0, within=within)
    compare(settings, caffe.lrn, [x], (), seed, channels_last)


@examples(40)
@given(
    SEEDS,
    st.sampled_from([(0, 1), (0, 2), (0, 4), (1, 1), (1, 2), (1, 3), (2, 1), (1, 0)]),
    st.booleans(),
    st.booleans(),
)
def test_scale_and_bias(seed, axes, has_bias, two):
    rng = np.random.default_rng(seed)
    axis, count = axes
    x = rng.standard_normal((2, 3, 4, 2))
    values = [rng.standard_normal(x.shape[axis : axis + count]) for _ in "wb"]
    bottoms, blobs = ([x, values[0]], []) if two else ([x], [values[0]])
    compare(layers.Scale(axis=axis), caffe.scale, bottoms, blobs + [values[1]] * has_bias, seed)
    compare(layers.Bias(axis=axis), caffe.bias, bottoms, blobs, seed)


POINTWISE = [
    (layers.ReLU(), caffe.relu),
    (layers.ReLU(negative_slope=0.1), caffe.relu),
    (layers.ELU(alpha=0.7), caffe.elu),
    (layers.Sigmoid(), caffe.sigmoid),
    (layers.TanH(), caffe.tanh),
    (layers.Softmax(), caffe.softmax),
    (layers.Softmax(axis=2), caffe.softmax),
    (layers.Power(power=2, scale=0.5, shift=1), caffe.power),
    (layers.Power(power=3, shift=0.25), caffe.power),
    (layers.Power(power=-1, scale=-2, shift=0.25), caffe.power),
    (layers.Power(scale=3, shift=-1), caffe.power),
    (layers.Power(power=0), caffe.power),
    (layers.Power(power=3, scale=0, shift=2), caffe.power),
]


@pytest.mark.parametrize(("settings", "formula"), POINTWISE, ids=[str(settings) for settings, _ in POINTWISE])
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (4, 3, 2)])
def test_of_each_number(settings, formula, shape):
    """Zeros too, where the slope jumps; but not where Caffe's gradient of Power divides by zero."""
    x = np.random.default_rng(1).standard_normal(shape)
    if not isinstance(settings, layers.Power):
        x.ravel()[:4] = 0
    compare(settings, formula, [x])


@pytest.mark.parametrize(
    ("settings", "formula", "bottoms", "blobs"),
    [
        *((map_layers.Pooling(method=m, kernel=None), caffe.pooling, [(2, 3, 4, 5)], []) for m in ("MAX", "AVE")),
        *((layers.PReLU(), caffe.prelu, [shape], [blob]) for shape in ((2, 3, 4, 5), (4, 3)) for blob in ((), (3,))),
        (map_layers.Concat(axis=1), caffe.concat, [(5, 1, 5, 5), (5, 3, 5, 5), (5, 2, 5, 5)], []),
        (map_layers.Concat(axis=3), caffe.concat, [(5, 5, 5, 1), (5, 5, 5, 3)], []),
    ],
)
@pytest.mark.parametrize("channels_last", [False, True])
def test_of_whole_maps_and_channels(settings, formula, bottoms, blobs, channels_last):
    """Of few numbers, so that many are equal or 0."""
    rng = np.random.default_rng(1)
    maps = [rng.integers(0, 3, shape) - 1.0 for shape in bottoms]
    compare(settings, formula, maps, [np.array(rng.standard_normal(shape)) for shape in blobs], 1, channels_last)


@examples(40)
@given(SEEDS, st.sampled_from(("PROD", "SUM", "MAX")), st.integers(2, 4), st.booleans())
def test_eltwise(seed, operation, count, weighted):
    """It counts which of equal numbers Caffe takes for the largest."""
    rng = np.random.default_rng(seed)
    coeff = tuple(rng.standard_normal(count)) if weighted and operation == "SUM" else ()
    bottoms = [rng.integers(-2, 3, (2, 3, 2)).astype(float) for _ in range(count)]
    compare(map_layers.Eltwise(operation=operation, coeff=coeff), caffe.eltwise, bottoms, (), seed)


SLICED = between("""
layer { name: "cut" type: "Slice" bottom: "data" %s slice_param { axis: %d %s } }
layer { name: "last" type: "Concat" %s top: "last" concat_param { axis: %d } }
""")


@examples(40)
@given(SEEDS, st.sampled_from([1, 2, 3, -1, -2, -3]), st.integers(1, 4), st.booleans(), st.booleans())
def test_slice_along_any_axis_of_an_image(seed, axis, tops, evenly, channels_last):
    """As it is written, and put together again, forward and backward; also for images of another size than the net was read for."""
    rng = np.random.default_rng(seed)
    points = sorted(rng.choice(np.arange(1, 12), tops - 1, replace=False)) if not evenly else []
    names = [f"part{i}" for i in range(tops)]
    said = [" ".join(f'{what}: "{name}"' for name in names) for what in ("top", "bottom")]
    text = SLICED % (said[0], axis, " ".join(f"slice_point: {n}" for n in points), said[1], axis)
    made = net_from(text, (12, 12, 12))
    cut, joined = only(made, "cut"), only(made, "last")
    assert cut.settings.axis == joined.settings.axis == axis % 4 and joined.shapes == ((12, 12, 12),)
    for size in (12, 24):
        values = rng.standard_normal((2, size, size, size))
        x = torch.tensor(values, requires_grad=True)
        given = x.to(memory_format=torch.channels_last) if channels_last else x
        parts = FUNCTIONS[map_layers.Slice](cut.settings, given)
        for part, shape, wanted in zip(parts, cut.shapes, caffe.slice_(cut.settings, values, tops), strict=True):
            assert np.array_equal(part.detach().numpy(), wanted)
            assert size != 12 or tuple(part.shape[1:]) == shape
        whole = FUNCTIONS[map_layers.Concat](joined.settings, *parts)
        gradient = rng.standard_normal(values.shape)
        whole.backward(torch.tensor(gradient))
        assert np.array_equal(whole.detach().numpy(), values) and np.array_equal(x.grad.numpy(), gradient)


@examples(60)
@given(
    SEEDS,
    st.sampled_from([None, 0, 2, 255]),
    st.sampled_from(("FULL", "VALID", "BATCH_SIZE", "PRE_FIXED", "NONE")),
    st.sampled_from([0.5, 3.0]),
    st.floats(0.1, 2),
)
def test_softmax_with_loss(seed, ignored, normalization, fixed, weight):
    rng = np.random.default_rng(seed)
    logits, labels = 4 * rng.standard_normal((5, 3)), rng.integers(0, 3, 5)
    if ignored is not None:
        labels[rng.random(5) < 0.5] = ignored
    settings = layers.SoftmaxWithLoss(
        loss_weight=weight, ignore_label=ignored, normalization=normalization, pre_fixed_normalizer=fixed
    )
    wanted, gradient = caffe.softmax_loss(settings, logits, labels)
    z = torch.tensor(logits, requires_grad=True)
    loss = losses.OfNet((settings,))(z, torch.tensor(labels), None, z)
    loss.backward()
    assert loss.item() == pytest.approx(wanted, rel=1e-12, abs=1e-13)
    np.testing.assert_allclose(z.grad.numpy(), gradient, atol=1e-12)


def test_dropout_keeps_the_mean():
    settings = layers.Dropout(ratio=0.25)
    torch.manual_seed(1)
    found = FUNCTIONS[layers.Dropout](settings, torch.ones(100_000))
    kept = found[found != 0]
    assert len(kept) / 100_000 == pytest.approx(0.75, abs=0.01)
    assert (kept == torch.tensor(1 / 0.75)).all()


@pytest.mark.parametrize(
    "layer",
    [
        'type: "Flatten"',
        'type: "Flatten" flatten_param { axis: 2 end_axis: -1 }',
        'type: "Flatten" flatten_param { end_axis: 2 }',
        'type: "Reshape" reshape_param { shape { dim: 0 dim: 0 dim: 0 dim: 0 } }',
        'type: "Reshape" reshape_param { shape { dim: 0 dim: -1 dim: 2 } }',
        'type: "Reshape" reshape_param { shape { dim: 3 dim: 2 } axis: 1 num_axes: 1 }',
        'type: "Reshape" reshape_param { shape { dim: 1 } axis: -3 num_axes: 0 }',
        'type: "Reshape" reshape_param { shape { dim: -1 dim: 384 } }',  # the first is that of the images
    ],
)
def test_a_shape_follows_the_size_of_the_images(layer):
    """A net is built for one size, and another crop, as of a teacher or an evaluation, runs through it."""
    text = between(f'layer {{ name: "x" bottom: "data" top: "last" {layer} }}')
    made = only(net_from(text, (6, 8, 8)), "x")
    for dims in ((6, 8, 8), (6, 4, 16 if "384" in layer else 10)):
        images = torch.arange(2.0 * math.prod(dims)).reshape(2, *dims)
        top = FUNCTIONS[type(made.settings)](made.settings, images)
        assert tuple(top.shape) == (2, *only(net_from(text, dims), "x").shapes[0])
        assert torch.equal(top.flatten(), images.flatten())
