"""What the network gets of a batch's bytes: mean, scale, std_value, order of channels, cutout."""

import numpy as np
import pytest
import torch
from engine_help import CPU
from facade import ChannelOrder, Normalise, Transform

from stagerun.engine.images import cut_out, inside, means_at

MEAN, STD = (103.5, 116.25, 123.75), (57.375, 57.12, 58.395)
FORMATS = {True: torch.channels_last, False: torch.contiguous_format}


def pictures(n: int = 5, height: int = 7, width: int = 6, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (n, height, width, channels), dtype=np.uint8)


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("order", ChannelOrder)
@pytest.mark.parametrize("std", [(), (2.5,), STD])
@pytest.mark.parametrize("mean", [(), (99.5,), MEAN])
def test_the_formula(channels_last, dtype, order, std, mean):
    param = Transform(mean_value=mean, scale=0.5, std_value=std, channel_order=order)
    images = pictures()
    before = images.copy()
    x = Normalise(param, 3, CPU, dtype, channels_last)(images)
    pixels = images.astype(np.float64)
    if order is ChannelOrder.RGB:
        pixels = pixels[..., ::-1]
    expected = (pixels - np.array(mean or (0.0,))) * 0.5 / np.array(std or (1.0,))
    assert x.dtype == dtype and x.is_contiguous(memory_format=FORMATS[channels_last])
    tolerance = 1e-4 if dtype == torch.float32 else 1e-12
    np.testing.assert_allclose(x.numpy(), expected.transpose(0, 3, 1, 2), rtol=0, atol=tolerance)
    assert np.array_equal(images, before), "the loader's memory is left alone"


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("mean", [(), (104.0,), MEAN])
@pytest.mark.parametrize("scale", [1.0, 0.017])
def test_without_std_value_the_bits_are_those_of_the_plain_formula(channels_last, mean, scale):
    """Each step in 32 bits, one rounding after the other: what snapshots were trained with."""
    images = pictures()
    x = Normalise(Transform(mean_value=mean, scale=scale), 3, CPU, torch.float32, channels_last)(images)
    expected = images.astype(np.float32) - np.array(mean or (0.0,), np.float32)
    expected = expected * np.float32(scale)
    assert (x.numpy() == expected.transpose(0, 3, 1, 2)).all()
    ones = Transform(mean_value=mean, scale=scale, std_value=(1.0, 1.0, 1.0))
    assert torch.equal(Normalise(ones, 3, CPU, torch.float32, channels_last)(images), x)


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("tensors", [False, True])
def test_cutout_is_zero_for_the_network_and_the_rest_is_untouched(channels_last, tensors):
    normalise = Normalise(Transform(mean_value=MEAN, cutout_size=3), 3, CPU, torch.float32, channels_last)
    images = pictures()
    cutout = np.array([[0, 0, 3, 3], [4, 3, 3, 3], [2, 1, 3, 3], [0, 0, 7, 6], [1, 1, 0, 3]], np.int32)
    x = normalise(images, torch.from_numpy(cutout) if tensors else cutout)
    expected = normalise(images)
    for image, (top, left, height, width) in zip(expected, cutout.tolist(), strict=True):
        image[:, top : top + height, left : left + width] = 0
    assert torch.equal(x, expected) and bool((x[3] == 0).all()) and bool((x[4] != 0).any())


def test_a_gpus_mask_is_what_a_cpu_cuts_out():
    rng = np.random.default_rng(3)
    cutout = np.stack([rng.integers(0, 8, 40), rng.integers(0, 5, 40), rng.integers(0, 4, 40), np.full(40, 2)], 1)
    masked = torch.ones(40, 3, 11, 7).masked_fill_(inside(torch.from_numpy(cutout), 11, 7), 0)
    assert torch.equal(cut_out(torch.ones(40, 3, 11, 7), cutout), masked)


def test_a_gpus_means_are_what_a_cpu_takes_off():
    rng = np.random.default_rng(3)
    mean = rng.uniform(0, 255, (11, 13, 3)).astype(np.float32)
    crop = np.stack([rng.integers(0, 6, 20), rng.integers(0, 8, 20), rng.integers(0, 2, 20)], 1)
    normalise = Normalise(Transform(mean_file="m"), 3, CPU, torch.float32, True, mean)
    taken = normalise(np.zeros((20, 6, 6, 3), np.uint8), crop=crop.astype(np.int32)).permute(0, 2, 3, 1)
    assert torch.equal(means_at(torch.from_numpy(mean), torch.from_numpy(crop), 6, 6), -taken)
