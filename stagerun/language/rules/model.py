"""Settings of a network that mean nothing for it, and images that it does not take. Pure."""

from collections.abc import Mapping, Sequence
from contextlib import suppress

from stagerun.base import recipe
from stagerun.base.code import Sources
from stagerun.base.errors import Problem, Problems, nearest
from stagerun.base.text import count
from stagerun.language import arguments, build
from stagerun.language.consent import unlisted
from stagerun.language.networks import FILLER_FIELDS, NETWORKS, TIMM, TIMM_ARGUMENTS, Network, network_of
from stagerun.language.rules.rule import Found, Message, Rule, excludes, ordered, read_by, wrong
from stagerun.language.tree import Block, Value
from stagerun.language.values import differing, text
from stagerun.language.view import Doubtful, View

_MOST_NAMES = 6


def _known(m: Message) -> Network:
    """The network that a Model names. Doubtful beside `caffe_net`."""
    if "caffe_net" in m:
        raise Doubtful("name")
    return network_of(m.name)


def _without_bn(m: Message) -> str:
    return f"remove it, or take `{m.name}_bn`, which has them" if f"{m.name}_bn" in NETWORKS else "remove it"


def _args(m: Message) -> Found:
    """`args` of networks from outside don't say what has a field of its own, and open no files unasked."""
    words = arguments.read(m.args) if _known(m).foreign else ()
    for word in words:
        if word in ("num_classes", "channels") or (m.name.startswith(TIMM) and word == "in_chans"):
            hint = f"write `{word.replace('in_chans', 'channels')}: ...` beside `args`: images are checked against it"
            yield m.place("args"), f"`{word}` in `args`", hint
        elif word in unlisted(m.name, m.args):
            other = (
                'take `weights { file: "timm/NAME" }` for weights; for another argument call timm in a file of your own'
            )
            text = f"timm's networks are called with listed arguments alone, which open no file, and not with `{word}`"
            yield m.place("args"), text, nearest(word, TIMM_ARGUMENTS) or other


def wrong_sizes(who: str, network: Network, m: Message, path: str) -> Found:
    """Where a crop says how large the images are that `who`, in words, gets; the others are met in training. `path`: to a size."""
    (holder, name), takes, other = m.inner(path), f"{who} takes images of {network.sizes}", "or take another network"
    size = getattr(holder, name)
    if not network.fits(size, size):
        mend = f"write `{name}: {network.smallest}`"
        if name == "start_size" and network.largest:
            mend = "remove `crop_size_ramp_param`"
        yield holder.place(name), f"{takes}, not {size} x {size}", f"{mend}, {other}"
    elif name == "crop_size" and holder.rectangular and not network.fits(size, size + 8):
        text = f"`rectangular` gives images of many sizes, and {who} takes {network.sizes}"
        yield holder.place("rectangular"), text, f"remove it, {other}"


def _size(path: str) -> Rule:
    def find(m: Message) -> Found:
        return wrong_sizes(f"`{m.network.name}`", _known(m.network), m, path)

    return Rule("Solver." + path.partition(".")[0], find)


TRAINING_SIZES = ("transform_param.crop_size", "transform_param.crop_size_ramp_param.start_size")


def _convolves(m: Message) -> bool:
    return not (_known(m).foreign or _known(m).fc_weight)


_READERS = {
    name: " ".join(f'"{kind}"' for kind, read in FILLER_FIELDS.items() if name in read)
    for fields in FILLER_FIELDS.values()
    for name in fields
}
_FILLERS, _LAST = ("fc_weight_filler", "fc_bias_filler"), "the last layer of `{name}`"
_OWN_START = "remove it: the network's own code says how its weights start"
RULES = (
    excludes("Model.name", "caffe_net", "the net says it", "remove it, or `caffe_net`"),
    *(
        excludes(f"Model.{name}", "caffe_net", "the net says it", "remove it, and write it in the net")
        for name in (
            "zero_gamma", "fc_weight_filler", "fc_bias_filler", "blur_pool", "args",
            "batch_norm_param.moving_average_fraction", "batch_norm_param.eps",
        )
    ),
    wrong(
        "Model.args", "`args` means nothing for `{name}`",
        "remove it: it is for a network from a file, from a package or of timm", lambda m: not _known(m).foreign,
    ),
    Rule("Model.args", _args),
    wrong(
        "Model.batch_norm_param", "`{name}` has no BatchNorm layers", _without_bn,
        lambda m: _known(m).batch_norm is None,
    ),
    wrong(
        "Model.zero_gamma", "`zero_gamma` means nothing for `{name}`",
        "remove it: it is for ResNets, ResNeXts and Wide ResNets",
        lambda m: m.zero_gamma != "AS_PUBLISHED" and not _known(m).zero_gamma,
    ),
    wrong(
        "Model.blur_pool", "`blur_pool` means nothing for `{name}`",
        "remove it: it is for torchvision's ResNets, ResNeXts and Wide ResNets, and `resnet50_intel_caffe`",
        lambda m: not _known(m).blur_pool,
    ),
    *(
        wrong(f"Model.{name}", f"`{name}` means nothing for `{{name}}`", _OWN_START, lambda m: _known(m).foreign)
        for name in _FILLERS
    ),
    *(
        wrong(f"Model.{name}", f"`{name}`: {_LAST} is a convolution, not a linear one", "remove it", _convolves)
        for name in _FILLERS
    ),
    wrong(
        "Model.fc_bias_filler", f"`fc_bias_filler`: {_LAST} has no biases", "remove it",
        lambda m: _known(m).fc_weight and not _known(m).fc_bias,
    ),
    *read_by("FillerParameter", "type", _READERS),
    *ordered("FillerParameter", "min", "max", lambda m: m.type == "uniform"),
    wrong(
        "Solver.model.channels",
        "this network has `channels: {model.channels}`, and the schedule's {schedule.model.channels}: all see the same images",
        "write `channels: {schedule.model.channels}`", lambda m: m.model.channels != m.schedule.model.channels,
    ),
    *map(_size, (*TRAINING_SIZES, "test_transform_param.crop_size")),
)  # fmt: skip


# -- several networks


def model_of(schedule: Block, settings: Block) -> recipe.Model | None:
    """The network of a stage with these settings; None where it is not known, which has been reported."""
    with suppress(Doubtful):
        view = View(settings).view("model") or View(schedule).inside("model")
        if (view.has("name") or view.has("caffe_net")) and view.has("num_classes"):
            # Without the texts of Python files and nets: by them no two networks of a schedule differ.
            return build.model(view, build.Beside("", "", Sources(), {}, {}))
    return None


def check_members(
    schedule: Block,
    rule: str | None,
    members: Sequence[tuple[str, Value]],
    settings: Mapping[str, Block],
    problems: Problems,
) -> None:
    """Weights are averaged of one network, and probabilities of the same classes."""
    averages = rule == "WEIGHT_AVERAGE"
    known = [(stage, value, model_of(schedule, settings[stage])) for stage, value in members if stage in settings]
    other, first = next(((stage, model) for stage, _, model in known if model is not None), ("", None))
    for stage, value, model in known:
        if model is None or first is None or model == first:
            continue
        if model.num_classes != first.num_classes:
            message = f"`{stage}` has {model.num_classes} classes, and `{other}` {first.num_classes}"
            problems.add(value.span, message, "an ensemble needs members with the same classes")
        elif averages:
            name, one, two = next(differing(first, model, "model"))
            message = f"`{stage}` is not the network of `{other}`: {name} {text(two)} (`{other}`: {text(one)})"
            hint = "weights of one network can be averaged: write `rule: MEAN_PROBABILITY`, say"
            problems.add(value.span, message, hint)


def classes_problem(
    schedule: recipe.Schedule, stage: recipe.Stage, lmdb: str, classes: Sequence[str]
) -> Problem | None:
    """What is wrong with `num_classes` where a stage's images in folder `lmdb` have these `classes`; () where they have no names."""
    model, number, known = stage.model, stage.model.num_classes, len(classes)
    if number == known or not known or (number > known and model.spare_classes):
        return None
    hint, what, within = f"write `num_classes: {known}`", f"`num_classes` is {number}", ""
    if model.net is not None:
        hint = f"change `num_output` of the net's last layer to {known}"
        what, within = f"the net has {count(number, 'output')}", " to `model`"
    if number > known:
        hint += f"; if outputs without a class are meant, add `spare_classes: true`{within}"
    names = ", ".join(classes[:_MOST_NAMES]) + (", ..." if known > _MOST_NAMES else "")
    text = f"{what}, but {lmdb} has {known} class{'es' if known > 1 else ''}: {names}"
    problems = Problems(schedule.files)
    problems.add(stage.written("model.num_classes") or stage.span, text, hint)
    return problems.all()[0]
