"""Errors of meaning in what is done to images, and in what the network can do with them. Pure."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from stagerun.base import recipe
from stagerun.base.errors import Problem, Problems, listing
from stagerun.language.check_code import check_args
from stagerun.language.check_weights import check_own_model
from stagerun.language.networks import FILLER_FIELDS, NETWORKS, Network, network_of
from stagerun.language.view import Doubtful, View

# Ways to cut out a rectangle or to resize: a transform has one at most.
GEOMETRIES = ("random_resize_param", "random_aspect_ratio_param", "random_resized_crop_param")
# What needs colours.
COLOURED = ("rand_augment_param", "trivial_augment")
MOST_COMPILED = 4  # sizes of images in training
# What an evaluation can't have, since it sees the same images each time.
DRAWN = ("python", "mirror", "random_aspect_ratio_param", "random_resized_crop_param", "cutout_size", *COLOURED)
# What is done to an image before the device has it, so that its pixels can't be kept there.
NOT_ON_DEVICE = ("python", "mean_file", *GEOMETRIES, *COLOURED)
# Fields of which a transform has one, which of them is shown, and what to do.
EXCLUDES = (
    ("mean_file", "mean_value", 0, "remove one: the image has a mean for each pixel, the other one for each channel"),
    ("random_resize_param", "random_aspect_ratio_param", 0, "remove one; Caffe ignored the second without a word"),
    ("random_resize_param", "random_resized_crop_param", 0, "remove one"),
    ("random_aspect_ratio_param", "random_resized_crop_param", 0, "remove one"),
    ("rand_augment_param", "trivial_augment", 1, "remove one: each is a whole policy"),
)
# Fields that need `crop_size`, and why.
NEED_CROP = {
    "random_aspect_ratio_param": "the rectangle is resized to that",
    "random_resized_crop_param": "the rectangle is resized to that",
    "crop_size_ramp_param": "that is where the ramp ends",
}


def check_transform(view: View, channels: int | None, problems: Problems) -> None:
    """What holds for every transform."""
    for check in CHECKS:
        with suppress(Doubtful):
            check(view, channels, problems)


def _values(view: View, channels: int | None, problems: Problems) -> None:
    for name in ("mean_value", "std_value"):
        count = len(view.numbers(name))
        if channels is not None and count not in (0, 1, channels):
            allowed = "1" if channels == 1 else f"1 or {channels}"
            images = f"the images have {channels} channel{'s' if channels > 1 else ''}"
            problems.add(view.place(name), f"{count} values of `{name}`, and {images}", f"give {allowed}")


def _together(view: View, channels: int | None, problems: Problems) -> None:
    for one, other, shown, hint in EXCLUDES:
        with suppress(Doubtful):
            if view.asks(one) and view.asks(other):
                place = view.place((one, other)[shown])
                problems.add(place, f"`{one}` and `{other}` exclude each other", hint)
    for name, why in NEED_CROP.items():
        with suppress(Doubtful):
            if view.has(name) and not view.has("crop_size"):
                hint = f"write `crop_size: ...` beside it: {why}"
                problems.add(view.place(name), f"`{name}` needs `crop_size`", hint)
    for outer, low, high in (
        ("random_aspect_ratio_param", "min_area_ratio", "max_area_ratio"),
        ("random_resize_param", "min_size", "max_size"),
    ):
        with suppress(Doubtful):
            if inner := view.view(outer):
                _ordered(inner, low, high, problems)


def _mean(view: View, channels: int | None, problems: Problems) -> None:
    """Each pixel keeps the place in its record."""
    if not view.has("mean_file"):
        return
    for name in filter(view.asks, (*GEOMETRIES, "python", "pad", "rectangular")):
        text = f"`mean_file` with `{name}`: a mean image is for pixels at their own place in a record"
        problems.add(view.place(name), text, f"remove `{name}`, or write `mean_value` in place of `mean_file`")


def _ordered(view: View, low_name: str, high_name: str, problems: Problems) -> None:
    low, high = view.scalar(low_name), view.scalar(high_name)
    if isinstance(low, int | float) and isinstance(high, int | float) and low > high:
        place = view.place(high_name if high_name in view.block.entries else low_name)
        problems.add(place, f"`{low_name}` {low} is more than `{high_name}` {high}")


def _ramp(view: View, channels: int | None, problems: Problems) -> None:
    ramp = view.view("crop_size_ramp_param")
    if ramp is None:
        return
    with suppress(Doubtful):
        start, end = ramp.number("start_epoch"), ramp.number("end_epoch")
        if start is not None and end is not None and end <= start:
            message = f"`end_epoch` {end:g} does not come after `start_epoch` {start:g}"
            problems.add(ramp.place("end_epoch"), message, "between them crop_size goes from start_size to its end")
    if view.has("crop_size") and ramp.whole("start_size") == view.whole("crop_size"):
        message = f"`start_size` is `crop_size`, {view.whole('crop_size')}: nothing changes"
        problems.add(ramp.place("start_size"), message, "remove `crop_size_ramp_param`, or start elsewhere")


def check_compiled(stage: View, problems: Problems) -> None:
    """torch makes a network's code for eight shapes, evaluations included, and leaves it uncompiled for others without a word."""
    transform = stage.view("transform_param") if stage.flag("compile") else None
    ramp = transform.view("crop_size_ramp_param") if transform else None
    if transform is None or ramp is None:
        return
    start, end, multiple = ramp.whole("start_size"), transform.whole("crop_size"), ramp.whole("multiple")
    if start is None or end is None or not multiple:
        return
    low, high = sorted((start, end))

    def sizes(multiple: int) -> int:
        """The two ends, and what lies between."""
        return 2 + (high - 1) // multiple - low // multiple

    if sizes(multiple) > MOST_COMPILED:
        message = (
            f"`compile` makes code for each size, and the ramp has up to {sizes(multiple)}: {MOST_COMPILED} at most"
        )
        fitting = next(m for m in itertools.count(multiple, multiple) if sizes(m) <= MOST_COMPILED)
        problems.add(ramp.place("multiple"), message, f"write `multiple: {fitting}`, or leave `compile` out")


def _sides(view: View, channels: int | None, problems: Problems) -> None:
    """Images fit into what a resize leaves, and around the square that is cut out: at the start of a ramp, and at its end."""
    ramp = view.view("crop_size_ramp_param")
    for holder, name in ((ramp, "start_size"), (view, "crop_size")):
        if holder is not None:
            with suppress(Doubtful):
                _fits(holder, name, view, problems)


def _fits(holder: View, name: str, view: View, problems: Problems) -> None:
    side = holder.whole(name)
    if side is None:
        return
    with suppress(Doubtful):
        resize = view.view("random_resize_param")
        low = resize.whole("min_size") if resize else None
        if low is not None and side > low and not view.has("random_aspect_ratio_param"):
            message = f"`{name}` {side} does not fit into an image whose shorter side is {low}"
            problems.add(holder.place(name), message, f"it can be {low}, or `min_size` {side}")
    cutout = view.whole("cutout_size")
    if cutout and cutout > side:
        message = f"`cutout_size` {cutout} is more than `{name}` {side}"
        problems.add(view.place("cutout_size"), message, "the square lies inside the image")


def _padding(view: View, channels: int | None, problems: Problems) -> None:
    if view.text("pad_mode") == "REFLECT" and not view.whole("pad"):
        message = "`pad_mode` without `pad`: there is no padding"
        problems.add(view.place("pad_mode"), message, "write `pad: 4`, or remove it")


def _colours(view: View, channels: int | None, problems: Problems) -> None:
    for name in COLOURED:
        with suppress(Doubtful):
            if channels == 1 and view.asks(name):
                problems.add(view.place(name), f"`{name}` needs colours, and the images have 1 channel", "remove it")


CHECKS: tuple[Callable[[View, int | None, Problems], None], ...] = (
    _values,
    _mean,
    _ramp,
    _sides,
    _padding,
    _colours,
    _together,
)


def check_training(view: View, on_device: bool, problems: Problems) -> None:
    """`on_device`: with `cache: DEVICE`."""
    for name in NOT_ON_DEVICE:
        with suppress(Doubtful):
            if on_device and view.asks(name):
                message = f"`cache: DEVICE` needs a transform that neither resizes nor changes colours: `{name}`"
                problems.add(view.place(name), message, "write `cache: AUTO` under `data`, or remove it here")
    with suppress(Doubtful):
        if view.flag("rectangular"):
            message = "`rectangular` is for an evaluation, not for training"
            problems.add(view.place("rectangular"), message, "write it in `test_transform_param`")


def check_drawn(view: View, problems: Problems) -> None:
    """An evaluation sees the same images each time."""
    hint = "an evaluation sees the same images each time; remove it"
    for name in DRAWN:
        with suppress(Doubtful):
            if view.asks(name):
                problems.add(view.place(name), f"`test_transform_param` draws at random: `{name}`", hint)
    with suppress(Doubtful):
        inner = view.view("random_resize_param")
        if inner and inner.whole("max_size") is not None and inner.whole("max_size") != inner.whole("min_size"):
            message = "`test_transform_param` draws at random: `min_size` and `max_size` differ"
            problems.add(inner.place("max_size"), message, "make them equal, or leave `max_size` out")
    with suppress(Doubtful):
        if view.has("crop_size_ramp_param"):
            message = "`crop_size_ramp_param` is for training, and an evaluation has one size"
            problems.add(view.place("crop_size_ramp_param"), message, "remove it: `crop_size` says which")
    with suppress(Doubtful):
        missing = [name for name in ("crop_size", "random_resize_param") if not view.has(name)]
        if view.flag("rectangular") and missing:
            message = "`rectangular` needs " + " and ".join(f"`{name}`" for name in missing)
            hint = "write `crop_size: 288 random_resize_param { min_size: 328 }`, say: the shorter side of an image, and of its crop"
            problems.add(view.place("rectangular"), message, hint)


# -- settings of Model that mean nothing for its network, and images that the network does not take

_MOST_NAMES = 6


def check_model(schedule: View, stages: Iterable[View], problems: Problems) -> None:
    """`stages` are the settings of each stage, which may have a network of its own."""
    with suppress(Doubtful):
        _check_network(schedule.view("model"), problems)
    for stage in stages:
        with suppress(Doubtful):
            own = stage.view("model")
            _check_network(own, problems)
            model = own or schedule.view("model")
            name = model.text("name") if model else None
            if name:
                check_sizes(f"`{name}`", network_of(name), stage, problems)
        with suppress(Doubtful):
            check_own_model(stage.view("model"), schedule, problems)


# Fields of Model that a net of Caffe's says itself.
_OF_THE_NET = ("name", "zero_gamma", "fc_weight_filler", "fc_bias_filler", "blur_pool", "args")


def _check_net(model: View, problems: Problems) -> None:
    """A `model` with `caffe_net`."""
    norm = model.view("batch_norm_param")
    said = [(model, name) for name in _OF_THE_NET] + [
        (norm, name) for name in ("moving_average_fraction", "eps") if norm
    ]
    for view, name in said:
        with suppress(Doubtful):
            if view is not None and view.has(name):
                hint = "remove it, or `caffe_net`" if name == "name" else "remove it, and write it in the net"
                problems.add(view.block.entries[name].name, f"`{name}` beside `caffe_net`: the net says it", hint)


def _check_network(model: View | None, problems: Problems) -> None:
    if model and model.has("caffe_net"):
        _check_net(model, problems)
        return
    name = model.text("name") if model else None
    if model and name:
        for check in (check_args, _batch_norm, _zero_gamma, _blur_pool, _fillers):
            with suppress(Doubtful):
                check(name, network_of(name), model, problems)


def classes_problem(
    schedule: recipe.Schedule, stage: recipe.Stage, lmdb: str, classes: Sequence[str]
) -> Problem | None:
    """What is wrong with `num_classes` where a stage's images in folder `lmdb` have these `classes`; () where they have no names."""
    number, known = stage.model.num_classes, len(classes)
    if number == known or not known or (number > known and stage.model.spare_classes):
        return None
    names = ", ".join(classes[:_MOST_NAMES]) + ", ..." * (known > _MOST_NAMES)
    hint, what = f"write `num_classes: {known}`", f"`num_classes` is {number}"
    if stage.model.net is not None:
        hint = f"change `num_output` of the net's last layer to {known}"
        what = f"the net has {number} output{'s' * (number > 1)}"
    if number > known:
        hint += "; if outputs without a class are meant, add `spare_classes: true`"
        hint += " to `model`" * (stage.model.net is not None)
    problems = Problems(schedule.files)
    span = stage.written("model.num_classes") or stage.span
    problems.add(span, f"{what}, but {lmdb} has {known} class{'es' * (known > 1)}: {names}", hint)
    return problems.all()[0]


def _batch_norm(name: str, network: Network, model: View, problems: Problems) -> None:
    if network.batch_norm is None and model.has("batch_norm_param"):
        hint = f"remove it, or take `{name}_bn`, which has them" if f"{name}_bn" in NETWORKS else "remove it"
        problems.add(model.place("batch_norm_param"), f"`{name}` has no BatchNorm layers", hint)


def _zero_gamma(name: str, network: Network, model: View, problems: Problems) -> None:
    if not network.zero_gamma and model.text("zero_gamma") != "AS_PUBLISHED":
        hint = "remove it: it is for ResNets, ResNeXts and Wide ResNets"
        problems.add(model.place("zero_gamma"), f"`zero_gamma` means nothing for `{name}`", hint)


def _blur_pool(name: str, network: Network, model: View, problems: Problems) -> None:
    if not network.blur_pool and model.flag("blur_pool"):
        hint = "remove it: it is for torchvision's ResNets, ResNeXts and Wide ResNets, and `resnet50_intel_caffe`"
        problems.add(model.place("blur_pool"), f"`blur_pool` means nothing for `{name}`", hint)


def _fillers(name: str, network: Network, model: View, problems: Problems) -> None:
    for field, there in (("fc_weight_filler", network.fc_weight), ("fc_bias_filler", network.fc_bias)):
        with suppress(Doubtful):
            filler = model.view(field)
            if filler and network.foreign:
                hint = "remove it: the network's own code says how its weights start"
                problems.add(model.place(field), f"`{field}` means nothing for `{name}`", hint)
            elif filler and not network.fc_weight:
                message = f"`{field}`: the last layer of `{name}` is a convolution, not a linear one"
                problems.add(model.place(field), message, "remove it")
            elif filler and not there:
                problems.add(model.place(field), f"`{field}`: the last layer of `{name}` has no biases", "remove it")
            elif filler:
                _filler(filler, problems)


def _filler(filler: View, problems: Problems) -> None:
    """A field that is written and not read would leave weights that no one meant: without `type` they are all the same."""
    kind = filler.text("type") or ""
    read = ("type", *FILLER_FIELDS[kind])
    for field in filler.block.entries:
        if field not in read:
            readers = [f'type: "{k}"' for k, fields in FILLER_FIELDS.items() if field in fields]
            message = f"a filler of type `{kind}` does not read `{field}`"
            problems.add(filler.place(field), message, f"write {listing(readers)}, or remove it")
    if kind == "uniform":
        _ordered(filler, "min", "max", problems)


def check_sizes(
    who: str,
    network: Network,
    stage: View,
    problems: Problems,
    fields: Sequence[str] = ("transform_param", "test_transform_param"),
) -> None:
    """Where a crop says how large the images are that `who`, in words, gets; the others are met in training."""
    with suppress(Doubtful):
        transform = stage.view("transform_param")
        ramp = transform.view("crop_size_ramp_param") if transform else None
        start = ramp.whole("start_size") if ramp else None
        if ramp and start is not None and not network.fits(start, start):
            message = f"{who} takes images of {network.sizes}, not {start} x {start}"
            hint = "remove `crop_size_ramp_param`, or take another network"
            if network.largest is None:
                hint = f"write `start_size: {network.smallest}`, or take another network"
            problems.add(ramp.place("start_size"), message, hint)
    for field in fields:
        with suppress(Doubtful):
            transform = stage.view(field)
            crop = transform.whole("crop_size") if transform else None
            if transform and crop is not None and not network.fits(crop, crop):
                message = f"{who} takes images of {network.sizes}, not {crop} x {crop}"
                hint = f"write `crop_size: {network.smallest}`, or take another network"
                problems.add(transform.place("crop_size"), message, hint)
            elif transform and crop is not None and transform.flag("rectangular") and not network.fits(crop, crop + 8):
                message = f"`rectangular` gives images of many sizes, and {who} takes {network.sizes}"
                problems.add(transform.place("rectangular"), message, "remove it, or take another network")
