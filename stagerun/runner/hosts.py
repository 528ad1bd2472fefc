"""Which host each rank is on, and whether all of them have the output folder."""

import json
from collections.abc import Sequence
from pathlib import Path

from stagerun import store
from stagerun.comm import Comm
from stagerun.runner.together import rank0
from stagerun.system.host import host_name


def hosts_of(comm: Comm) -> list[str]:
    """By rank. Collective."""
    return [host.decode() for host in comm.gather_bytes(host_name().encode())]


def only_here(comm: Comm, hosts: Sequence[str], out: str) -> str:
    """What it means that the output folder is on rank 0's host alone; '' where it isn't, or there is one host. Collective.

    Its file system's kind may lie, as where a server itself trains, or hosts are containers of one machine: so the others look for the
    file of rank 0's process life as well. Not for it alone: a client of NFS may have an old list of the folder.
    """
    if len(set(hosts)) == 1:
        return ""
    kind, newest = json.loads(str(rank0(comm, lambda: json.dumps(_here(Path(out))))))
    if not kind:
        return ""
    try:
        seen = bool(newest) and (Path(out) / newest).is_file()
    except OSError:
        seen = False
    everybody = [told == b"1" for told in comm.gather_bytes(b"1" if seen else b"0")]
    return "" if all(everybody) else store.lost_with(Path(out), kind, hosts[0])


def _here(out: Path) -> tuple[str, str]:
    """The kind of its file system, and the newest life in it."""
    newest = max((path.name for path in store.lives_folder(out).glob("a*.json")), default="")
    return store.local_kind(out), f"{store.lives_folder(out).name}/{newest}" if newest else ""
