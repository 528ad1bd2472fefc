"""What a snapshot's files say of the state that a proof is of; with torch, which the command loads late."""

import math
from collections.abc import Collection, Mapping

from stagerun.base.recipe import Stage
from stagerun.base.snapshots import SnapshotRef
from stagerun.engine.codec import combined, decode, mixed
from stagerun.engine.codec import digest as on_host
from stagerun.engine.device import differences
from stagerun.engine.state import counters
from stagerun.schedule import parting
from stagerun.schedule.early_stop import NOTHING_YET
from stagerun.schedule.plateau import FRESH
from stagerun.train.progress import AVERAGE, MOMENTUM, REPLICAS, WEIGHTS, progress_of


def state_in(stage: Stage, ref: SnapshotRef, files: Mapping[str, bytes]) -> str:
    """The digest of a snapshot's state as a Proof has it. KeyError, ValueError for what no run writes."""
    solver, progress = stage.solver, progress_of(files)
    digest = on_host if ref.environment.get("device") == "cpu" else mixed
    found = {name: digest(t) for file in (WEIGHTS, MOMENTUM) for name, t in decode(files[file]).items()}
    if AVERAGE in files:
        found |= {f"ema/{name}": digest(t) for name, t in decode(files[AVERAGE]).items()}
    if solver.sync is not None and REPLICAS in files and ref.iter > parting(solver):
        # Of the first replica: its own tensors, and those that all have in common.
        first = {n.partition("/")[2]: digest(t) for n, t in decode(files[REPLICAS]).items() if n.startswith("0/")}
        found = {f"0/{name}": first.get(name, known) for name, known in found.items()}
    of_plateau = progress.plateau or FRESH
    kept = (ref.iter, of_plateau, NOTHING_YET, progress.skips, progress.skips_in_all, progress.rollbacks)
    return f"{combined(found | counters(*kept)):016x}"


def unlike(theirs: SnapshotRef, mine: SnapshotRef, elastic: bool, same: Collection[str]) -> list[str]:
    """Why the bits of two snapshots need not be the same, but for what was chosen to be the `same`."""
    before, now = ({n: text for n, text in ref.environment.items() if n not in same} for ref in (theirs, mine))
    return differences(before, now, elastic)


def distance(theirs: Mapping[str, bytes], mine: Mapping[str, bytes], before: Mapping[str, bytes] | None) -> float:
    """How far the weights of two snapshots are apart, as a share of how far the first has come since `before` (None: of its norm)."""
    a, b = decode(theirs[WEIGHTS]), decode(mine[WEIGHTS])
    start = decode(before[WEIGHTS]) if before is not None else {}
    apart = way = 0.0
    for name, tensor in a.items():
        if tensor.is_floating_point() and name in b:
            apart += float((tensor.double() - b[name].double()).square().sum())
            way += float((tensor.double() - (start[name].double() if name in start else 0.0)).square().sum())
    return math.sqrt(apart / way) if way else 0.0
