"""How one command becomes many workers: `local` on this machine, `hosts` over ssh, `meeting` under MPI, Slurm or torchrun.

`start` starts a job's workers here, and is what one worker does around its job; `watch/` sees a worker that hangs.
Torch is imported only inside functions that start workers. A new launcher is a function in `meeting`.
"""

from stagerun.launch.local import run_workers
from stagerun.launch.stopping import GRACE_S, StopRequest, die_with_launcher

__all__ = ["GRACE_S", "StopRequest", "die_with_launcher", "run_workers"]
