"""How the same command reaches several workers."""

from stagerun.launch.folder import report
from stagerun.launch.kin import bound_note
from stagerun.launch.local import run_workers
from stagerun.launch.meeting import go_there, meet, place_note
from stagerun.launch.stopping import GRACE_S, StopRequest, die_with_launcher

__all__ = [
    "GRACE_S",
    "StopRequest",
    "bound_note",
    "die_with_launcher",
    "go_there",
    "meet",
    "place_note",
    "report",
    "run_workers",
]
