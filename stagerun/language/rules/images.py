"""Rules about sets of images, images with several labels, and the transforms of training and evaluations. Pure."""

import itertools

from stagerun.language.rules.rule import Found, Message, Rule, excludes, needs, ordered, says, wrong
from stagerun.language.tree import View

# Fields that crop a rectangle or resize: a transform has one at most.
GEOMETRIES = ("random_resize_param", "random_aspect_ratio_param", "random_resized_crop_param")
COLOURED = ("rand_augment_param", "trivial_augment")  # need colours
MOST_COMPILED = 4  # sizes of images in training
# Not for an evaluation, which sees the same images each time.
DRAWN = ("python", "mirror", "random_aspect_ratio_param", "random_resized_crop_param", "cutout_size", *COLOURED)
# Done before the device gets an image, so that its pixels can't be cached on the device.
NOT_ON_DEVICE = ("python", "mean_file", *GEOMETRIES, *COLOURED)


def _channels(m: Message) -> Found:
    channels = m.schedule.model.channels
    for name in ("mean_value", "std_value"):
        if (number := len(getattr(m, name))) not in (0, 1, channels):
            text = f"{number} values of `{name}`, and the images have `channels: {channels}`"
            yield m.place(name), text, "give 1" if channels == 1 else f"give 1 or {channels}"


def _compiled(m: Message) -> Found:
    """Find ramps with too many sizes: torch compiles a network for eight shapes, evaluations included, and silently not for others."""
    ramp = m.transform_param.crop_size_ramp_param
    low, high = sorted((ramp.start_size, m.transform_param.crop_size))

    def sizes(multiple: int) -> int:
        """Count the sizes: the two ends, and the multiples between."""
        return 2 + (high - 1) // multiple - low // multiple

    if m.compile and sizes(ramp.multiple) > MOST_COMPILED:
        text = f"`compile` makes code for each size, and the ramp has up to {sizes(ramp.multiple)}: {MOST_COMPILED} at most"
        fitting = next(n for n in itertools.count(ramp.multiple, ramp.multiple) if sizes(n) <= MOST_COMPILED)
        yield ramp.place("multiple"), text, f"write `multiple: {fitting}`, or leave `compile` out"


def _rectangular(m: Message) -> Found:
    missing = [f"`{name}`" for name in ("crop_size", "random_resize_param") if name not in m.test_transform_param]
    if m.test_transform_param.rectangular and missing:
        hint = "for example, write `crop_size: 288 random_resize_param { min_size: 328 }`: the shorter sides of the crop and of the image"
        yield m.place("test_transform_param.rectangular"), f"`rectangular` needs {' and '.join(missing)}", hint


def _fits(m: Message, side: int) -> bool:
    """Return whether a crop with that side fits into the resized image."""
    return "random_aspect_ratio_param" in m or side <= m.random_resize_param.min_size


# -- sets of images


def sources(data: View) -> list[View]:
    train = data.view("train")
    return [*([train] if train is not None else []), *data.views("val")]


def _val_names(m: Message) -> Found:
    """Find validation sets without a name, or with the same name."""
    seen: dict[str, int] = {}
    for val in m.val:
        if "name" not in val:
            if len(m.val) > 1:
                text = f"one of {len(m.val)} validation sets has no `name`"
                yield val.view.block.place, text, 'for example, write `name: "v2"`'
        elif val.name in seen:
            hint = f"the other one is in line {seen[val.name]}"
            yield val.place("name"), f"two validation sets are named `{val.name}`", hint
        else:
            seen[val.name] = val.place("name").line


def _labelled(m: Message) -> bool:
    """Return whether images have several labels."""
    holders = (m.schedule.view.inside("data"), m.settings.view.inside("data"))
    return any(source.has("labels") for data in holders for source in sources(data))


def _loss(m: Message) -> Found:
    kind, where = ("SOFTMAX", m.view.block.place) if "loss" not in m else (m.loss.type, m.place("loss.type"))
    if kind not in ("BINARY", "PYTHON") and _labelled(m):
        text = f"stage `{m.stage}`: images have several `labels`, and loss `{kind}` takes one"
        yield where, text, "write `loss { type: BINARY }`"


def _ensemble(m: Message) -> Found:
    if _labelled(m):
        text = "an ensemble of networks for several labels is not supported"
        yield m.view.block.place, text, "remove it; `predict` gives the probabilities of each member"


_ONE_TRAIN = "`name` is for one of several validation sets"
_RESIZED = "write `crop_size: ...` next to it: the rectangle is resized to that"
_RAMP_END = "write `crop_size: ...` next to it: the ramp ends at that size"
_EACH_CHANNEL = "remove one: the image has a mean for each pixel, the other one for each channel"
_MEAN = "the pixels of a mean image must match the pixels of a record"
_STEADY = "an evaluation sees the same images each time; remove it"
_SHORTER = "does not fit into an image whose shorter side is {random_resize_param.min_size}"
_FITTING = "it can be {random_resize_param.min_size}, or `min_size`"
_SQUARE = "the square must fit into the image"
RULES = (
    *(
        wrong(
            f"TransformParameter.{name}", f"`{name}` needs colours, and the images have 1 channel", "remove it",
            lambda m: m.schedule.model.channels == 1,
        )
        for name in COLOURED
    ),
    excludes("TransformParameter.mean_file", "mean_value", "", _EACH_CHANNEL),
    excludes(
        "TransformParameter.random_resize_param", "random_aspect_ratio_param", "",
        "remove one; Caffe silently ignored the second",
    ),
    excludes("TransformParameter.random_resize_param", "random_resized_crop_param", "", "remove one"),
    excludes("TransformParameter.random_aspect_ratio_param", "random_resized_crop_param", "", "remove one"),
    excludes("TransformParameter.trivial_augment", "rand_augment_param", "", "remove one: each is a whole policy"),
    *(
        excludes(
            f"TransformParameter.{name}", "mean_file", _MEAN,
            f"remove `{name}`, or write `mean_value` instead of `mean_file`",
        )
        for name in (*GEOMETRIES, "python", "pad", "rectangular")
    ),
    needs("TransformParameter.random_aspect_ratio_param", "crop_size", "", _RESIZED),
    needs("TransformParameter.random_resized_crop_param", "crop_size", "", _RESIZED),
    needs("TransformParameter.crop_size_ramp_param", "crop_size", "", _RAMP_END),
    needs("TransformParameter.pad_mode: REFLECT", "pad", "nothing is padded", "write `pad: 4`, or remove it"),
    *ordered("RandomAspectRatioParameter", "min_area_ratio", "max_area_ratio"),
    *ordered("RandomResizeParameter", "min_size", "max_size"),
    Rule("TransformParameter", _channels),
    wrong(
        "CropSizeRampParameter.end_epoch", "`end_epoch` {end_epoch} does not come after `start_epoch` {start_epoch}",
        "between them the size goes from start_size to crop_size", lambda m: m.end_epoch <= m.start_epoch,
    ),
    wrong(
        "TransformParameter.crop_size_ramp_param.start_size",
        "`start_size` is `crop_size`, {crop_size}: nothing changes",
        "remove `crop_size_ramp_param`, or change one", lambda m: m.crop_size_ramp_param.start_size == m.crop_size,
    ),
    wrong(
        "TransformParameter.crop_size", "`crop_size` {crop_size} " + _SHORTER, _FITTING + " {crop_size}",
        lambda m: not _fits(m, m.crop_size),
    ),
    wrong(
        "TransformParameter.crop_size_ramp_param.start_size",
        "`start_size` {crop_size_ramp_param.start_size} " + _SHORTER,
        _FITTING + " {crop_size_ramp_param.start_size}", lambda m: not _fits(m, m.crop_size_ramp_param.start_size),
    ),
    wrong(
        "TransformParameter.cutout_size", "`cutout_size` {cutout_size} is more than `crop_size` {crop_size}", _SQUARE,
        lambda m: m.cutout_size > m.crop_size,
    ),
    wrong(
        "TransformParameter.cutout_size",
        "`cutout_size` {cutout_size} is more than `start_size` {crop_size_ramp_param.start_size}",
        _SQUARE, lambda m: m.cutout_size > m.crop_size_ramp_param.start_size,
    ),
    Rule("Solver.compile", _compiled),
    wrong(
        "Solver.compile", "`compile` with `determinism: PORTABLE`: it makes code for this processor", "take ELASTIC",
        lambda m: m.schedule.determinism == "PORTABLE",
    ),
    *(
        wrong(
            f"Solver.transform_param.{name}",
            f"`cache: DEVICE` needs a transform that neither resizes nor changes colours: `{name}`",
            "write `cache: AUTO` under `data`, or remove it here", lambda m: says(m.schedule, "data.cache: DEVICE"),
        )
        for name in NOT_ON_DEVICE
    ),
    wrong(
        "Solver.transform_param.rectangular", "`rectangular` is for an evaluation, not for training",
        "write it in `test_transform_param`",
    ),
    *(
        wrong(f"Solver.test_transform_param.{name}", f"`test_transform_param` draws at random: `{name}`", _STEADY)
        for name in DRAWN
    ),
    wrong(
        "Solver.test_transform_param.random_resize_param.max_size",
        "`test_transform_param` draws at random: `min_size` and `max_size` differ",
        "make them equal, or leave `max_size` out",
        lambda m: m.test_transform_param.random_resize_param.max_size != m.test_transform_param.random_resize_param.min_size,
    ),
    wrong(
        "Solver.test_transform_param.crop_size_ramp_param",
        "`crop_size_ramp_param` is for training, and an evaluation has one size",
        "remove it: `crop_size` is the size",
    ),
    Rule("Solver.test_transform_param", _rectangular),
    wrong("Data.train.name", _ONE_TRAIN, "remove it"),
    wrong("StageData.train.name", _ONE_TRAIN, "remove it"),
    Rule("Data.val", _val_names),
    Rule("StageData.val", _val_names),
    wrong(
        "EarlyStopParameter.metric: MAP", "`metric: MAP` is for images with several `labels`", "write `metric: TOP1`",
        lambda m: not _labelled(m),
    ),
    Rule("Solver", _loss),
    wrong(
        "Solver.sampling", "stage `{stage}`: images have several `labels`, and `sampling` uses one", "remove it",
        lambda m: m.sampling != "UNIFORM" and _labelled(m),
    ),
    Rule("Ensemble", _ensemble),
)  # fmt: skip
