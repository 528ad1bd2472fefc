"""How the same command reaches several workers."""

from stagerun.launch.local import report, run_workers
from stagerun.launch.process import StopRequest, die_with_launcher

__all__ = ["StopRequest", "die_with_launcher", "report", "run_workers"]
