"""Errors of meaning: settings that are each in range and don't fit together. One table of rules, a file for each subject. Pure.

A new rule is a row of a file's `RULES`, or a row and a function; and its case in tests/golden/spec.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

from stagerun.base.errors import Problems
from stagerun.base.wings import wing
from stagerun.language import ranges
from stagerun.language.rules import images, model, stage
from stagerun.language.rules.rule import Around, Message, Rule, check_required, run, wrong
from stagerun.language.stages import Node
from stagerun.language.tree import Block
from stagerun.language.view import View

__all__ = ["check", "check_required"]

WING = "wire.rules.RULES"  # which carries out these fields
_LACKING = "stage `{stage}` has `%s`, and this installation lacks stagerun/wire, which carries it out"
_INSTALL = "remove it, or install all of stagerun"

RULES = (
    *stage.RULES,
    *images.RULES,
    *model.RULES,
    wrong("Solver.compress_param", _LACKING % "compress_param", _INSTALL, lambda m: wing(WING) is None),
    wrong("Solver.sync_param", _LACKING % "sync_param", _INSTALL, lambda m: wing(WING) is None),
)


@cache
def _table() -> Mapping[str, Mapping[str, Sequence[Rule]]]:
    """The rules by message and field; '' for those of a whole message."""
    table: dict[str, dict[str, list[Rule]]] = {}
    for rule in (*RULES, *(wing(WING) or ())):
        kind, _, field = rule.id.partition(".")
        table.setdefault(kind, {}).setdefault(field, []).append(rule)
    return table


def check(
    schedule: Block, found: Sequence[Node], settings: Mapping[str, Block], folder: str, problems: Problems
) -> None:
    """Report the mistakes in a schedule and in the settings of its stages, by name, with durations in iterations. `folder`: its name."""
    view = View(schedule)
    check_required(replace(schedule, entries={n: e for n, e in schedule.entries.items() if n != "solver"}), problems)
    if "name" not in schedule.entries and "name" not in schedule.doubtful and not schedule.broken:
        ranges.folder_name_problem(folder, schedule.place, problems)
    views = {name: View(block) for name, block in settings.items()}
    around = Around(view, views)
    for field in ("model", "data", "ensemble"):
        for inner in schedule.blocks(field):
            _check(Message(View(inner), around), problems)
    for node in found:
        _check(Around(view, views, node).settings, problems)
        check_required(settings[node.name], problems)


def _check(message: Message, problems: Problems) -> None:
    """Run the rules on a message and on those in it."""
    block = message.view.block
    rules = _table().get(block.kind.name, {})
    run(rules.get("", ()), problems, message)
    for name, entry in block.entries.items():
        for inner in entry.values:
            if isinstance(inner.value, Block):
                _check(Message(View(inner.value), message.around), problems)
        if name in rules:
            run(rules[name], problems, message)
