"""How one command becomes many workers: `local` on this machine, `hosts` over ssh, `meeting` under MPI, Slurm or torchrun.

`work` is a process that is, or starts, workers; `watch/` sees a worker that hangs; `placing` gives each its cores. Torch is imported only inside
functions that start workers. A new launcher is a function in `meeting`.
"""

from stagerun.launch.ancestors import bound_note
from stagerun.launch.folder import report
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
