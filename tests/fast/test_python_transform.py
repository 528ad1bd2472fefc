"""`transform_param { python }`: a function of the user's in the loader's threads, keyed by seed and position; its mistakes."""

from typing import Any

import made_images
import numpy as np
import pytest
from facade import Cache, ListRecords, Loader, PythonTransform, Transform, UsageError, pictures
from made_images import raw

from stagerun.language import read

AUGMENT = """import numpy as np
from noise import AMOUNT


def augment(image, rng):
    image[:2] = 0
    if rng.random() < 0.5:
        image = np.concatenate([image, image], 1)
    return np.clip(image + rng.integers(0, AMOUNT, image.shape), 0, 255).astype(np.uint8)
"""

SCHEDULE = """model { name: "resnet_small" num_classes: 4 }
data { train { source: "/x" images: 60 } }
solver { batch_size: 8 device_batch_size: 4 base_lr: 0.1 lr_policy: "fixed" max_iter: 10 transform_param { python: "aug.py:augment" } }
stage { name: "a" solver_param { } }
"""


def records(channels: int = 3, count: int = 40) -> ListRecords:
    rng = np.random.default_rng(1)
    images = rng.integers(0, 200, (count, channels, 12, 14), dtype=np.uint8).transpose(0, 2, 3, 1)
    return ListRecords([raw(image, i % 4) for i, image in enumerate(images)], "/data/toy")


def function(body: str, **more: str) -> PythonTransform:
    """`augment` of aug.py, with more files beside it."""
    files = {f"{name}.py": text for name, text in {"aug": body, **more}.items()}
    return PythonTransform("aug.py:augment", read({"schedule.prototxt": SCHEDULE, **files}, "mine").python)


def loader(source: ListRecords, python: PythonTransform | None, channels: int = 3, **more: Any) -> Loader:
    param = Transform(crop_size=10, mirror=True, python="aug.py:augment")
    settings = {"param": param, "train": True, "shuffle": True, "seed": 3, **more}
    return made_images.loader(source, channels=channels, num_classes=4, python=python, **settings)


def test_an_image_is_the_same_whoever_makes_it():
    source, python = records(), function(AUGMENT, noise="AMOUNT = 30\n")
    whole = loader(source, python).batch(0, 120).images.copy()
    assert not np.array_equal(whole, loader(source, None).batch(0, 120).images)
    memory = pictures.make_memory(source, 3, Cache.MEMORY)
    for more in ({"threads": 3}, {"threads": 2, "memory": memory}, {"threads": 1, "memory": memory}):
        with loader(source, python, **more).stream([(0, 50), (50, 7), (57, 63)]) as stream:
            assert np.array_equal(np.concatenate([batch.images.copy() for batch in stream]), whole), more


def test_what_it_draws_belongs_to_seed_and_position_and_is_frozen():
    body = "def augment(image, rng):\n    image[0, :3, 1], image[0, :3, 0] = divmod(rng.integers(0, 1000, 3), 256)\n    return image\n"
    drawn = []
    for seed, position in ((1, 0), (1, 1), (2, 0), (1, 0)):
        made = loader(records(), function(body), param=Transform(), shuffle=False, seed=seed)
        drawn.append((made.batch(position, 1).images[0, 0, :3, 1:].astype(int) @ [256, 1]).tolist())
    assert drawn == [[689, 372, 154], [907, 703, 484], [319, 846, 326], [689, 372, 154]]


def test_it_is_given_red_first_and_may_write_into_what_it_is_given():
    image = np.zeros((4, 5, 3), np.uint8)
    image[..., 2] = 200  # red, of B, G, R
    body = "    assert image[0, 0].tolist() == [200, 0, 0]\n    image[:] = (1, 2, 3)\n    return image\n"
    seen = function(f"def augment(image, rng):\n{body}")
    assert seen(image, 1, 0, lambda: "")[0, 0].tolist() == [3, 2, 1]
    assert image[0, 0].tolist() == [0, 0, 200]
    grey = function("def augment(image, rng):\n    assert image.shape == (12, 14, 1)\n    return 255 - image\n")
    inverted = loader(records(1), grey, 1, shuffle=False).batch(0, 1).images
    assert np.array_equal(inverted, 255 - loader(records(1), None, 1, shuffle=False).batch(0, 1).images)


@pytest.mark.parametrize(
    ("body", "message", "hint"),
    [
        ("image[:] = 0", "aug.py:1: `augment` returned None, not an image", "`return image`"),
        ("return image / 255", "returned an image of float64, not of uint8", "astype(np.uint8)"),
        ("return image[0]", "returned an array of the shape [14, 3], and not [height, width, 3]", "uint8 array"),
        ("return image.tolist()", "returned a list, not an image", "uint8 array"),
        ("return image[:0]", "the shape [0, 14, 3]", "uint8 array"),
        ("return imag", "aug.py:2: NameError: name 'imag' is not defined\n  return imag", ""),
        ("raise SystemExit(3)", "aug.py:2: SystemExit: 3", ""),
    ],
)
def test_a_mistake_is_one_message_with_line_record_and_position(body, message, hint):
    one = loader(records(), function(f"def augment(image, rng):\n    {body}\n"), shuffle=False)
    with pytest.raises(UsageError) as error:
        one.batch(41, 1)
    assert message in error.value.message and hint in error.value.hint
    assert error.value.message.endswith("for /data/toy: record `00000001` (at position 41)")


def test_an_image_of_the_wrong_size_names_the_function_both_sizes_and_the_record():
    crop = function("def augment(image, rng):\n    return image[:8]\n")
    where = "aug.py:1: `augment` returned an image that can't be used: the image is 8 x 14 pixels (height x width)"
    with pytest.raises(UsageError) as error:
        loader(records(), crop, shuffle=False).batch(41, 1)
    place = "for /data/toy: record `00000001` (at position 41)"
    assert error.value.message == f"{where}, too small for crop_size: 10\n  def augment(image, rng):\n  {place}"
    assert error.value.hint == "return a larger image, or have `random_resize_param` enlarge it"
    with pytest.raises(UsageError, match="too small for crop_size: 10"):
        loader(records(), crop).preflight()
    padded = loader(records(), crop, param=Transform(crop_size=20, pad=2), shuffle=False)
    with pytest.raises(UsageError) as error:
        padded.batch(0, 1)
    assert f"{where}, 12 x 18 pixels once padded, resized and cut, too small for crop_size: 20" in error.value.message


def test_what_draws_elsewhere_is_found_before_training():
    body = "import random\ndef augment(image, rng):\n    image[0, 0] = random.randrange(256)\n    return image\n"
    with pytest.raises(UsageError, match=r"aug.py:2: `augment` gives another image each time") as error:
        loader(records(), function(body)).preflight()
    assert "draw from the generator" in error.value.hint
    loader(records(), function("def augment(image, rng):\n    return image\n")).preflight()
