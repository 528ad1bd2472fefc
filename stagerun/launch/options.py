"""--hosts, and the options beside it; and how many workers are usual on this machine. No torch, but for counting several GPUs."""

import os
from dataclasses import dataclass

from stagerun.base.errors import UsageError
from stagerun.base.recipe import Schedule
from stagerun.command.options import given, option
from stagerun.plan.choice import most_workers
from stagerun.system import signals
from stagerun.system.host import nvidia_gpus
from stagerun.system.numa import default_workers

HOSTS = "Other hosts"


@dataclass(frozen=True, slots=True)
class HostOptions:
    """Which hosts, and how they are reached."""

    hosts: str | None = option(
        "--hosts FILE",
        "Start the workers on other hosts, over ssh. A file with a host on each line (`host`, `host:2`, `host slots=2`), or a "
        "list, `a,b,c`. Rank 0 and the output folder are on the first. Each has --nproc workers, and this interpreter at the same path.",
        title=HOSTS,
    )
    ssh: str | None = option(
        "--ssh COMMAND", 'How to reach a host, as in "ssh -F my_config".  [default: ssh]', title=HOSTS
    )
    sync: str | None = option(
        "--sync [FOLDER]",
        "With --hosts: copy the schedule's folder to each of them first, by rsync, and run it there in FOLDER. For hosts without a file "
        "system that they share; OUT is then on the first one.  [default: ~/stagerun/NAME]",
        title=HOSTS,
        is_flag=False,
        flag_value="",
    )

    def folder_there(self, folder: str) -> str:
        """The schedule's folder as the command on a host names it."""
        return folder if self.sync is None else os.path.basename(os.path.abspath(folder))


def chosen_hosts(options: HostOptions) -> HostOptions | None:
    """None without --hosts. UsageError for an option that says something about hosts, without any."""
    if options.hosts is None:
        if unused := given(options):
            raise UsageError(f"{', '.join(unused)} without --hosts", "name the hosts, or leave it out")
        return None
    return options


def devices(schedule: Schedule) -> int:
    """How many workers are usual here."""
    return usual_workers(most_workers(schedule))


def usual_workers(most: int | None) -> int:
    """One worker per GPU that torch can use here; where there is none, one per NUMA node, `most` at most. Batch systems name GPUs for a torch
    that was built without them, too."""
    found = 0
    if nvidia_gpus() or os.environ.get("CUDA_VISIBLE_DEVICES"):
        with signals.held():
            import torch

            found = torch.cuda.device_count()
    return found or default_workers(most)
