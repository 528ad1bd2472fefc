"""The tree of stages: names, files, parents, members of ensembles, and the running order. Pure.

One `stage` block makes a stage, or several: one for each parent in its `from` and each `sweep` in it.
"""

import posixpath
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from stagerun.base.errors import Problems, Span, nearest
from stagerun.base.recipe import BEST, EMA
from stagerun.base.text import listed
from stagerun.language import ranges
from stagerun.language.lexer import shown
from stagerun.language.ranges import WrongMember, read_member
from stagerun.language.tree import Block, Value

MOST = 1000  # stages of a schedule; more is a mistake in a sweep

_ITERATION = re.compile(r"0*([1-9][0-9]{0,17})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Node:
    """A stage as schedule.prototxt has it. `parent`: a name, None for fresh weights; `parent_iter`: the iteration after the `@`,
    `parent_at`: BEST or EMA instead. `file`:
    relative to the schedule's folder, None if `solver` (its `solver_param`) replaces it, or after a mistake. `file_place`: for a message
    that the file can't be read; if `filled`, by sweeps, the file may be missing. `group`: the name of the block if it makes several
    stages; `sweep`: the changes of the stage's entry in it. A stage below a disabled one is disabled.
    """

    name: str
    place: Span
    file: str | None
    file_place: Span
    parent: str | None = None
    parent_place: Span | None = None  # None if the parent is not written
    parent_iter: int | None = None
    parent_at: str | None = None
    enabled: bool = True
    group: str | None = None
    sweep: Block | None = None
    solver: Block | None = None
    filled: bool = False
    teacher: str | None = None  # set by `references`, from the stage's settings
    teacher_place: Span | None = None
    average: str | None = None  # the ensemble whose averaged weights it starts with; `parent` is its last member
    averaged: tuple[str, ...] = ()  # the stages of that ensemble

    @property
    def after(self) -> tuple[str, ...]:
        """Return the stages that are trained before this one."""
        return tuple(dict.fromkeys(n for n in (self.parent, self.teacher, *self.averaged) if n is not None))

    @property
    def shown(self) -> str:
        """Return the stage's block, for a message about the start of all its stages."""
        return self.group or self.name


def nodes(schedule: Block, problems: Problems) -> list[Node]:
    """Return the stages that have a name, in the order of the file. Report duplicate names, files outside of the
    schedule's folder, parents that are not stages, and more than MOST stages."""
    all_nodes: list[Node] = []
    above: list[Node] = []
    lines: dict[str, str] = {}  # by name, as a hint
    for block in schedule.blocks("stage"):
        if "name" not in block.entries:
            continue
        name, span = block.text("name") or "", block.entries["name"].place
        above = list(islice(_made_of(block, name, above, problems), MOST - len(all_nodes) + 1))
        all_nodes += above
        if len(all_nodes) > MOST:
            problems.add(span, f"more than {MOST} stages", "are two lists multiplied?")
            return []
        made = [(node.name, node.place, f"`{name}` makes it") for node in above if node.name != name]
        for each, at, maker in [(name, span, ""), *made]:
            if each in lines:
                message = f"two stages are named `{each}`{'; ' if maker else ''}{maker}"
                problems.add(at, message, f"the other one is in line {lines[each]}")
            lines.setdefault(each, f"{at.line}{', where ' if maker else ''}{maker}")
    if all_named(schedule):
        names = {node.name for node in all_nodes}
        ensembles = {b.text("name") or "": b for b in schedule.blocks("ensemble") if "name" in b.entries}
        all_nodes = [_resolved(node, all_nodes, names, ensembles, problems) for node in all_nodes]
    return with_disabled(all_nodes)


def all_named(schedule: Block) -> bool:
    """Return whether the name of every stage could be read; if not, a `from` or a member may mean an unread one."""
    stages = list(schedule.blocks("stage"))
    blocks = [schedule, *stages, *(sweep for stage in stages for sweep in stage.blocks("sweep"))]
    doubtful = any(b.doubtful & {"stage", "name", "from", "sweep"} or b.broken for b in blocks)
    return not doubtful and all("name" in stage.entries for stage in stages)


def groups(nodes: Sequence[Node]) -> dict[str, list[str]]:
    """Return the stages of each block that makes several."""
    made: dict[str, list[str]] = {}
    for node in nodes:
        if node.group is not None:
            made.setdefault(node.group, []).append(node.name)
    return made


def names_of(nodes: Sequence[Node]) -> list[str]:
    """Return the names of the stages, and of the blocks that make several."""
    return list(dict.fromkeys([*(node.name for node in nodes), *groups(nodes)]))


def stages_of(name: str, nodes: Sequence[Node]) -> list[str]:
    """Return the stage of that name, or the stages of the block of that name."""
    return groups(nodes).get(name) or [n.name for n in nodes if n.name == name]


def some(names: Sequence[str]) -> str:
    """Return "`a`, `b` and `c`", or the first of many."""
    return listed([f"`{name}`" for name in names], 3)


# -- a block and its stages


def _made_of(block: Block, name: str, above: Sequence[Node], problems: Problems) -> Iterator[Node]:
    """Yield the stages of one block. `above`: the previous block's."""
    span = block.entries["name"].place
    sweeps: list[Block | None] = [s for s in block.blocks("sweep") if "name" in s.entries]
    swept = {field for field in ("from", "solver") if sweeps and all(s and field in s.entries for s in sweeps)}
    written, flag = block.entries.get("solver"), block.entries.get("enabled")
    only = Node(
        name,
        span,
        _file(block, name, problems),
        written.place if written else span,
        enabled=flag is None or flag.values[0].value is not False,
        solver=block.block("solver_param"),
        filled=written is None and "solver" in swept,
    )
    shared = _starts(block, only, [] if "from" in swept else above, problems)
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
    """Return the part of a stage's name that names its start."""
    if node.parent is None:
        return "seed"
    return "_".join(filter(None, (node.parent, node.parent_at or str(node.parent_iter or ""))))


def _starts(block: Block, node: Node, above: Sequence[Node], problems: Problems) -> list[Node]:
    """Return a copy of the node for each stage in the block's `from`, else one with the stage above as its parent."""
    entry = block.entries.get("from")
    if entry is None or not entry.values:
        if len(above) > 1:
            names = [other.name for other in above]
            message = f"stage `{node.name}` follows `{above[0].group}`, which makes {some(names)}"
            hint = f'write which of them it starts from: `from: "{names[0]}"`'
            problems.add(block.entries["name"].place, message, hint)
        return [replace(node, parent=above[0].name if len(above) == 1 else None)]
    starts = []
    for value in entry.values:
        parent, mark, digits = str(value.value).partition("@")
        word = digits if parent and digits in (BEST, EMA) else None
        iter = _iteration(value, node.name, parent, digits, problems) if mark and word is None else None
        start = replace(node, parent=parent or None, parent_place=value.span, parent_iter=iter, parent_at=word)
        starts.append(start)
    return starts


def _iteration(value: Value, name: str, parent: str, digits: str, problems: Problems) -> int | None:
    """Return the iteration after the `@` of a start; None after a mistake."""
    number = _ITERATION.fullmatch(digits)
    if not parent:
        hint = 'write `from: "NAME@ITERATION"`; `from: ""` is fresh weights'
        problems.add(value.span, f"stage `{name}` starts from an iteration without a stage", hint)
    elif number is None:
        hint = f'write `from: "{parent}@7638"` for `{parent}` after 7638 of its iterations, or `@best`, `@ema`'
        if digits and not digits.strip("0"):
            hint = f"write the start of `{parent}` instead of `{parent}` at 0"
        problems.add(value.span, f"`{shown(digits)}` after the `@` is not a number of iterations, 1 or more", hint)
    else:
        return int(number[1])
    return None


def _file(block: Block, name: str, problems: Problems) -> str | None:
    """Return the file of a stage's settings, below the schedule's folder; None after a mistake or with `solver_param`."""
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
        hint = "a stage's file must be in the schedule's folder, so that the folder can be moved and copied whole"
        problems.add(block.entries["solver"].place, f"`{file}` is outside of the schedule's folder", hint)
        return None
    return normal


# -- the stages of all blocks


def _resolved(
    node: Node, nodes: Sequence[Node], names: Container[str], ensembles: Mapping[str, Block], problems: Problems
) -> Node:
    """Look up the node's parent among the `names` and the ensembles."""
    name, span = node.parent, node.parent_place
    if name is None or span is None or name in names:
        return node
    made = groups(nodes)
    if name in ensembles and name not in made:
        return _from_average(node, name, span, nodes, ensembles[name], problems)
    if name in made:
        message = f"stage `{node.shown}` starts from `{name}`, which makes {some(made[name])}"
        problems.add(span, message, f'name one of them, `from: "{made[name][0]}"`, or several')
        return replace(node, parent=None)
    others = [*(other.name for other in nodes if other.name != node.name), *ensembles]
    renamed = f"was it renamed? The schedule has {some(others)}; " if others else ""
    hint = nearest(name, others) or f'{renamed}write `from: ""` to start from fresh weights'
    what = "neither a stage nor an ensemble" if ensembles else "not a stage"
    problems.add(span, f"stage `{node.shown}` starts from `{shown(name)}`, which is {what}", hint)
    return node


def _from_average(
    node: Node, name: str, span: Span, nodes: Sequence[Node], ensemble: Block, problems: Problems
) -> Node:
    """Return the node that starts with an ensemble's averaged weights. Mistakes in the ensemble are reported elsewhere."""
    averaged: list[tuple[str, Sequence[int | None]]] = []
    if node.parent_iter is not None or node.parent_at is not None:
        at = f"iteration {node.parent_iter}" if node.parent_at is None else f"`@{node.parent_at}`"
        message = f"stage `{node.name}` starts from {at} of `{name}`, which is an ensemble"
        problems.add(span, message, f'an ensemble has no iterations: write `from: "{name}"`')
    elif ensemble.text("rule") == "WEIGHT_AVERAGE":
        averaged = members_of(ensemble, nodes)
    elif "rule" not in ensemble.doubtful:
        message = f"stage `{node.shown}` starts from ensemble `{name}`, which has no weights"
        problems.add(span, message, "write `rule: WEIGHT_AVERAGE` in the ensemble, or start from one of its members")
    if not averaged:
        return replace(node, parent=None, parent_iter=None, parent_at=None)
    stage, iters = averaged[-1]
    return replace(node, parent=stage, parent_iter=iters[-1], average=name, averaged=tuple(dict(averaged)))


def members_of(ensemble: Block, nodes: Sequence[Node]) -> list[tuple[str, Sequence[int | None]]]:
    """Return the stages of an ensemble's members with their iterations; [] if a member can't be read."""
    entry = ensemble.entries.get("members")
    try:
        named = [read_member(str(value.value)) for value in entry.values] if entry else []
    except WrongMember:
        return []
    return [(stage, iters) for name, iters in named for stage in stages_of(name, nodes)]


def with_disabled(nodes: Sequence[Node]) -> list[Node]:
    """Disable stages whose parent, teacher or ensemble is disabled."""
    disabled: set[str] = set()
    before = -1
    while len(disabled) > before:
        before = len(disabled)
        for node in nodes:
            if not node.enabled or not disabled.isdisjoint(node.after):
                disabled.add(node.name)
    return [replace(node, enabled=False) if node.name in disabled else node for node in nodes]


@dataclass(frozen=True, slots=True)
class Ends:
    """The iterations of the stages whose length is known, and the iterations they reach in spite of `early_stop`."""

    length: Mapping[str, int]
    sure: Mapping[str, int]

    def missed(self, stage: str, iter: int) -> tuple[str, str] | None:
        """Return a message and a hint if a stage lacks the iteration, or may not reach it; else None."""
        length = self.length.get(stage, iter)
        reached = min(length, self.sure.get(stage, length))
        if iter <= reached:
            return None
        last, why = (length, f"has {length}") if iter > length else (reached, f"`early_stop` may end at {reached}")
        return f"iteration {iter} of `{stage}`, which {why}", f"an iteration up to {last}, or `{stage}` for its end"


def check_branches(nodes: Sequence[Node], ends: Ends, problems: Problems) -> list[Node]:
    """Replace a parent's last iteration by its end. Report iterations that a parent lacks, or may not reach."""
    checked: list[Node] = []
    for node in nodes:
        parent, iter, span = node.parent, node.parent_iter, node.parent_place
        if parent is not None and iter is not None and iter >= ends.length.get(parent, iter + 1):
            node = replace(node, parent_iter=None)
        checked.append(node)
        if parent is None or span is None or iter is None or node.average is not None:
            continue  # an ensemble reports its members
        if wrong := ends.missed(parent, iter):
            message, hint = wrong
            problems.add(span, f"stage `{node.shown}` starts from {message}", hint)
    return checked


def in_running_order(nodes: Sequence[Node], problems: Problems) -> list[Node]:
    """Return the nodes in the order of the file, but parents and teachers first. Report each cycle once and leave its stages out."""
    by_name = {node.name: node for node in reversed(nodes)}
    order: dict[str, Node] = {}
    cyclic: set[str] = set()
    for node in nodes:
        path: list[str] = [] if node.name in order or node.name in cyclic else [node.name]  # each waits for the next
        while path:
            last = by_name[path[-1]]
            wanted = next((name for name in last.after if name in by_name and name not in order), None)
            if wanted is None:
                order[path.pop()] = last
            elif wanted in path or wanted in cyclic:
                if wanted in path:
                    _report_cycle([by_name[name] for name in path[path.index(wanted) :]], nodes, problems)
                cyclic |= set(path)
                path = []
            else:
                path.append(wanted)
    return list(order.values())


def _report_cycle(cycle: Sequence[Node], nodes: Sequence[Node], problems: Problems) -> None:
    """Report a cycle, in which each node waits for the next, at the first that waits for a teacher or an ensemble, else at the first `from`,
    which must exist: a missing `from` means the stage above, which can't close a cycle."""
    pairs = list(zip(cycle, [*cycle[1:], cycle[0]], strict=True))
    others = [node for node, after in pairs if node.parent != after.name or node.average]
    first = next(iter(others), None) or next(node for node in nodes if node in cycle and node.parent_place is not None)
    at = cycle.index(first)
    waits = [_waits(*pair) for pair in [*pairs[at:], *pairs[:at]]]
    _, span, hint = waits[0]
    assert span is not None
    problems.add(span, f"stage `{first.name}` {', which '.join(words for words, _, _ in waits)}", hint)


def _waits(node: Node, after: Node) -> tuple[str, Span | None, str]:
    """Return why one stage waits for another, the span, and a hint."""
    if after.name in node.averaged:
        hint = "members are trained first: take other members, or another start"
        return f"starts from ensemble `{node.average}` of `{after.name}`", node.parent_place, hint
    if node.parent == after.name:
        return f"starts from `{after.name}`", node.parent_place, 'take another start; `from: ""` is fresh weights'
    hint = "take another teacher, or another start; settings in `Schedule.solver` apply to teachers, too"
    return f"is taught by `{after.name}`", node.teacher_place, hint
