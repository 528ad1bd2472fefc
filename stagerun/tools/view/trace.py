"""What a run has done, as the page shows it: values."""

from dataclasses import dataclass
from typing import NamedTuple

from stagerun.tools.report.history import History

# Kinds of incidents, the worst first, and the sign of each.
SIGNS = {"rollback": "\N{BLACK LEFT-POINTING TRIANGLE}", "warning": "!", "restart": "\N{BLACK UP-POINTING TRIANGLE}"}


class Incident(NamedTuple):
    """`kind` is a key of SIGNS."""

    stage: str
    iter: int
    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What one run has done, drawn over the plan. `label` is '' where there is one run; `snapshots`, (stage, iteration), are on
    disk; `now` is where it is, None before its first stage."""

    label: str
    history: History
    snapshots: tuple[tuple[str, int], ...] = ()
    now: tuple[str, int] | None = None
    marks: tuple[Incident, ...] = ()
    alive: bool = False
