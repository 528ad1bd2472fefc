"""Rules about the numbers that images become, and their sizes (`transform_param`). Some read the side files of LMDBs that are here."""

from collections.abc import Iterator

from stagerun.base.errors import Span
from stagerun.base.recipe import ChannelOrder, Schedule, Stage
from stagerun.base.weights import Kind
from stagerun.base.weights import place_of as weights_of
from stagerun.plan.described import input_ranges, number_notes, resizes
from stagerun.system.lmdb_file import pixel_statistics, stored_sides
from stagerun.tools.lint.finding import Finding

IMAGENET = (103.53, 116.28, 123.675)  # mean of its pixels: B, G, R


def _place(stage: Stage, *names: str) -> Span:
    """Where the first of these fields of transform_param is written, or else the first of all."""
    named = stage.written(*(f"solver.transform_param.{name}" for name in names))
    written = [o.span for key, o in stage.origins.items() if key.startswith("solver.transform_param.") and o.span]
    return named or min(written, default=stage.span)


def other_numbers(schedule: Schedule) -> Iterator[Finding]:
    """A network that is given other numbers for the same pixel than in its evaluation, or in its parent: mostly since
    one of two `transform_param` sets a value of its own."""
    for stage in schedule.stages:
        parent = schedule.stage(stage.parent) if stage.parent is not None else None
        if notes := number_notes(stage, parent):
            text = f"stage `{stage.name}`: " + "; ".join(notes)
            hint = "write the same values in both, or once in the `solver` of schedule.prototxt"
            yield Finding("other-numbers", text, _place(stage), hint)


def odd_range(schedule: Schedule) -> Iterator[Finding]:
    """Pixels are 0 to 255: inputs that aren't scaled at all, or are by values for pixels of 0 to 1, or twice."""
    for stage in schedule.stages:
        transform = stage.solver.transform
        ranges = input_ranges(transform, stage.model.channels)
        span, mean = max(abs(b - a) for a, b in ranges), transform.mean_value
        small = any(mean) and all(0 <= value <= 1 for value in mean)
        raw = span == 255 and not any(mean) and transform.mean_file is None
        if small or raw or span > 255 or span < 0.1:
            name, values = ("mean_value", mean) if small else ("std_value", transform.std_value)
            hint = "write `mean_value` and `std_value` of pixels of 0 to 255; `stagerun data info LMDB` shows them"
            if values and (small or span > 255):
                hint = f"it was written for pixels of 0 to 1: `{name}: [{', '.join(f'{255 * v:.6g}' for v in values)}]`"
            low, high = min(map(min, ranges)), max(map(max, ranges))
            text = f"pixels of 0 to 255 become inputs of {low:.4g} to {high:.4g} in stage `{stage.name}`"
            yield Finding("odd-range", text, _place(stage, name, "scale"), hint)


def channel_order(schedule: Schedule) -> Iterator[Finding]:
    """Weights of torchvision's or timm's, which are for R, G, B, or ImageNet's mean, in the other order."""
    for stage in schedule.stages:
        solver, transform = stage.solver, stage.solver.transform
        rgb, mean = transform.channel_order is ChannelOrder.RGB, transform.mean_value
        file = solver.weights.file if solver.weights is not None else ""
        published = bool(file) and weights_of(file).kind in (Kind.TORCHVISION, Kind.TIMM)
        usual = IMAGENET if rgb else IMAGENET[::-1]
        if published and not rgb and stage.model.channels == 3:
            text = f"stage `{stage.name}` gives `{file}` B, G, R; it was trained on R, G, B"
        elif len(mean) == 3 and all(abs(a - b) < 2 for a, b in zip(mean, usual, strict=True)):
            order = "R, G, B" if rgb else "B, G, R"
            text = f"`mean_value` of stage `{stage.name}` is ImageNet's in the other order: its channels are {order}"
        else:
            continue
        hint = (
            "write `mean_value` the other way round"
            if rgb
            else "write `channel_order: RGB`, and mean and deviation in that order"
        )
        yield Finding("channel-order", text, _place(stage, "channel_order", "mean_value"), hint)


def far_mean(schedule: Schedule) -> Iterator[Finding]:
    """A mean that is more than a standard deviation off that of all pixels. Weights from elsewhere have their own."""
    known = {s.data.train.path: pixel_statistics(schedule.lmdb(s.data.train)) for s in schedule.stages}
    for stage in schedule.stages:
        transform, own = stage.solver.transform, known[stage.data.train.path]
        own = own[::-1] if transform.channel_order is ChannelOrder.RGB else own
        values = transform.mean_value * (len(own) if len(transform.mean_value) == 1 else 1)
        if stage.solver.weights is not None or len(own) != len(values):
            continue
        if any(abs(value - mean) > deviation for value, (mean, deviation) in zip(values, own, strict=True)):
            right = ", ".join(f"{mean:.1f}" for mean, _ in own)
            text = f"`mean_value` of stage `{stage.name}` is far from the mean of its images, [{right}]"
            yield Finding("far-mean", text, _place(stage, "mean_value"), f"write `mean_value: [{right}]`")


def other_sizes(schedule: Schedule) -> Iterator[Finding]:
    """Things are larger or smaller in an evaluation than in training: one of the two resizes images and the other doesn't, or an
    evaluation has fewer pixels. Images whose stored size fits are no matter, as far as it is known."""
    for stage in schedule.stages:
        train, test = stage.solver.transform, stage.solver.test_transform
        if not stage.data.val or not train.crop_size or not test.crop_size:
            continue
        resized, crop = (test, train.crop_size) if resizes(test) else (train, test.crop_size)
        if test.crop_size < train.crop_size:
            text = f"stage `{stage.name}` trains on {train.crop_size} x {train.crop_size} pixels, and is evaluated on {test.crop_size}"
            yield Finding("other-sizes", text, _place(stage, "crop_size"), "an evaluation has as many pixels or more")
        elif bool(resizes(train)) != bool(resizes(test)):
            source = stage.data.train if resized is test else stage.data.val[0]
            sides = stored_sides(schedule.lmdb(source))
            wanted = test.random_resize.min_size / test.crop_size if test.random_resize else 8 / 7
            if sides and 0.75 < sides[len(sides) // 2] / crop / wanted < 1.34:
                continue
            one, other = ("an evaluation", "training") if resized is test else ("training", "an evaluation")
            text = f"{one} of stage `{stage.name}` resizes images, and {other} cuts {crop} x {crop} pixels out of them as they are stored"
            hint = f"resize there, too (`random_resize_param`), or store images with a shorter side of about {crop * wanted:.0f}"
            yield Finding("other-sizes", text, _place(stage, "crop_size"), hint)
