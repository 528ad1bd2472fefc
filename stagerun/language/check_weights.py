"""Errors of meaning in a stage's own network, and in the weights that it starts from. Pure."""

from collections.abc import Mapping, Sequence
from contextlib import suppress

from stagerun.base import recipe
from stagerun.base.code import Sources
from stagerun.base.errors import Problems
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


def check_own_model(stage: View, schedule: View, problems: Problems) -> None:
    """The stages see the same images."""
    own = stage.view("model")
    if own is None:
        return
    channels, shared = own.whole("channels"), schedule.inside("model").whole("channels")
    if channels != shared:
        takes = count(channels or 0, "channel")
        message = f"the stage's network takes {takes}, and the schedule's {shared}: all stages see the same images"
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
        elif rule == recipe.EnsembleRule.WEIGHT_AVERAGE.value and found != theirs:
            name, one, two = next(differing(theirs, found, "model"))
            message = f"`{stage}` is not the network of `{other}`: {name} {text(two)} (`{other}`: {text(one)})"
            problems.add(
                value.span, message, "weights of one network can be averaged: write `rule: MEAN_PROBABILITY`, say"
            )


def network_of(schedule: Block, settings: Block) -> recipe.Model | None:
    """The network of a stage with these settings; None where it is not known, which has been reported."""
    with suppress(Doubtful):
        view = View(settings).view("model") or View(schedule).view("model")
        if view is not None and (view.has("name") or view.has("caffe_net")) and view.has("num_classes"):
            # Without the texts of Python files and nets: by them no two networks of a schedule differ.
            return build.model(view, build.Given(Sources(), {}, {}))
    return None
