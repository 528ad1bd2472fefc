"""--hosts, and the options beside it."""

import os
import shlex
import shutil
import sys
from dataclasses import dataclass

from stagerun.base.errors import UsageError
from stagerun.base.recipe import Schedule
from stagerun.command.options import given, option
from stagerun.launch.ssh import Way, sync_of

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
        "With --hosts: copy the schedule's folder, and the files that it names, to each of them first, by rsync, and run it there in FOLDER. For hosts without a file "
        "system that they share; OUT is then on the first one.  [default: ~/stagerun/NAME]",
        title=HOSTS,
        is_flag=False,
        flag_value="",
    )

    def sync_folder(self, folder: str) -> str | None:
        """Where the schedule's folder comes on each host; None without --sync."""
        return None if self.sync is None else self.sync or f"~/stagerun/{os.path.basename(os.path.abspath(folder))}"

    def way(self, folder: str, schedule: Schedule) -> Way:
        """How hosts are reached. `folder`: the schedule's here. UsageError."""
        try:
            words = tuple(shlex.split("ssh" if self.ssh is None else self.ssh))
        except ValueError as error:
            raise UsageError(f"--ssh {self.ssh}: {error}") from None
        if not words or shutil.which(words[0]) is None:
            raise UsageError(f"command `{' '.join(words)}` is not found here", 'as in --ssh "ssh -F my_config"')
        place = self.sync_folder(folder)
        if place is not None and shutil.which("rsync") is None:
            raise UsageError("--sync needs rsync, which is not found here", "install it here and on the hosts")
        sync = None if place is None else sync_of(place, folder, schedule)
        return Way(words, sys.executable, _here(), sync)

    def folder_there(self, folder: str) -> str:
        """The schedule's folder as the command on a host names it."""
        return folder if self.sync is None else os.path.basename(os.path.abspath(folder))


def _here() -> str:
    """The current folder by the name that the user knows, which an automounter may have for it on all hosts."""
    known = os.environ.get("PWD", "")
    return known if os.path.isdir(known) and os.path.samefile(known, ".") else os.getcwd()


def chosen_hosts(options: HostOptions) -> HostOptions | None:
    """None without --hosts. UsageError for an option that says something about hosts, without any."""
    if options.hosts is None:
        if unused := given(options):
            raise UsageError(f"{', '.join(unused)} without --hosts", "name the hosts, or leave it out")
        return None
    return options
