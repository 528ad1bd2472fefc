"""Errors of meaning in a stage's own network, and in the weights that it starts from. Pure."""

from collections.abc import Mapping, Sequence
from contextlib import suppress

from stagerun.base import recipe
from stagerun.base.code import Sources
from stagerun.base.errors import Problems, listing
from stagerun.base.text import count
from stagerun.language import build
from stagerun.language.lexer import shown
from stagerun.language.tree import Block, Value
from stagerun.language.values import differing, text
from stagerun.language.view import Doubtful, View


def check_weights(stage: str, view: View, problems: Problems) -> None:
    """The `*` of `rename`."""
    weights = view.view("weights")
    for rename in weights.views("rename") if weights is not None else ():
        with suppress(Doubtful):
            before, after = rename.text("from") or "", rename.text("to") or ""
            if rename.has("from") and rename.has("to") and before.count("*") != after.count("*"):
                message = f"`{shown(before)}` and `{shown(after)}` don't have as many `*`"
                hint = 'each `*` of `to` is what one of `from` stands for: `rename { from: "module.*" to: "*" }`'
                problems.add(rename.place("to"), message, hint)


# Whose memory of updates Caffe writes into a .solverstate.
CAFFES_TYPES = ("SGD", "Nesterov", "AdaGrad", "RMSProp", "AdaDelta", "Adam")


def check_solverstate(stage: str, view: View, problems: Problems) -> None:
    """What doesn't go together with one."""
    if not view.has("solverstate"):
        return
    place = view.place("solverstate")
    if view.has("weights"):
        text = "`solverstate` with `weights`: a .solverstate names its own weights"
        problems.add(place, text, "remove one of them; `weights` begins at iteration 0, with no memory of updates")
    type_ = view.text("type")
    if type_ is not None and type_ not in CAFFES_TYPES:
        problems.add(place, f"`solverstate` with type `{type_}`, which Caffe has not", f"write {listing(CAFFES_TYPES)}")
    elif type_ in ("SGD", "Nesterov") and view.text("momentum_form") == "TORCH":
        text = "`solverstate` with `momentum_form: TORCH`: Caffe remembers steps, and this form gradients"
        problems.add(place, text, "write `momentum_form: CAFFE`, or take the weights alone with `weights`")
    for field in ("sync_param", "early_stop"):
        if view.has(field):
            text = f"`solverstate` with `{field}`: what that has seen before is in no .solverstate"
            problems.add(place, text, "remove one of them")
    if view.text("lr_policy") == "plateau":
        text = "`solverstate` with lr_policy `plateau`, which goes on from losses that are not in the file"
        problems.add(place, text, "take the weights alone with `weights`")


def check_begins(stage: str, view: View, parent: str, problems: Problems) -> None:
    """A .solverstate is all that a stage starts from."""
    with suppress(Doubtful):
        if view.has("solverstate"):
            text = f"`solverstate` in stage `{stage}`, which starts from `{parent}`"
            problems.add(view.place("solverstate"), text, 'write `from: ""`: all that it begins with is in the file')


def check_own_model(own: View | None, schedule: View, problems: Problems) -> None:
    """The stages see the same images."""
    if own is None:
        return
    channels, shared = own.whole("channels"), schedule.inside("model").whole("channels")
    if channels != shared:
        takes = count(channels or 0, "channel")
        message = f"this network takes {takes}, and the schedule's {shared}: all see the same images"
        problems.add(own.place("channels"), message, f"write `channels: {shared}`")


def check_members(
    schedule: Block,
    rule: str | None,
    members: Sequence[tuple[str, Value]],
    settings: Mapping[str, Block],
    problems: Problems,
) -> None:
    """Weights are averaged of one network, and probabilities of the same classes."""
    first: tuple[str, recipe.Model] | None = None
    for stage, value in members:
        found = network_of(schedule, settings[stage]) if stage in settings else None
        if found is None:
            continue
        if first is None:
            first = stage, found
            continue
        other, theirs = first
        if found.num_classes != theirs.num_classes:
            message = f"`{stage}` has {found.num_classes} classes, and `{other}` {theirs.num_classes}"
            problems.add(value.span, message, "an ensemble needs members with the same classes")
        elif rule is not None and recipe.EnsembleRule(rule).averages and found != theirs:
            name, one, two = next(differing(theirs, found, "model"))
            message = f"`{stage}` is not the network of `{other}`: {name} {text(two)} (`{other}`: {text(one)})"
            problems.add(
                value.span, message, "weights of one network can be averaged: write `rule: MEAN_PROBABILITY`, say"
            )


def network_of(schedule: Block, settings: Block) -> recipe.Model | None:
    """The network of a stage with these settings; None where it is not known, which has been reported."""
    with suppress(Doubtful):
        return known_network(View(settings).view("model") or View(schedule).view("model"))
    return None


def known_network(view: View | None) -> recipe.Model | None:
    """The same of a `model { }`."""
    with suppress(Doubtful):
        if view is not None and (view.has("name") or view.has("caffe_net")) and view.has("num_classes"):
            # Without the texts of Python files and nets: by them no two networks of a schedule differ.
            return build.model(view, build.Beside(Sources(), {}, {}))
    return None
