"""Options of --hosts, host files, and the default number of workers. Imports torch only to count GPUs."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from stagerun.base.errors import UsageError
from stagerun.base.recipe import Schedule
from stagerun.command.options import given, option
from stagerun.plan.choice import most_workers
from stagerun.system import signals
from stagerun.system.host import default_workers, nvidia_gpus

HOSTS = "Other hosts"


@dataclass(frozen=True, slots=True)
class HostOptions:
    """Hosts, and how to reach them."""

    hosts: str | None = option(
        "--hosts FILE",
        "Start the workers on other hosts by ssh. A file with a host on each line (`host`, `host:2`, `host slots=2`), or a "
        "list, `a,b,c`. Rank 0 and the output folder are on the first. Each has --nproc workers, and this interpreter at the same path.",
        title=HOSTS,
    )
    ssh: str | None = option(
        "--ssh COMMAND", 'How to reach a host, as in "ssh -F my_config".  [default: ssh]', title=HOSTS
    )
    sync: str | None = option(
        "--sync [FOLDER]",
        "With --hosts: copy the schedule's folder to FOLDER on each host by rsync, and run it from there. For hosts without a shared "
        "file system; OUT is then on the first host.  [default: ~/stagerun/NAME]",
        title=HOSTS,
        is_flag=False,
        flag_value="",
    )

    def folder_on_host(self, folder: str) -> str:
        """Return the schedule's folder as the command on a host names it."""
        return folder if self.sync is None else os.path.basename(os.path.abspath(folder))


def chosen_hosts(options: HostOptions) -> HostOptions | None:
    """Return None without --hosts. UsageError for another option of hosts without it."""
    if options.hosts is None:
        if unused := given(options):
            raise UsageError(f"{', '.join(unused)} without --hosts", "add --hosts, or leave it out")
        return None
    return options


def devices(schedule: Schedule) -> int:
    """Return the default number of workers on this machine."""
    return usual_workers(most_workers(schedule))


def usual_workers(most: int | None) -> int:
    """Return a worker for each GPU that torch can use; without GPUs, one per NUMA node, at most `most`. (Batch systems set
    CUDA_VISIBLE_DEVICES also for a torch without CUDA.)"""
    gpus = 0
    if nvidia_gpus() or os.environ.get("CUDA_VISIBLE_DEVICES"):
        with signals.held():
            import torch

            gpus = torch.cuda.device_count()
    return gpus or default_workers(most)


_HOST = re.compile(
    r"(?P<name>(?:[A-Za-z0-9_][A-Za-z0-9._-]*@)?"
    r"(?:[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?|\[[0-9A-Fa-f:.]+(?:%\w+)?\]))(?::(?P<slots>[1-9][0-9]{0,2}))?"
)
# max_slots limits oversubscription, which stagerun never does.
_FIELD = re.compile(r"(?P<most>max[_-])?slots=(?P<slots>[1-9][0-9]{0,3})")
_FORMS = (
    "write `host`, `host:2` or `host slots=2` for two workers; an IPv6 address stands in brackets, a port in ~/.ssh/config or "
    '`--ssh "ssh -p 2222"`, a comment behind `#`'
)


@dataclass(frozen=True, slots=True)
class Host:
    """`name`: as ssh takes it, with `user@`. `slots`: workers on it, if stated."""

    name: str
    slots: int | None = None

    @property
    def address(self) -> str:
        """Return the name without `user@` and brackets."""
        return self.name.rpartition("@")[2].strip("[]")


def read_hosts(value: str) -> tuple[Host, ...]:
    """Read the value of `--hosts`: a file as Open MPI, hydra and DeepSpeed take it, or a list with commas. UsageError with all mistakes."""
    path = Path(value)
    if "/" in value and path.is_dir():
        raise UsageError(
            f"--hosts {value} is a folder", "name a file with a host on each line, or write `--hosts a,b,c`"
        )
    if path.is_file():
        try:
            lines = path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not a text file"
            raise UsageError(f"--hosts {value} can't be read: {why}") from None
        numbered = [(f"{value}:{number}", line.partition("#")[0].split()) for number, line in enumerate(lines, 1)]
        entries = [(where, words) for where, words in numbered if words]
    elif "/" in value:
        raise UsageError(f"--hosts {value}: no such file", "name a file with a host on each line")
    else:
        entries = [("--hosts", item.split() or [""]) for item in value.split(",")] if value.strip(" ,") else []
    if not entries:
        name = value if path.is_file() else "--hosts"
        raise UsageError(f"{name} names no host", "write `--hosts a,b,c`, or a file with a name on each line")
    hosts: dict[str, Host] = {}
    mistakes: list[str] = []
    for where, (word, *fields) in entries:
        match = _HOST.fullmatch(word)
        slots = match["slots"] if match is not None else None
        for field in fields:
            slot = _FIELD.fullmatch(field)
            if slot is None:
                mistakes.append(f"{where}: `{field}` is not understood")
            elif not slot["most"]:
                slots = slot["slots"]
        if match is None:
            mistakes.append(f"{where}: `{word}` is not a host" if word else f"{where}: a host's name is missing")
            continue
        host = Host(match["name"], int(slots) if slots else None)
        if hosts.setdefault(host.address, host) is not host:
            mistakes.append(f"{where}: `{host.name}` is listed twice; for two workers on it write `{host.name}:2`")
    if mistakes:
        raise UsageError("\n".join(mistakes), _FORMS)
    return tuple(hosts.values())
