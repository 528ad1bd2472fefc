"""Settings that are each in range but don't fit together: one table of rules, a file for each subject. Pure.

A new rule is a row of a file's `RULES`, or a row and a function; and its case in tests/golden/spec.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

from stagerun.base.errors import Problems
from stagerun.base.wings import wing
from stagerun.language.lexer import shown
from stagerun.language.ranges import is_name
from stagerun.language.rules import images, model, stage
from stagerun.language.rules.rule import Around, Message, Rule, check_required, run, wrong
from stagerun.language.stages import Node
from stagerun.language.tree import Block, View

__all__ = ["check", "check_required"]

WING = "wire.rules.RULES"  # the wing that implements these fields
_LACKING = "stage `{stage}` has `%s`, and this installation lacks stagerun/wire, which implements it"
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
    """Return the rules by message and field; '' for rules of a whole message."""
    table: dict[str, dict[str, list[Rule]]] = {}
    for rule in (*RULES, *(wing(WING) or ())):
        kind, _, field = rule.id.partition(".")
        table.setdefault(kind, {}).setdefault(field, []).append(rule)
    return table


def check(
    schedule: Block, nodes: Sequence[Node], settings: Mapping[str, Block], folder: str, problems: Problems
) -> None:
    """Report the mistakes in a schedule and in the settings of its stages. `settings`: by stage, durations in iterations."""
    view = View(schedule)
    check_required(replace(schedule, entries={n: e for n, e in schedule.entries.items() if n != "solver"}), problems)
    unnamed = "name" not in schedule.entries and "name" not in schedule.doubtful and not schedule.broken
    if unnamed and not is_name(folder, with_dots=True):
        hint = 'write `name: "..."` with letters, digits, `_`, `-` and `.`'
        problems.add(schedule.place, f"the folder's name `{shown(folder)}` can't be the name of the schedule", hint)
    views = {name: View(block) for name, block in settings.items()}
    around = Around(view, views)
    for field in ("model", "data", "ensemble"):
        for inner in schedule.blocks(field):
            _check(Message(View(inner), around), problems)
    for node in nodes:
        _check(Around(view, views, node).settings, problems)
        check_required(settings[node.name], problems)


def _check(message: Message, problems: Problems) -> None:
    """Run the rules on a message and on the messages in it."""
    block = message.view.block
    rules = _table().get(block.kind.name, {})
    run(rules.get("", ()), problems, message)
    for name, entry in block.entries.items():
        for inner in entry.values:
            if isinstance(inner.value, Block):
                _check(Message(View(inner.value), message.around), problems)
        if name in rules:
            run(rules[name], problems, message)
