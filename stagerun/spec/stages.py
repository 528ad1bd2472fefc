"""The tree of stages: names, files, parents, and the order in which they run. Pure."""

import posixpath
from collections.abc import Sequence
from dataclasses import dataclass

from stagerun.errors import Span, nearest
from stagerun.spec.problems import Problems
from stagerun.spec.tree import Block


@dataclass(frozen=True, slots=True)
class Node:
    """A stage as schedule.prototxt has it. `parent` is a name, None for the seed. `file` is relative to the schedule's
    folder, None if it can't be (that has been reported). `file_place` is what to point at if the file can't be read.
    """

    name: str
    place: Span
    file: str | None
    file_place: Span
    parent: str | None
    parent_place: Span | None  # None where the parent is not written


def nodes(schedule: Block, problems: Problems) -> list[Node]:
    """The stages that have a name, in the order of the file. Reports names that occur twice, files outside of the
    schedule's folder, and parents that are no stage.
    """
    named = [b for b in schedule.blocks("stage") if "name" in b.entries]
    # A stage whose name can't be read may be the one that another one means.
    complete = len(named) == len(list(schedule.blocks("stage"))) and "stage" not in schedule.doubtful
    names = [_text(b, "name") or "" for b in named]
    found: list[Node] = []
    for number, block in enumerate(named):
        name, place = names[number], block.entries["name"].place
        if name in names[:number]:
            line = named[names.index(name)].entries["name"].place.line
            problems.add(place, f"two stages are named `{name}`", f"the other one stands in line {line}")
        parent = names[number - 1] if number else None
        parent_place = None
        if "from" in block.entries:
            parent, parent_place = _text(block, "from") or None, block.entries["from"].place
            if parent is not None and parent not in names and complete:
                hint = nearest(parent, names) or 'write `from: ""` to start from fresh weights'
                problems.add(parent_place, f"stage `{name}` starts from `{parent}`, which is no stage", hint)
        file = _file(block, name, problems)
        file_place = block.entries["solver"].place if "solver" in block.entries else place
        found.append(Node(name, place, file, file_place, parent, parent_place))
    return found


def _text(block: Block, name: str) -> str | None:
    value = block.entries[name].values[0].value if name in block.entries else None
    return value if isinstance(value, str) else None


def _file(block: Block, name: str, problems: Problems) -> str | None:
    if "solver" in block.doubtful:
        return None
    file = _text(block, "solver")
    if file is None:
        return f"{name}.prototxt"
    normal = posixpath.normpath(file)
    if posixpath.isabs(file) or normal == ".." or normal.startswith("../"):
        hint = "a stage's file lies in the schedule's folder, so that the folder can be moved and copied whole"
        problems.add(block.entries["solver"].place, f"`{file}` is outside of the schedule's folder", hint)
        return None
    return normal


def in_running_order(found: Sequence[Node], problems: Problems) -> list[Node]:
    """Parents before children, otherwise the order of the file. A cycle is reported once; its stages are left out."""
    by_name = {node.name: node for node in reversed(found)}
    order: list[Node] = []
    placed: set[str] = set()
    cyclic: set[str] = set()
    for node in found:
        chain: list[Node] = []
        above: Node | None = node
        while above is not None and above.name not in placed and above.name not in cyclic and above not in chain:
            chain.append(above)
            above = by_name.get(above.parent) if above.parent is not None else None
        if above is not None and above in chain:
            _report_cycle(chain[chain.index(above) :], found, problems)
        if above is not None and above.name not in placed:
            cyclic |= {n.name for n in chain}
            continue
        order += reversed(chain)
        placed |= {n.name for n in chain}
    return order


def _report_cycle(cycle: Sequence[Node], found: Sequence[Node], problems: Problems) -> None:
    """Points at the first `from` of the cycle; there is one, since the stage above alone makes none."""
    first = next(n for n in found if n in cycle and n.parent_place is not None)
    assert first.parent_place is not None
    at = list(cycle).index(first)
    hint = 'start one of them elsewhere; `from: ""` is fresh weights'
    if len(cycle) == 1:
        problems.add(first.parent_place, f"stage `{first.name}` starts from itself", hint.replace("one of them", "it"))
        return
    way = ", which starts from ".join(f"`{n.name}`" for n in [*cycle[at + 1 :], *cycle[:at], first])
    problems.add(first.parent_place, f"stage `{first.name}` starts from {way}", hint)
