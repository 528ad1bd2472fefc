"""Settings of Model that mean nothing for its network, and images that the network does not take. Pure."""

from collections.abc import Iterable, Sequence
from contextlib import suppress

from stagerun import recipe
from stagerun.errors import Problem, listing
from stagerun.spec.networks import FILLER_FIELDS, NETWORKS, Network
from stagerun.spec.problems import Problems
from stagerun.spec.view import Doubtful, View

_MOST_NAMES = 6


def check_model(schedule: View, stages: Iterable[View], problems: Problems) -> None:
    """`stages` are the settings of each stage."""
    with suppress(Doubtful):
        model = schedule.view("model")
        name = model.text("name") if model else None
        if model and name:
            network = NETWORKS[name]
            for check in (_batch_norm, _zero_gamma, _blur_pool, _fillers):
                with suppress(Doubtful):
                    check(name, network, model, problems)
            for stage in stages:
                _sizes(name, network, stage, problems)


def classes_problem(schedule: recipe.Schedule, lmdb: str, classes: Sequence[str]) -> Problem | None:
    """What is wrong with `num_classes` where the images in folder `lmdb` have these `classes`; () where they have no names."""
    number, known = schedule.model.num_classes, len(classes)
    if number == known or not known or (number > known and schedule.model.spare_classes):
        return None
    stage = schedule.stages[0]
    origin, problems = stage.origins.get("model.num_classes"), Problems()
    for path, text in schedule.files:
        problems.file(path, text)
    names = ", ".join(classes[:_MOST_NAMES]) + ", ..." * (known > _MOST_NAMES)
    hint = f"write `num_classes: {known}`"
    if number > known:
        hint += "; if outputs without a class are meant, add `spare_classes: true`"
    span = origin.span if origin is not None and origin.span is not None else stage.span
    problems.add(span, f"`num_classes` is {number}, but {lmdb} has {known} class{'es' * (known > 1)}: {names}", hint)
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
            if filler and not network.fc_weight:
                message = f"`{field}`: the last layer of `{name}` is a convolution, not a linear one"
                problems.add(model.place(field), message, "remove it")
            elif filler and not there:
                problems.add(model.place(field), f"`{field}`: the last layer of `{name}` has no biases", "remove it")
            elif filler:
                _filler(filler, problems)


def _filler(filler: View, problems: Problems) -> None:
    """What is written and not read would leave the weights as nobody meant: without `type` they are all the same."""
    kind = filler.text("type") or ""
    read = ("type", *FILLER_FIELDS[kind])
    for field in filler.block.entries:
        if field not in read:
            readers = [f'type: "{k}"' for k, fields in FILLER_FIELDS.items() if field in fields]
            message = f"a filler of type `{kind}` does not read `{field}`"
            problems.add(filler.place(field), message, f"write {listing(readers)}, or remove it")
    if kind == "uniform":
        low, high = filler.number("min"), filler.number("max")
        if low is not None and high is not None and low > high:
            place = filler.place("max" if "max" in filler.block.entries else "min")
            problems.add(place, f"`min` {low} is more than `max` {high}")


def _sizes(name: str, network: Network, stage: View, problems: Problems) -> None:
    """Where a crop says how large the images are; the others are met in training."""
    with suppress(Doubtful):
        transform = stage.view("transform_param")
        ramp = transform.view("crop_size_ramp_param") if transform else None
        start = ramp.whole("start_size") if ramp else None
        if ramp and start is not None and not network.fits(start, start):
            message = f"`{name}` takes images of {network.sizes}, not {start} x {start}"
            hint = "remove `crop_size_ramp_param`, or take another network"
            if network.largest is None:
                hint = f"write `start_size: {network.smallest}`, or take another network"
            problems.add(ramp.place("start_size"), message, hint)
    for field in ("transform_param", "test_transform_param"):
        with suppress(Doubtful):
            transform = stage.view(field)
            crop = transform.whole("crop_size") if transform else None
            if transform and crop is not None and not network.fits(crop, crop):
                message = f"`{name}` takes images of {network.sizes}, not {crop} x {crop}"
                hint = f"write `crop_size: {network.smallest}`, or take another network"
                problems.add(transform.place("crop_size"), message, hint)
            elif transform and crop is not None and transform.flag("rectangular") and not network.fits(crop, crop + 8):
                message = f"`rectangular` gives images of many sizes, and `{name}` takes {network.sizes}"
                problems.add(transform.place("rectangular"), message, "remove it, or take another network")
