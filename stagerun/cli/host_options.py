"""--hosts, and the options beside it."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from stagerun.cli.options import at_least
from stagerun.errors import UsageError

if TYPE_CHECKING:
    from stagerun.cli.hosting import HostOptions

_WITHOUT = {
    "per_node": "--workers-per-node",
    "least": "--min-nodes",
    "restarts": "--max-restarts",
    "python": "--remote-python",
    "ssh": "--ssh",
    "sync": "--sync",
    "sync_code": "--sync-code",
}


def _no_schedule(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """A word after --sync is its FOLDER: `run --sync DIR` would miss its DIR."""
    if value and os.path.isfile(os.path.join(value, "schedule.prototxt")):
        raise click.BadParameter(f"{value} is a schedule: write `stagerun run {value} --sync`.", ctx, param)
    return value


def host_options(command: Callable[..., Any], lives: bool = True) -> Callable[..., Any]:
    """`lives`: with those that say when the job starts anew."""
    restarting = (
        click.option(
            "--max-restarts",
            "restarts",
            type=int,
            metavar="N",
            help="With --hosts: start anew, from the newest snapshot, at most N times after lost workers or hosts.  [default: 3]",
        ),
        click.option(
            "--min-nodes",
            "least",
            type=int,
            metavar="N",
            help="With --hosts: go on when hosts are lost, as long as N are left, and take them back when they answer.  [default: all]",
        ),
    )
    for decorate in (
        click.option(
            "--sync-code",
            is_flag=True,
            help="With --sync: copy this package, too; the interpreter there has all others.",
        ),
        click.option(
            "--sync",
            is_flag=False,
            flag_value="",
            metavar="[FOLDER]",
            callback=_no_schedule,
            help="With --hosts: copy the schedule's folder to each of them first, and run it there in FOLDER. For hosts without a file "
            "system that they share; OUT is then on the first one.  [default: ~/stagerun/NAME]",
        ),
        click.option("--ssh", metavar="COMMAND", help='How to reach a host, as in "ssh -F my_config".  [default: ssh]'),
        click.option(
            "--remote-python", "python", metavar="PATH", help="The interpreter there.  [default: this one's path]"
        ),
        *(restarting if lives else ()),
        click.option(
            "--workers-per-node",
            "per_node",
            type=int,
            metavar="N",
            help="With --hosts: workers on each.  [default: what the host file says, else one per GPU or NUMA node there]",
        ),
        click.option(
            "--hosts",
            metavar="FILE",
            help="Start the workers on other hosts, over ssh. A file with a host on each line (`host`, `host:2`, `host slots=2`), or a "
            "list, `a,b,c`. Rank 0 and the output folder are on the first.",
        ),
    ):
        command = decorate(command)
    return command


def chosen_hosts(hosts: str | None, nproc: int | None, **given: Any) -> "HostOptions | None":
    """None without --hosts. UsageError for an option that says something about hosts, without any, and for --nproc with them."""
    if hosts is None:
        if unused := [_WITHOUT[name] for name, value in given.items() if value not in (None, False)]:
            raise UsageError(f"{', '.join(unused)} without --hosts", "name the hosts, or leave it out")
        return None
    if nproc is not None:
        raise UsageError(
            "--nproc and --hosts exclude each other",
            "the host file or --workers-per-node says how many workers each host has",
        )
    from stagerun.cli.hosting import HostOptions

    if given["sync_code"] and given["sync"] is None:
        raise UsageError("--sync-code without --sync", "`--sync` says that the schedule is copied, and where to")
    at_least(1, workers_per_node=given["per_node"], min_nodes=given["least"])
    at_least(0, max_restarts=given["restarts"])
    return HostOptions(hosts, **{name: value for name, value in given.items() if value is not None})
