"""--hosts, and the options beside it."""

import os
import shlex
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import click

from stagerun.base.errors import UsageError
from stagerun.command.options import flag, given, option
from stagerun.launch.ssh import Bundle, Way, bundle

HOSTS = "Other hosts"
RESTARTS = 3

Reach = TypeVar("Reach", bound="ReachOptions")


def _no_schedule(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """A word after --sync is its FOLDER: `run --sync DIR` would miss its DIR."""
    if value and os.path.isfile(os.path.join(value, "schedule.prototxt")):
        raise click.BadParameter(f"{value} is a schedule: write `stagerun run {value} --sync`.", ctx, param)
    return value


@dataclass(frozen=True, slots=True)
class ReachOptions:
    """Which hosts, and how they are reached."""

    hosts: str | None = option(
        "--hosts FILE",
        "Start the workers on other hosts, over ssh. A file with a host on each line (`host`, `host:2`, `host slots=2`), or a "
        "list, `a,b,c`. Rank 0 and the output folder are on the first.",
        title=HOSTS,
    )
    per_node: int | None = option(
        "--workers-per-node N",
        "With --hosts: workers on each.  [default: what the host file says, else one per GPU or NUMA node there]",
        title=HOSTS,
        least=1,
    )
    python: str | None = option(
        "--remote-python PATH", "The interpreter there.  [default: this one's path]", title=HOSTS
    )
    ssh: str | None = option(
        "--ssh COMMAND", 'How to reach a host, as in "ssh -F my_config".  [default: ssh]', title=HOSTS
    )
    sync: str | None = option(
        "--sync [FOLDER]",
        "With --hosts: copy the schedule's folder to each of them first, and run it there in FOLDER. For hosts without a file "
        "system that they share; OUT is then on the first one.  [default: ~/stagerun/NAME]",
        title=HOSTS,
        is_flag=False,
        flag_value="",
        callback=_no_schedule,
    )
    sync_code: bool = flag(
        "--sync-code", "With --sync: copy this package, too; the interpreter there has all others.", title=HOSTS
    )

    def bundle(self, schedule: str, files: Iterable[tuple[str, str]]) -> tuple[Bundle | None, str]:
        """What is copied to all hosts, and the schedule's folder there. UsageError, also where one of its `files` (path, text) lies elsewhere."""
        if self.sync is None:
            return None, schedule
        for file, _ in files:
            if not Path(os.path.abspath(file)).is_relative_to(os.path.abspath(schedule)):
                raise UsageError(
                    f"--sync copies {schedule}, and its net {file} lies elsewhere", f"copy it into {schedule}"
                )
        folder = self.sync or f"~/stagerun/{Path(schedule).resolve().name}"
        return bundle(folder, schedule, self.sync_code)

    def way(self, bundle: Bundle | None) -> Way:
        """UsageError."""
        ssh = "ssh" if self.ssh is None else self.ssh
        try:
            words = tuple(shlex.split(ssh))
        except ValueError as error:
            raise UsageError(f"--ssh {ssh}: {error}") from None
        if not words:
            raise UsageError("--ssh is empty", 'write the command, as in --ssh "ssh -F my_config"')
        if shutil.which(words[0]) is None:
            raise UsageError(f"command `{words[0]}` is not found here", "install it, or name another with --ssh")
        return Way(words, self.python or sys.executable, _here(), bundle)


def _here() -> str:
    """The current folder by the name that the user knows, which an automounter may have for it on all hosts."""
    known = os.environ.get("PWD", "")
    return known if os.path.isdir(known) and os.path.samefile(known, ".") else os.getcwd()


@dataclass(frozen=True, slots=True)
class HostOptions(ReachOptions):
    """Also when the job starts anew without hosts that were lost."""

    least: int | None = option(
        "--min-nodes N",
        "With --hosts: go on when hosts are lost, as long as N are left, and take them back when they answer.  [default: all]",
        title=HOSTS,
        least=1,
    )
    restarts: int | None = option(
        "--max-restarts N",
        f"With --hosts: start anew, from the newest snapshot, at most N times after lost workers or hosts.  [default: {RESTARTS}]",
        title=HOSTS,
        least=0,
    )


def chosen_hosts(options: Reach, nproc: int | None) -> Reach | None:
    """None without --hosts. UsageError for an option that says something about hosts, without any, and for --nproc with them."""
    if options.hosts is None:
        if unused := given(options):
            raise UsageError(f"{', '.join(unused)} without --hosts", "name the hosts, or leave it out")
        return None
    if nproc is not None:
        raise UsageError(
            "--nproc and --hosts exclude each other",
            "the host file or --workers-per-node says how many workers each host has",
        )
    if options.sync_code and options.sync is None:
        raise UsageError("--sync-code without --sync", "`--sync` says that the schedule is copied, and where to")
    return options
