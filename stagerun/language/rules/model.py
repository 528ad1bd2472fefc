"""Rules about networks: settings without effect, images that a network does not take, Python functions and their arguments. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from stagerun.base import recipe
from stagerun.base.code import Code, Sources
from stagerun.base.errors import Problem, Problems, listing, nearest
from stagerun.base.text import count
from stagerun.language import arguments, build
from stagerun.language.code import LocalFiles, Signature
from stagerun.language.consent import unlisted
from stagerun.language.networks import FILLER_FIELDS, NETWORKS, TIMM, TIMM_ARGUMENTS, Network, code_in, network_of
from stagerun.language.rules.rule import Found, Message, Rule, excludes, ordered, read_by, wrong
from stagerun.language.tree import Block, Doubtful, Entry, Value, View
from stagerun.language.values import differing, text

_MOST_NAMES = 6


def _known(m: Message) -> Network:
    """Return the network that a Model names. Doubtful with `caffe_net`."""
    if "caffe_net" in m:
        raise Doubtful("name")
    return network_of(m.name)


def _args(m: Message) -> Found:
    """Find `args` of networks from outside that repeat a field of Model, or need consent."""
    words = arguments.read(m.args) if _known(m).foreign else ()
    for word in words:
        if word in ("num_classes", "channels") or (m.name.startswith(TIMM) and word == "in_chans"):
            hint = f"write `{word.replace('in_chans', 'channels')}: ...` next to `args`: images are checked against it"
            yield m.place("args"), f"`{word}` in `args`", hint
        elif word in unlisted(m.name, m.args):
            other = 'for weights write `weights { file: "timm/NAME" }`; for another argument call timm in your own file'
            text = f"timm's networks only take listed arguments, which open no file, and `{word}` is not listed"
            yield m.place("args"), text, nearest(word, TIMM_ARGUMENTS) or other


def wrong_sizes(who: str, network: Network, m: Message, path: str) -> Found:
    """Find crops whose size the network does not take. `who`: the network in messages; `path`: to a size. Sizes without a crop show up
    in training."""
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


_READERS = {
    name: " ".join(f'"{kind}"' for kind, read in FILLER_FIELDS.items() if name in read)
    for fields in FILLER_FIELDS.values()
    for name in fields
}
_FILLERS, _LAST = ("fc_weight_filler", "fc_bias_filler"), "the last layer of `{name}`"
_FROM_CODE = "remove it: the network's code initialises its weights"
RULES = (
    excludes("Model.name", "caffe_net", "the net has it", "remove it, or `caffe_net`"),
    *(
        excludes(f"Model.{name}", "caffe_net", "the net has it", "remove it, and write it in the net")
        for name in (
            "zero_gamma", "fc_weight_filler", "fc_bias_filler", "blur_pool", "args",
            "batch_norm_param.moving_average_fraction", "batch_norm_param.eps",
        )
    ),
    wrong(
        "Model.args", "`args` has no effect with `{name}`",
        "remove it: it is for a network from a file, from a package or of timm", lambda m: not _known(m).foreign,
    ),
    Rule("Model.args", _args),
    wrong(
        "Model.batch_norm_param", "`{name}` has no BatchNorm layers",
        lambda m: "remove it" + (f", or take `{m.name}_bn`, which has them" if f"{m.name}_bn" in NETWORKS else ""),
        lambda m: _known(m).batch_norm is None,
    ),
    wrong(
        "Model.zero_gamma", "`zero_gamma` has no effect with `{name}`",
        "remove it: it is for ResNets, ResNeXts and Wide ResNets",
        lambda m: m.zero_gamma != "AS_PUBLISHED" and not _known(m).zero_gamma,
    ),
    wrong(
        "Model.blur_pool", "`blur_pool` has no effect with `{name}`",
        "remove it: it is for torchvision's ResNets, ResNeXts and Wide ResNets, and `resnet50_intel_caffe`",
        lambda m: not _known(m).blur_pool,
    ),
    *(
        wrong(f"Model.{name}", f"`{name}` has no effect with `{{name}}`", _FROM_CODE, lambda m: _known(m).foreign)
        for name in _FILLERS
    ),
    *(
        wrong(
            f"Model.{name}", f"`{name}`: {_LAST} is a convolution, not a linear one", "remove it",
            lambda m: not (_known(m).foreign or _known(m).fc_weight),
        )
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
    """Return the network of a stage with these settings; None if unknown, which has been reported."""
    with suppress(Doubtful):
        view = View(settings).view("model") or View(schedule).inside("model")
        if (view.has("name") or view.has("caffe_net")) and view.has("num_classes"):
            # Without the texts of Python files and nets: networks of one schedule never differ in these alone.
            return build.model(view, build.Context("", "", Sources(), {}, {}))
    return None


def check_members(
    schedule: Block,
    rule: str | None,
    members: Sequence[tuple[str, Value]],
    settings: Mapping[str, Block],
    problems: Problems,
) -> None:
    """Report members whose weights or probabilities can't be averaged: another network, or other classes."""
    averages = rule == "WEIGHT_AVERAGE"
    models = [(stage, value, model_of(schedule, settings[stage])) for stage, value in members if stage in settings]
    other, first = next(((stage, model) for stage, _, model in models if model is not None), ("", None))
    for stage, value, model in models:
        if model is None or first is None or model == first:
            continue
        if model.num_classes != first.num_classes:
            message = f"`{stage}` has {model.num_classes} classes, and `{other}` {first.num_classes}"
            problems.add(value.span, message, "an ensemble needs members with the same classes")
        elif averages:
            name, one, two = next(differing(first, model, "model"))
            message = f"`{stage}` is not the network of `{other}`: {name} {text(two)} (`{other}`: {text(one)})"
            hint = "only weights of one network can be averaged: write `rule: MEAN_PROBABILITY`, for example"
            problems.add(value.span, message, hint)


def classes_problem(
    schedule: recipe.Schedule, stage: recipe.Stage, lmdb: str, classes: Sequence[str]
) -> Problem | None:
    """Return the mistake if `num_classes` differs from the `classes` of a stage's images in folder `lmdb`; () if these have no names."""
    model, number, named = stage.model, stage.model.num_classes, len(classes)
    if number == named or not named or (number > named and model.spare_classes):
        return None
    hint, what, within = f"write `num_classes: {named}`", f"`num_classes` is {number}", ""
    if model.net is not None:
        hint = f"change `num_output` of the net's last layer to {named}"
        what, within = f"the net has {count(number, 'output')}", " to `model`"
    if number > named:
        hint += f"; if outputs without a class are intended, add `spare_classes: true`{within}"
    names = ", ".join(classes[:_MOST_NAMES]) + (", ..." if named > _MOST_NAMES else "")
    text = f"{what}, but {lmdb} has {named} class{'es' if named > 1 else ''}: {names}"
    problems = Problems(schedule.files)
    problems.add(stage.written("model.num_classes") or stage.span, text, hint)
    return problems.all()[0]


# -- Python functions

# Arguments that stagerun passes to the function in this field besides `args`, if it takes them.
_PASSED = {"name": ("num_classes", "channels"), "function": ("num_classes",)}


def require_code(entries: Iterable[tuple[Block, Entry]], local: LocalFiles, problems: Problems) -> list[str]:
    """Return the files that these entries need, each with its message. Report mistakes in the files and in the calls."""
    needed: dict[str, None] = {}
    for block, entry in entries:
        code = code_in(str(entry.values[0].value))
        if code is None:
            continue
        needed |= dict.fromkeys(local.require(code, entry.place))
        taken = local.signature(code) if code.file else None
        if taken is not None:
            what = f"`{code.function}` in {local.path(code.file)}:{taken.line}"
            called = _call if entry.field.name in _PASSED else _transform
            with suppress(Doubtful):
                for span, message, hint in called(block, entry, code, taken):
                    problems.add(span, f"{what} {message}", hint)
    return list(needed)


def _call(block: Block, entry: Entry, code: Code, taken: Signature) -> Found:
    """Find `args` next to `entry` that the function doesn't take, and arguments that it lacks."""
    names = arguments.read(View(block).text("args"))
    passed = _PASSED[entry.field.name]
    settable = [name for name in taken.names if name not in passed]
    for name in names:
        if name not in (*taken.names, *passed) and not taken.more[1]:
            args = block.entries["args"].values[0]
            hint = nearest(name, settable) or (f"it takes {listing(settable, 'and')}" if settable else "remove it")
            yield args.names.get(name, args.span), f"takes no `{name}`", hint
    missing = [name for name in taken.required if name not in (*names, *passed)]
    if missing:
        hint = f"write `args {{ {missing[0]}: ... }}`"
        if entry.field.name == "function":
            hint += f"; `{code.function}` is called once, and returns the function of (logits, targets)"
        yield entry.place, f"needs {listing(missing, 'and')}", hint


def _transform(block: Block, entry: Entry, code: Code, taken: Signature) -> Found:
    """Find a function that can't be called with an image and a generator."""
    least = [name for name in taken.required if name in taken.positional]
    by_name = [name for name in taken.required if name in taken.named]
    if len(least) > 2 or by_name or (len(taken.positional) < 2 and not taken.more[0]):
        hint = f"write `def {code.function}(image, rng):`; others need a default"
        yield entry.place, "can't be called with an image and a numpy Generator", hint
