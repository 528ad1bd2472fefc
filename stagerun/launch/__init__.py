"""Workers of one command: `local` starts them on this machine, `hosts` over ssh; under MPI, Slurm or torchrun `start` finds where they meet.

`start` is also what a worker does around its job; `monitor` detects a worker that hangs. Torch is imported only inside functions that start
workers. A new launcher is a row of `system.world` and a case in `start.meet`.
"""

# ruff: noqa: F401 (its imports are its names)

from stagerun.launch.local import run_workers
from stagerun.launch.stopping import GRACE_S, StopRequest, die_with_launcher, start_command
