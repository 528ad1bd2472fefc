"""The tree of stages: names, files, parents, and the order in which they run. Pure.

One `stage` block makes a stage, or several: one for each parent that its `from` names and each `sweep` in it.
"""

import posixpath
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from stagerun.base.errors import Problems, Span, nearest
from stagerun.base.text import listed
from stagerun.language import members, ranges
from stagerun.language.lexer import shown
from stagerun.language.tree import Block, Value

MOST = 1000  # stages of a schedule; more is a slip of the pen in a sweep

_ITERATION = re.compile(r"0*([1-9][0-9]{0,17})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Node:
    """A stage as schedule.prototxt has it. `parent` is a name, None for the seed; `parent_iter` the iteration of it that is
    written behind an `@`. `file` is relative to the schedule's folder, None if `solver` (its `solver_param`) stands for it, or if it
    can't be (that has been reported). `file_place` is what to point at if the file can't be read; where it is `filled`, by sweeps,
    there need be none. `group` is the name of the block where it makes several stages, and `sweep` what the stage's entry of it
    changes. A stage below one that is not enabled is not enabled either.
    """

    name: str
    place: Span
    file: str | None
    file_place: Span
    parent: str | None = None
    parent_place: Span | None = None  # None where the parent is not written
    parent_iter: int | None = None
    enabled: bool = True
    group: str | None = None
    sweep: Block | None = None
    solver: Block | None = None
    filled: bool = False
    teacher: str | None = None  # `teachers` finds it, in the stage's settings
    teacher_place: Span | None = None
    average: str | None = None  # the ensemble whose averaged weights it starts with; `parent` is the member named last
    averaged: tuple[str, ...] = ()  # the stages that this is of

    @property
    def after(self) -> tuple[str, ...]:
        """The stages that are trained before this one."""
        return tuple(dict.fromkeys(n for n in (self.parent, self.teacher, *self.averaged) if n is not None))

    @property
    def shown(self) -> str:
        """The block that makes it, in a message about what all of its stages start from."""
        return self.group or self.name


def nodes(schedule: Block, problems: Problems) -> list[Node]:
    """The stages that have a name, in the order of the file. Reports names that occur twice, files outside of the
    schedule's folder, parents that are not stages, and more than MOST stages.
    """
    found: list[Node] = []
    above: list[Node] = []
    lines: dict[str, str] = {}  # by name, as a hint
    for block in schedule.blocks("stage"):
        if "name" not in block.entries:
            continue
        name, place = block.text("name") or "", block.entries["name"].place
        above = list(islice(_made_of(block, name, above, problems), MOST - len(found) + 1))
        found += above
        if len(found) > MOST:
            problems.add(place, f"more than {MOST} stages", "are two lists multiplied?")
            return []
        made = [(node.name, node.place, f"`{name}` makes it") for node in above if node.name != name]
        for each, at, maker in [(name, place, ""), *made]:
            if each in lines:
                message = f"two stages are named `{each}`{'; ' if maker else ''}{maker}"
                problems.add(at, message, f"the other one stands in line {lines[each]}")
            lines.setdefault(each, f"{at.line}{', where ' if maker else ''}{maker}")
    if all_named(schedule):
        names = {node.name for node in found}
        ensembles = {b.text("name") or "": b for b in schedule.blocks("ensemble") if "name" in b.entries}
        found = [_resolved(node, found, names, ensembles, problems) for node in found]
    return with_disabled(found)


def all_named(schedule: Block) -> bool:
    """Whether every stage has a name that could be read: another one may be what a `from` or a member means."""
    stages = list(schedule.blocks("stage"))
    blocks = [schedule, *stages, *(sweep for stage in stages for sweep in stage.blocks("sweep"))]
    doubtful = any(b.doubtful & {"stage", "name", "from", "sweep"} or b.broken for b in blocks)
    return not doubtful and all("name" in stage.entries for stage in stages)


def groups(found: Sequence[Node]) -> dict[str, list[str]]:
    """The stages that each block which makes several has become."""
    made: dict[str, list[str]] = {}
    for node in found:
        if node.group is not None:
            made.setdefault(node.group, []).append(node.name)
    return made


def names_of(found: Sequence[Node]) -> list[str]:
    """The names of the stages, and of the blocks that make several."""
    return list(dict.fromkeys([*(node.name for node in found), *groups(found)]))


def stages_of(name: str, found: Sequence[Node]) -> list[str]:
    """The stage of that name, or those that the block of that name makes."""
    return groups(found).get(name) or [n.name for n in found if n.name == name]


def some(names: Sequence[str]) -> str:
    """`a`, `b` and `c`; of many, the first."""
    return listed([f"`{name}`" for name in names], 3)


# -- a block and its stages


def _made_of(block: Block, name: str, above: Sequence[Node], problems: Problems) -> Iterator[Node]:
    """The stages of one block. `above`: those of the block before it."""
    place = block.entries["name"].place
    sweeps: list[Block | None] = [s for s in block.blocks("sweep") if "name" in s.entries]
    given = {field for field in ("from", "solver") if sweeps and all(s and field in s.entries for s in sweeps)}
    written, flag = block.entries.get("solver"), block.entries.get("enabled")
    only = Node(
        name,
        place,
        _file(block, name, problems),
        written.place if written else place,
        enabled=flag is None or flag.values[0].value is not False,
        solver=block.block("solver_param"),
        filled=written is None and "solver" in given,
    )
    shared = _starts(block, only, [] if "from" in given else above, problems)
    several = "sweep" in block.entries or "sweep" in block.doubtful or len(shared) > 1
    for sweep in sweeps or [None]:
        starts = _starts(sweep, only, above, problems) if sweep is not None and "from" in sweep.entries else shared
        for node in starts:
            words = [name, *([_start_name(node)] if len(starts) > 1 else [])]
            if sweep is not None:
                words.append(sweep.text("name") or "")
                node = replace(node, place=sweep.entries["name"].place, sweep=sweep.block("solver"))
            elif len(starts) > 1 and node.parent_place is not None:
                node = replace(node, place=node.parent_place)
            full = "_".join(words)
            message, hint = ranges.wrong_stage(full)
            if several and message:
                problems.add(node.place, message, hint)
            yield replace(node, name=full, group=name if several else None)


def _start_name(node: Node) -> str:
    """The part of a stage's name that tells what it starts from."""
    if node.parent is None:
        return "seed"
    return node.parent if node.parent_iter is None else f"{node.parent}_{node.parent_iter}"


def _starts(block: Block, node: Node, above: Sequence[Node], problems: Problems) -> list[Node]:
    """The node once for each stage that the `from` of a block names, else with the stage above as its parent."""
    entry = block.entries.get("from")
    if entry is None or not entry.values:
        if len(above) > 1:
            those = [other.name for other in above]
            message = f"stage `{node.name}` follows on `{above[0].group}`, which stands for {some(those)}"
            hint = f'write which of them it starts from: `from: "{those[0]}"`'
            problems.add(block.entries["name"].place, message, hint)
        return [replace(node, parent=above[0].name if len(above) == 1 else None)]
    starts = []
    for value in entry.values:
        parent, mark, digits = str(value.value).partition("@")
        iter = _iteration(value, node.name, parent, digits, problems) if mark else None
        starts.append(replace(node, parent=parent or None, parent_place=value.span, parent_iter=iter))
    return starts


def _iteration(value: Value, name: str, parent: str, digits: str, problems: Problems) -> int | None:
    """What stands behind the `@` of a start; None with a problem if that isn't an iteration of a stage."""
    number = _ITERATION.fullmatch(digits)
    if not parent:
        hint = 'write `from: "NAME@ITERATION"`; `from: ""` is fresh weights'
        problems.add(value.span, f"stage `{name}` starts from an iteration of no stage", hint)
    elif number is None:
        hint = f'write `from: "{parent}@7638"` for `{parent}` after 7638 of its iterations'
        if digits and not digits.strip("0"):
            hint = f"`{parent}` at 0 is what `{parent}` itself starts from: write that"
        problems.add(value.span, f"`{shown(digits)}` behind the `@` is not a number of iterations, 1 or more", hint)
    else:
        return int(number[1])
    return None


def _file(block: Block, name: str, problems: Problems) -> str | None:
    """The file of a stage's settings, below the schedule's folder."""
    if block.doubtful & {"solver", "solver_param"}:
        return None
    file = block.text("solver")
    if inline := block.entries.get("solver_param"):
        if file is not None:
            message = f"stage `{name}` has its settings here and in `{shown(file)}`"
            problems.add(inline.name, message, "keep one of `solver` and `solver_param`")
        return None
    if file is None:
        return f"{name}.prototxt"
    normal = posixpath.normpath(file)
    if posixpath.isabs(file) or normal == ".." or normal.startswith("../"):
        hint = "a stage's file lies in the schedule's folder, so that the folder can be moved and copied whole"
        problems.add(block.entries["solver"].place, f"`{file}` is outside of the schedule's folder", hint)
        return None
    return normal


# -- the stages of all blocks


def _resolved(
    node: Node, found: Sequence[Node], names: Container[str], ensembles: Mapping[str, Block], problems: Problems
) -> Node:
    """The node, after its parent was looked up among the `names`, and among the ensembles."""
    name, place = node.parent, node.parent_place
    if name is None or place is None or name in names:
        return node
    made = groups(found)
    if name in ensembles and name not in made:
        return _from_average(node, name, place, found, ensembles[name], problems)
    if name in made:
        message = f"stage `{node.shown}` starts from `{name}`, which stands for {some(made[name])}"
        problems.add(place, message, f'name one of them, `from: "{made[name][0]}"`, or several')
        return replace(node, parent=None)
    others = [*(other.name for other in found if other.name != node.name), *ensembles]
    renamed = f"was it renamed? The schedule has {some(others)}; " if others else ""
    hint = nearest(name, others) or f'{renamed}write `from: ""` to start from fresh weights'
    what = "neither a stage nor an ensemble" if ensembles else "not a stage"
    problems.add(place, f"stage `{node.shown}` starts from `{shown(name)}`, which is {what}", hint)
    return node


def _from_average(
    node: Node, name: str, place: Span, found: Sequence[Node], ensemble: Block, problems: Problems
) -> Node:
    """The node that starts with an ensemble's averaged weights. What is wrong with the ensemble is reported elsewhere."""
    averaged: list[tuple[str, Sequence[int | None]]] = []
    if node.parent_iter is not None:
        message = f"stage `{node.name}` starts from iteration {node.parent_iter} of `{name}`, which is an ensemble"
        problems.add(place, message, f'an ensemble has no iterations: write `from: "{name}"`')
    elif ensemble.text("rule") == "WEIGHT_AVERAGE":
        averaged = members_of(ensemble, found)
    elif "rule" not in ensemble.doubtful:
        message = f"stage `{node.shown}` starts from ensemble `{name}`, which has no weights"
        problems.add(place, message, "write `rule: WEIGHT_AVERAGE` there, or start from one of its members")
    if not averaged:
        return replace(node, parent=None, parent_iter=None)
    stage, iters = averaged[-1]
    return replace(node, parent=stage, parent_iter=iters[-1], average=name, averaged=tuple(dict(averaged)))


def members_of(ensemble: Block, found: Sequence[Node]) -> list[tuple[str, Sequence[int | None]]]:
    """The stages that the members of an ensemble stand for, and the iterations of each; none where a member can't be read."""
    entry = ensemble.entries.get("members")
    try:
        named = [members.read(str(value.value)) for value in entry.values] if entry else []
    except members.WrongMember:
        return []
    return [(stage, iters) for name, iters in named for stage in stages_of(name, found)]


def with_disabled(found: Sequence[Node]) -> list[Node]:
    """A stage below one that is not enabled, or taught by one, is not enabled either."""
    disabled: set[str] = set()
    known = -1
    while len(disabled) > known:
        known = len(disabled)
        for node in found:
            if not node.enabled or not disabled.isdisjoint(node.after):
                disabled.add(node.name)
    return [replace(node, enabled=False) if node.name in disabled else node for node in found]


@dataclass(frozen=True, slots=True)
class Ends:
    """Of the stages whose length is known: their iterations, and those that `early_stop` leaves in any case."""

    length: Mapping[str, int]
    sure: Mapping[str, int]

    def missed(self, stage: str, iter: int) -> tuple[str, str] | None:
        """Which iteration a stage doesn't have, or may not come to, and a hint; None where it does."""
        length = self.length.get(stage, iter)
        reached = min(length, self.sure.get(stage, length))
        if iter <= reached:
            return None
        last, why = (length, f"has {length}") if iter > length else (reached, f"`early_stop` may end at {reached}")
        return f"iteration {iter} of `{stage}`, which {why}", f"an iteration up to {last}, or `{stage}` for its end"


def check_branches(found: Sequence[Node], ends: Ends, problems: Problems) -> list[Node]:
    """The nodes, where an iteration that is the parent's last is its end. Reports iterations that a parent doesn't have, or may not come to."""
    checked: list[Node] = []
    for node in found:
        parent, iter, place = node.parent, node.parent_iter, node.parent_place
        if parent is not None and iter is not None and iter >= ends.length.get(parent, iter + 1):
            node = replace(node, parent_iter=None)
        checked.append(node)
        if parent is None or place is None or iter is None or node.average is not None:
            continue  # of an ensemble's it is reported there
        if wrong := ends.missed(parent, iter):
            message, hint = wrong
            problems.add(place, f"stage `{node.shown}` starts from {message}", hint)
    return checked


def in_running_order(found: Sequence[Node], problems: Problems) -> list[Node]:
    """Parents and teachers before those that need them, otherwise the order of the file. A cycle is reported once; its stages are left
    out."""
    by_name = {node.name: node for node in reversed(found)}
    order: dict[str, Node] = {}
    cyclic: set[str] = set()
    for node in found:
        path: list[str] = [] if node.name in order or node.name in cyclic else [node.name]  # each waits for the next
        while path:
            last = by_name[path[-1]]
            wanted = next((name for name in last.after if name in by_name and name not in order), None)
            if wanted is None:
                order[path.pop()] = last
            elif wanted in path or wanted in cyclic:
                if wanted in path:
                    _report_cycle([by_name[name] for name in path[path.index(wanted) :]], found, problems)
                cyclic |= set(path)
                path = []
            else:
                path.append(wanted)
    return list(order.values())


def _report_cycle(cycle: Sequence[Node], found: Sequence[Node], problems: Problems) -> None:
    """Each of the cycle waits for the next. Points at the first that waits for a teacher or an ensemble; without one at the first `from`, which
    there is, since the stage above alone makes no cycle."""
    pairs = list(zip(cycle, [*cycle[1:], cycle[0]], strict=True))
    others = [node for node, after in pairs if node.parent != after.name or node.average]
    first = next(iter(others), None) or next(node for node in found if node in cycle and node.parent_place is not None)
    at = cycle.index(first)
    waits = [_waits(*pair) for pair in [*pairs[at:], *pairs[:at]]]
    _, place, hint = waits[0]
    assert place is not None
    problems.add(place, f"stage `{first.name}` {', which '.join(words for words, _, _ in waits)}", hint)


def _waits(node: Node, after: Node) -> tuple[str, Span | None, str]:
    """Why one stage waits for another, in words, where that is written, and what to do about it."""
    if after.name in node.averaged:
        hint = "members are trained before: take others, or start elsewhere"
        return f"starts from ensemble `{node.average}` of `{after.name}`", node.parent_place, hint
    if node.parent == after.name:
        return f"starts from `{after.name}`", node.parent_place, 'start elsewhere; `from: ""` is fresh weights'
    hint = "take another teacher, or let it start elsewhere; what stands in `Schedule.solver` is for teachers, too"
    return f"is taught by `{after.name}`", node.teacher_place, hint
