"""What solvers leave behind: at which iterations there is a snapshot, and under which name. Pure."""

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass

from stagerun.caffe_import.stages import Step
from stagerun.caffe_import.text import CaffeText
from stagerun.errors import listing, nearest
from stagerun.spec.view import Doubtful, View


@dataclass(frozen=True, slots=True)
class Saved:
    """The snapshots of a solver, at iterations as Caffe counts them. `begins`: the one that it starts at, 0 unless it goes on
    from another solver's; `length`: the one that it ends at."""

    prefix: str
    begins: int
    length: int
    every: int
    at_end: bool

    def has(self, iteration: int) -> bool:
        regular = self.every > 0 and iteration % self.every == 0
        if iteration == self.length > self.begins:
            return self.at_end or regular
        return self.begins < iteration < self.length and regular


def saved(text: CaffeText, begins: int = 0) -> Saved | None:
    """None where a mistake, which is reported, leaves it open."""
    view = View(text.block)
    try:
        prefix, length = view.text("snapshot_prefix"), view.whole("max_iter")
        # Without a prefix, Caffe takes the solver's own name (BVLC), or fails.
        prefix = prefix if prefix is not None else posixpath.basename(text.path).removesuffix(".prototxt")
        if length is None:
            return None
        return Saved(prefix, begins, length, view.whole("snapshot") or 0, view.flag("snapshot_after_train"))
    except Doubtful:
        return None


@dataclass(frozen=True, slots=True)
class Sought:
    """Solvers that may have made a snapshot. `saved`: all, by file. `fitting`: those with its prefix; `earlier`: those of them
    that are trained before; `makers`: those of them that save that iteration."""

    saved: Mapping[str, Saved]
    fitting: tuple[str, ...]
    earlier: tuple[str, ...]
    makers: tuple[str, ...]


def seek(prefix: str, iteration: int, steps: Mapping[str, Step], texts: Mapping[str, CaffeText]) -> Sought:
    """Who makes PREFIX_iter_N. `steps` are what is trained before, by file. The prefix may stand in another folder."""
    known = {file: s for file in texts if (s := saved(texts[file], _begins(steps.get(file)))) is not None}
    fitting = [f for f, s in known.items() if s.prefix == prefix] or [
        f for f, s in known.items() if posixpath.basename(s.prefix) == posixpath.basename(prefix)
    ]
    earlier = tuple(f for f in fitting if f in steps)
    return Sought(known, tuple(fitting), earlier, tuple(f for f in earlier if known[f].has(iteration)))


def _begins(step: Step | None) -> int:
    return step.begins if step else 0


def when(found: Saved, iteration: int) -> str:
    """Where there are snapshots, as a hint."""
    there = []
    if found.every > 0:
        below = min(iteration, found.length) // found.every * found.every
        there = [i for i in (below, below + found.every) if found.has(i)]
    there += [found.length] if found.at_end and found.length not in there else []
    said = "snapshot: every " + str(found.every) if found.every else "only at the end" if found.at_end else "none"
    return f"{said} of {found.length} iterations" + (
        f"; there is one at {' and '.join(map(str, there))}" if there else ""
    )


def saved_by(sought: Sought, wanted: str, steps: Mapping[str, Step]) -> str:
    """What the stages before make, as a hint to a name that none makes."""
    ending = ".solverstate" if ".solverstate" in wanted else ".caffemodel"
    known = [f"{s.prefix}_iter_{s.length}{ending}" for f, s in sought.saved.items() if f in steps]
    return nearest(wanted, known) or (f"the stages before make {listing(known)}" if known else "")
