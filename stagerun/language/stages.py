"""The tree of stages: names, files, parents, and the order in which they run. Pure.

One `stage` block makes a stage, or several: one for each parent that its `from` names and each `sweep` in it.
"""

import posixpath
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from stagerun.base.errors import Problems, Span, listing, nearest
from stagerun.language import members, ranges
from stagerun.language.lexer import shown
from stagerun.language.tree import SCHEDULE, Block, Entry, Value

MOST = 1000  # stages of a schedule; more is a slip of the pen in a sweep

_ITERATION = re.compile(r"[0-9]+", re.ASCII)
_FRESH = 'write `from: ""` to start from fresh weights'


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
    parent: str | None
    parent_place: Span | None  # None where the parent is not written
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


@dataclass(frozen=True, slots=True)
class _Start:
    """What a stage starts from, as written: `parent` None for the seed, `place` None where nothing is written."""

    parent: str | None
    iter: int | None = None
    place: Span | None = None

    @property
    def label(self) -> str:
        """The part of a stage's name that it makes."""
        if self.parent is None:
            return "seed"
        return self.parent if self.iter is None else f"{self.parent}_{self.iter}"


def nodes(schedule: Block, problems: Problems) -> list[Node]:
    """The stages that have a name, in the order of the file. Reports names that occur twice, files outside of the
    schedule's folder, parents that are not stages, and more than MOST stages.
    """
    named = [b for b in schedule.blocks("stage") if "name" in b.entries]
    # A stage whose name can't be read may be the one that another stage names.
    complete = len(named) == len(list(schedule.blocks("stage"))) and "stage" not in schedule.doubtful
    found: list[Node] = []
    above: list[Node] = []
    first: dict[str, Span] = {}
    for block in named:
        name, place = _text(block, "name") or "", block.entries["name"].place
        if first.setdefault(name, place) is not place:
            problems.add(place, f"two stages are named `{name}`", f"the other one stands in line {first[name].line}")
        made = list(_made_of(block, name, above, problems, MOST - len(found)))
        found += made
        above = made
        if len(found) > MOST:
            problems.add(place, f"more than {MOST} stages", "are two lists multiplied?")
            return []
    _report_doubles(found, problems)
    if complete:
        known = {node.name for node in found}
        ensembles = {_text(b, "name"): b for b in schedule.blocks("ensemble") if "name" in b.entries}
        found = [_resolved(node, found, known, ensembles, problems) for node in found]
    return with_disabled(found)


def groups(found: Sequence[Node]) -> dict[str, tuple[str, ...]]:
    """The stages that each block which makes several has become."""
    names = dict.fromkeys(node.group for node in found if node.group is not None)
    return {group: tuple(n.name for n in found if n.group == group) for group in names}


# -- a block and its stages


def _made_of(block: Block, name: str, above: Sequence[Node], problems: Problems, most: int) -> Iterator[Node]:
    """The stages of one block; one more than `most` at most, when there are too many."""
    place = block.entries["name"].place
    file = _file(block, name, problems)
    file_place = block.entries["solver"].place if "solver" in block.entries else place
    sweeps: list[Block | None] = [s for s in block.blocks("sweep") if "name" in s.entries]
    filled = "solver" not in block.entries and bool(sweeps) and all(s and "solver" in s.entries for s in sweeps)
    starts = _starts(block, name, above, problems, bool(sweeps) and all(s and "from" in s.entries for s in sweeps))
    flag = block.entries["enabled"].values[0].value if "enabled" in block.entries else True
    only = Node(
        name,
        place,
        file,
        file_place,
        None,
        None,
        None,
        flag is not False,
        solver=block.block("solver_param"),
        filled=filled,
    )
    several = "sweep" in block.entries or "sweep" in block.doubtful or len(starts) > 1
    made = 0
    for sweep in sweeps or [None]:
        own = _starts(sweep, name, above, problems) if sweep is not None and "from" in sweep.entries else starts
        for start in own:
            parts = [name] + [start.label] * (len(own) > 1)
            node = only
            if sweep is not None:
                parts.append(_text(sweep, "name") or "")
                node = replace(node, place=sweep.entries["name"].place, sweep=sweep.block("solver"))
            elif len(own) > 1 and start.place is not None:
                node = replace(node, place=start.place)
            made += 1
            if made > most + 1:
                return
            full = "_".join(parts)
            if several and len(full) > ranges.LONGEST_NAME:
                hint = f"{ranges.LONGEST_NAME} at most: it becomes part of file names"
                problems.add(node.place, f"the name of stage `{shown(full)}` has {len(full)} characters", hint)
            if several and full in SCHEDULE.fields_by_name:
                hint = f"`--set {full}...` means the field of Schedule"
                problems.add(node.place, f"`{name}` makes a stage named `{full}`", hint)
            yield replace(
                node,
                name=full,
                parent=start.parent,
                parent_place=start.place,
                parent_iter=start.iter,
                group=name if several else None,
            )


def _starts(block: Block, name: str, above: Sequence[Node], problems: Problems, unused: bool = False) -> list[_Start]:
    """What the stages of a block start from: its `from`, or else the stage above, which no one asks for if `unused`."""
    entry = block.entries.get("from")
    if entry is not None and entry.values:
        return [_start(value, name, problems) for value in _once(entry, name, problems)]
    if len(above) > 1 and not unused:
        those = [node.name for node in above]
        message = f"stage `{name}` follows on `{above[0].group}`, which stands for {some(those)}"
        hint = f'write which of them it starts from: `from: "{those[0]}"`'
        problems.add(block.entries["name"].place, message, hint)
    return [_Start(above[0].name if len(above) == 1 else None)]


def _once(entry: Entry, name: str, problems: Problems) -> Iterator[Value]:
    seen: set[object] = set()
    for value in entry.values:
        parent, mark, digits = str(value.value).partition("@")
        start = f"{parent}{mark}{digits.lstrip('0')}"
        if start in seen:
            problems.add(value.span, f"stage `{name}` starts twice from `{shown(start)}`", "name it once")
        else:
            yield value
        seen.add(start)


def _start(value: Value, name: str, problems: Problems) -> _Start:
    text = value.value if isinstance(value.value, str) else ""
    parent, mark, digits = text.partition("@")
    if not mark:
        return _Start(parent or None, None, value.span)
    if not parent:
        hint = 'write `from: "NAME@ITERATION"`; `from: ""` is fresh weights'
        problems.add(value.span, f"stage `{name}` starts from an iteration of no stage", hint)
        return _Start(None, None, value.span)
    number = digits.lstrip("0")
    if not _ITERATION.fullmatch(digits) or not number or len(number) > 18:
        hint = f'write `from: "{parent}@7638"` for `{parent}` after 7638 of its iterations'
        if digits and not number:
            hint = f"`{parent}` at 0 is what `{parent}` itself starts from: write that"
        problems.add(value.span, f"`{shown(digits)}` behind the `@` is not a number of iterations, 1 or more", hint)
        return _Start(parent, None, value.span)
    return _Start(parent, int(number), value.span)


def _text(block: Block, name: str) -> str | None:
    value = block.entries[name].values[0].value if name in block.entries else None
    return value if isinstance(value, str) else None


def _file(block: Block, name: str, problems: Problems) -> str | None:
    if block.doubtful & {"solver", "solver_param"}:
        return None
    file = _text(block, "solver")
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


def _report_doubles(found: Sequence[Node], problems: Problems) -> None:
    first: dict[str, Node] = {}
    for node in found:
        other = first.setdefault(node.name, node)
        if other is not node:
            way = f"; `{node.group}` makes it" if node.group is not None else ""
            other_way = f", where `{other.group}` makes it" if other.group is not None else ""
            hint = f"the other one stands in line {other.place.line}{other_way}"
            problems.add(node.place, f"two stages are named `{node.name}`{way}", hint)
    made = groups(found)
    for node in found:
        if node.name in made and node.group != node.name:
            hint = f"`{node.name}` stands for {some(made[node.name])}"
            problems.add(node.place, f"stage `{node.name}` has the name of a stage that makes several", hint)


def _resolved(
    node: Node,
    found: Sequence[Node],
    names: Container[str],
    ensembles: Mapping[str | None, Block],
    problems: Problems,
) -> Node:
    """The node, after its parent was looked up among the `names`, and among the ensembles."""
    if node.parent is None or node.parent_place is None or node.parent in names:
        return node
    if node.parent in ensembles and node.parent not in groups(found):
        return _from_average(node, found, ensembles[node.parent], problems)
    those = groups(found).get(node.parent)
    if those:
        message = f"stage `{node.group or node.name}` starts from `{node.parent}`, which stands for {some(those)}"
        problems.add(node.parent_place, message, f'name one of them, `from: "{those[0]}"`, or several')
        return replace(node, parent=None)
    averages = [name for name in ensembles if name is not None]
    names = [*(other.name for other in found if other.name != node.name), *averages]
    others = (
        f"was it renamed? {'The other one is' if len(names) == 1 else 'The others are'} {some(names)}; "
        if names
        else ""
    )
    hint = nearest(node.parent, names) or others + _FRESH
    what = "neither a stage nor an ensemble" if averages else "not a stage"
    message = f"stage `{node.group or node.name}` starts from `{shown(node.parent)}`, which is {what}"
    problems.add(node.parent_place, message, hint)
    return node


def _from_average(node: Node, found: Sequence[Node], block: Block, problems: Problems) -> Node:
    """The node that starts with an ensemble's averaged weights. What is wrong with the ensemble is reported elsewhere."""
    name, place = node.parent, node.parent_place
    assert name is not None and place is not None
    nowhere = replace(node, parent=None, parent_iter=None)
    if node.parent_iter is not None:
        message = f"stage `{node.name}` starts from iteration {node.parent_iter} of `{name}`, which is an ensemble"
        problems.add(place, message, f'an ensemble has no iterations: write `from: "{name}"`')
        return nowhere
    if _text(block, "rule") != "WEIGHT_AVERAGE":
        if "rule" not in block.doubtful:
            message = f"stage `{node.group or node.name}` starts from ensemble `{name}`, which has no weights"
            problems.add(place, message, "write `rule: WEIGHT_AVERAGE` there, or start from one of its members")
        return nowhere
    last: tuple[str, int | None] | None = None
    averaged: list[str] = []
    for value in block.entries["members"].values if "members" in block.entries else ():
        try:
            stage, iters = members.read(str(value.value))
        except members.WrongMember:
            return nowhere
        for member in stages_of(stage, found):
            averaged.append(member)
            last = member, iters[-1]
    if last is None:
        return nowhere
    averaged = list(dict.fromkeys(averaged))
    return replace(node, parent=last[0], parent_iter=last[1], average=name, averaged=tuple(averaged))


def stages_of(name: str, found: Sequence[Node]) -> list[str]:
    """The stage of that name, or those that the block of that name makes."""
    return [n.name for n in found if n.group == name] or [n.name for n in found if n.name == name]


def some(names: Sequence[str]) -> str:
    """`a`, `b` and `c`; of many, the first."""
    if len(names) > 4:
        return ", ".join(f"`{n}`" for n in names[:3]) + f" and {len(names) - 3} others"
    return listing(names, "and")


def with_disabled(found: Sequence[Node]) -> list[Node]:
    """A stage below one that is not enabled, or taught by one, is not enabled either."""
    children: dict[str, list[str]] = {}
    for node in found:
        for above in node.after:
            children.setdefault(above, []).append(node.name)
    disabled: set[str] = set()
    waiting = [node.name for node in found if not node.enabled]
    while waiting:
        name = waiting.pop()
        if name not in disabled:
            disabled.add(name)
            waiting += children.get(name, [])
    return [replace(node, enabled=node.name not in disabled) for node in found]


def check_branches(
    found: Sequence[Node], lengths: Mapping[str, int], sure: Mapping[str, int], problems: Problems
) -> list[Node]:
    """The nodes, where an iteration that is the parent's last is its end. `lengths` has the iterations of the stages that
    are known, and `sure` those that `early_stop` leaves in any case. Reports iterations that a parent doesn't have, or may not come to, and
    an end that is written both ways.
    """

    def checked(node: Node) -> Node:
        length = lengths.get(node.parent or "")
        if node.parent_iter is None or length is None:
            return node
        if node.average is not None:
            pass  # reported of the ensemble
        elif node.parent_iter > length:
            assert node.parent_place is not None
            message = (
                f"stage `{node.name}` starts from iteration {node.parent_iter} of `{node.parent}`, which has {length}"
            )
            problems.add(node.parent_place, message, f"an iteration up to {length}, or `{node.parent}` for its end")
        elif (reached := sure.get(node.parent or "", length)) < min(node.parent_iter, length):
            assert node.parent_place is not None
            message = f"stage `{node.name}` starts from iteration {node.parent_iter} of `{node.parent}`, which `early_stop` may end at {reached}"
            problems.add(node.parent_place, message, f"an iteration up to {reached}, or `{node.parent}` for its end")
        return replace(node, parent_iter=None) if node.parent_iter >= length else node

    made = [checked(node) for node in found]
    _report_twice(made, problems)
    return made


def _report_twice(found: Sequence[Node], problems: Problems) -> None:
    """Members of a group that start from the same place, with the same entry of `sweep`, whose place is then theirs."""
    seen: set[object] = set()
    for node in found:
        start = (
            node.group,
            node.parent,
            node.parent_iter,
            node.average,
            None if node.place == node.parent_place else node.place,
        )
        if start in seen and node.group is not None and node.parent is not None and node.parent_place is not None:
            where = (
                f"`{node.parent}@{node.parent_iter}`" if node.parent_iter is not None else f"the end of `{node.parent}`"
            )
            problems.add(node.parent_place, f"stage `{node.group}` starts twice from {where}", "name it once")
        seen.add(start)


def in_running_order(found: Sequence[Node], problems: Problems) -> list[Node]:
    """Parents and teachers before those that need them, otherwise the order of the file. A cycle is reported once; its stages are left
    out."""
    by_name = {node.name: node for node in reversed(found)}
    order: list[Node] = []
    placed: set[str] = set()
    cyclic: set[str] = set()
    for node in found:
        path = [node] if node.name not in placed | cyclic else []  # each waits for the next
        while path:
            last, on_way = path[-1], [n.name for n in path]
            waits = [name for name in last.after if name in by_name and name not in placed]
            if not waits:
                order.append(last)
                placed.add(last.name)
                path.pop()
            elif waits[0] in cyclic or waits[0] in on_way:
                if waits[0] in on_way:
                    _report_cycle(path[on_way.index(waits[0]) :], found, problems)
                cyclic |= set(on_way)
                path = []
            else:
                path.append(by_name[waits[0]])
    return order


def _report_cycle(cycle: Sequence[Node], found: Sequence[Node], problems: Problems) -> None:
    """Each of the cycle waits for the next. Points at the first `from`; there is one, since the stage above alone makes none."""
    if any(
        node.parent != after.name or node.average for node, after in zip(cycle, [*cycle[1:], cycle[0]], strict=True)
    ):
        _report_lessons(cycle, problems)
        return
    first = next(n for n in found if n in cycle and n.parent_place is not None)
    assert first.parent_place is not None
    at = list(cycle).index(first)
    hint = 'start one of them elsewhere; `from: ""` is fresh weights'
    if len(cycle) == 1:
        problems.add(first.parent_place, f"stage `{first.name}` starts from itself", hint.replace("one of them", "it"))
        return
    way = ", which starts from ".join(f"`{n.name}`" for n in [*cycle[at + 1 :], *cycle[:at], first])
    problems.add(first.parent_place, f"stage `{first.name}` starts from {way}", hint)


def _report_lessons(cycle: Sequence[Node], problems: Problems) -> None:
    """A cycle with a teacher or an ensemble in it: points at the first."""
    pairs = list(zip(cycle, [*cycle[1:], cycle[0]], strict=True))
    at = next(i for i, (node, after) in enumerate(pairs) if node.parent != after.name or node.average)
    first, place = cycle[at], cycle[at].teacher_place
    if first.teacher != pairs[at][1].name:
        place = first.parent_place
    assert place is not None
    if len(cycle) == 1 and place is first.teacher_place:
        hint = "name another stage; what stands in `Schedule.solver` is for all stages, the teacher too"
        problems.add(place, f"stage `{first.name}` is its own teacher", hint)
        return
    words = [_waits(node, after) for node, after in [*pairs[at:], *pairs[:at]]]
    hint = "a teacher is trained before: take another one, or let it start elsewhere"
    if place is not first.teacher_place:
        hint = "members are trained before: take others, or start elsewhere"
    problems.add(place, f"stage `{first.name}` {', which '.join(words)}", hint)


def _waits(node: Node, after: Node) -> str:
    """Why one stage waits for another, in words."""
    if after.name in node.averaged:
        return f"starts from ensemble `{node.average}` of `{after.name}`"
    return f"{'starts from' if node.parent == after.name else 'is taught by'} `{after.name}`"
