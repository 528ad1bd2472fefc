"""The processors of one machine, and which of them each worker gets: values and pure functions, and one reader of /sys.

Nothing here moves a process: `stagerun.binding` does.
"""

from stagerun.topology.described import as_json, describe, parse, picture
from stagerun.topology.machine import Core, Gpu, Machine, Node, ranges, read
from stagerun.topology.placing import Plan, Seat, make_plan
from stagerun.topology.sharing import BATCH_JOBS, Choice, Found, Share, choose, default_workers, share

__all__ = [
    "BATCH_JOBS",
    "Choice",
    "Core",
    "Found",
    "Gpu",
    "Machine",
    "Node",
    "Plan",
    "Seat",
    "Share",
    "as_json",
    "choose",
    "default_workers",
    "describe",
    "make_plan",
    "parse",
    "picture",
    "ranges",
    "read",
    "share",
]
