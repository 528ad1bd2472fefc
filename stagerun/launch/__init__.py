"""How the same command reaches several workers."""

from stagerun.launch.folder import report
from stagerun.launch.local import run_workers
from stagerun.launch.process import StopRequest, die_with_launcher
from stagerun.launch.relay import GRACE_S

__all__ = ["GRACE_S", "StopRequest", "die_with_launcher", "report", "run_workers"]
