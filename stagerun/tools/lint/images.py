"""Rules about the numbers that images become, and their sizes (`transform_param`). Some read the side files of LMDBs that are here."""

from collections.abc import Sequence
from contextlib import suppress

from stagerun.base.errors import Level, Span
from stagerun.base.recipe import ChannelOrder, Transform
from stagerun.base.text import apart
from stagerun.base.weights import Kind
from stagerun.base.weights import place_of as weights_of
from stagerun.language.rules.rule import Found, Rule
from stagerun.plan.described import short
from stagerun.system.image_sets import known as side_file
from stagerun.tools.lint.looked import Looked, warning

IMAGENET = (103.53, 116.28, 123.675)  # mean of its pixels: B, G, R


def _place(it: Looked, *names: str) -> Span:
    """Where the first of these fields of transform_param is written, or else the first of all."""
    written = (o.span for key, o in it.stage.origins.items() if key.startswith("solver.transform_param.") and o.span)
    named = it.stage.written(*(f"solver.transform_param.{name}" for name in names))
    return named or min(written, default=it.stage.span)


# The fields that turn pixels into the network's numbers.
_NUMBERS = ("channel_order", "mean_value", "std_value", "scale", "mean_file")


def other_numbers(it: Looked) -> Found:
    """A network that is given other numbers for the same pixel than in its evaluation, or else in its parent: mostly since
    one of two `transform_param` sets a value of its own. What changes inputs by less than 1 % is no difference."""
    own, channels = it.solver.transform, it.stage.model.channels
    others = [("an evaluation", it.solver.test_transform)] if it.stage.data.val else []
    if it.parent is not None and it.parent.stage.model.channels == channels:
        others.append((it.parent.name, it.parent.solver.transform))
    for who, other in others:
        if not _same_numbers(own, other, channels):
            pairs = ((name, _number(other, name), _number(own, name)) for name in _NUMBERS)
            shown = [(name, *apart((seen, trained), 6, short)) for name, seen, trained in pairs if seen != trained]
            said = "; ".join(f"{who} has {name} {seen}, training {trained}" for name, seen, trained in shown)
            hint = "write the same values in both, or once in the `solver` of schedule.prototxt"
            yield _place(it), f"{it.name}: {said}", hint
            return


def _same_numbers(a: Transform, b: Transform, channels: int) -> bool:
    pairs = zip(input_ranges(a, channels), input_ranges(b, channels), strict=True)
    near = all(abs(x - y) <= 0.01 * abs(p[1] - p[0]) for p, q in pairs for x, y in zip(p, q, strict=True))
    return near and a.mean_file == b.mean_file and (channels == 1 or a.channel_order == b.channel_order)


def input_ranges(transform: Transform, channels: int) -> list[tuple[float, float]]:
    """What the pixels 0 and 255 of each channel become."""
    mean, std = ((v * channels)[:channels] for v in (transform.mean_value or (0.0,), transform.std_value or (1.0,)))
    factors = [transform.scale / s for s in std]
    return [((0 - m) * factor, (255 - m) * factor) for m, factor in zip(mean, factors, strict=True)]


def _number(transform: Transform, name: str) -> object:
    """The transform's value; of what is given by channel the numbers of all, or the one that all have."""
    value, default = getattr(transform, name), {"mean_value": 0.0, "std_value": 1.0}.get(name)
    if default is None:
        return value
    values = value or (default,)
    return values[:1] if len(set(values)) == 1 else values


def odd_range(it: Looked) -> Found:
    """Pixels are 0 to 255: inputs that aren't scaled at all, or are by values for pixels of 0 to 1, or twice."""
    transform = it.solver.transform
    ranges = input_ranges(transform, it.stage.model.channels)
    span, mean = max(abs(b - a) for a, b in ranges), transform.mean_value
    small = any(mean) and all(0 <= value <= 1 for value in mean)
    raw = span == 255 and not any(mean) and transform.mean_file is None
    if small or raw or span > 255 or span < 0.1:
        name, values = ("mean_value", mean) if small else ("std_value", transform.std_value)
        hint = "write `mean_value` and `std_value` of pixels of 0 to 255; `stagerun data info LMDB` shows them"
        if values and (small or span > 255):
            hint = f"it was written for pixels of 0 to 1: `{name}: [{', '.join(f'{255 * v:.6g}' for v in values)}]`"
        low, high = min(map(min, ranges)), max(map(max, ranges))
        text = f"pixels of 0 to 255 become inputs of {low:.4g} to {high:.4g} in {it.name}"
        yield _place(it, name, "scale"), text, hint


def channel_order(it: Looked) -> Found:
    """Weights of torchvision's or timm's, which are for R, G, B, or ImageNet's mean, in the other order."""
    solver, transform = it.solver, it.solver.transform
    rgb, mean = transform.channel_order is ChannelOrder.RGB, transform.mean_value
    file = solver.weights.file if solver.weights is not None else ""
    published = bool(file) and weights_of(file).kind in (Kind.TORCHVISION, Kind.TIMM)
    usual = IMAGENET if rgb else IMAGENET[::-1]
    if published and not rgb and it.stage.model.channels == 3:
        text = f"{it.name} gives `{file}` B, G, R; it was trained on R, G, B"
    elif len(mean) == 3 and all(abs(a - b) < 2 for a, b in zip(mean, usual, strict=True)):
        order = "R, G, B" if rgb else "B, G, R"
        text = f"`mean_value` of {it.name} is ImageNet's in the other order: its channels are {order}"
    else:
        return
    hint = "write `channel_order: RGB`, and mean and deviation in that order"
    if rgb:
        hint = "write `mean_value` the other way round"
    yield _place(it, "channel_order", "mean_value"), text, hint


def _pixel_statistics(folder: str) -> list[tuple[float, float]]:
    """Mean and standard deviation of all pixels by channel (B, G, R), as the side file has them; empty where they aren't known."""
    facts, _ = side_file(folder)
    with suppress(KeyError, TypeError, ValueError):
        return [(float(m), float(d)) for m, d in zip(facts["mean_bgr"], facts["deviation_bgr"], strict=True)]
    return []


def far_mean(stages: Sequence[Looked]) -> Found:
    """A mean that is more than a standard deviation off that of all pixels. Weights from elsewhere have their own."""
    sets = {it.train.path: it.train for it in stages}
    known = {path: _pixel_statistics(stages[0].schedule.lmdb(source)) for path, source in sets.items()}
    for it in stages:
        transform, own = it.solver.transform, known[it.train.path]
        own = own[::-1] if transform.channel_order is ChannelOrder.RGB else own
        values = transform.mean_value * (len(own) if len(transform.mean_value) == 1 else 1)
        if it.solver.weights is not None or len(own) != len(values):
            continue
        if any(abs(value - mean) > deviation for value, (mean, deviation) in zip(values, own, strict=True)):
            right = ", ".join(f"{mean:.1f}" for mean, _ in own)
            text = f"`mean_value` of {it.name} is far from the mean of its images, [{right}]"
            yield _place(it, "mean_value"), text, f"write `mean_value: [{right}]`"


def _resizes(transform: Transform) -> bool:
    return bool(transform.random_resize or transform.random_aspect_ratio or transform.random_resized_crop)


def other_sizes(it: Looked) -> Found:
    """Things are larger or smaller in an evaluation than in training: one of the two resizes images and the other doesn't, or an
    evaluation has fewer pixels. Images whose stored size fits are no matter, as far as it is known."""
    train, test = it.solver.transform, it.solver.test_transform
    if not it.stage.data.val or not train.crop_size or not test.crop_size:
        return
    resized, crop = (test, train.crop_size) if _resizes(test) else (train, test.crop_size)
    if test.crop_size < train.crop_size:
        text = f"{it.name} trains on {train.crop_size} x {train.crop_size} pixels, and is evaluated on {test.crop_size}"
        yield _place(it, "crop_size"), text, "an evaluation has as many pixels or more"
    elif _resizes(train) != _resizes(test):
        source = it.train if resized is test else it.stage.data.val[0]
        # The shorter sides of the first images, in pixels.
        both = side_file(it.schedule.lmdb(source), "heights", "widths", most=100)[1]
        sides = sorted(map(min, *both)) if both else []
        wanted = test.random_resize.min_size / test.crop_size if test.random_resize else 8 / 7
        if sides and 0.75 < sides[len(sides) // 2] / crop / wanted < 1.34:
            return
        one, other = ("an evaluation", "training") if resized is test else ("training", "an evaluation")
        text = (
            f"{one} of {it.name} resizes images, and {other} cuts {crop} x {crop} pixels out of them as they are stored"
        )
        hint = f"resize there, too (`random_resize_param`), or store images with a shorter side of about {crop * wanted:.0f}"
        yield _place(it, "crop_size"), text, hint


RULES = (
    warning(
        "other-numbers", other_numbers, "a network that is given other numbers than in its evaluation, or in its parent"
    ),
    warning("odd-range", odd_range, "images that nothing normalises, or mean_value for pixels of 0 to 1"),
    warning(
        "channel-order",
        channel_order,
        "weights or a mean of R, G, B where channels are B, G, R, or the other way round",
    ),
    Rule("far-mean", far_mean, Level.WARNING, "a mean_value far from the mean of the images", looks=True),
    warning(
        "other-sizes", other_sizes, "images that are resized in training alone, or in an evaluation alone", looks=True
    ),
)
