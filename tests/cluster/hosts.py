"""Several hosts on one machine, each a set of namespaces (network, host name, processes, IPC, mounts) whose first process is an sshd.

What is in a host sees its own name, address, processes, /tmp, /run and /dev/shm; the rest of the file system is everybody's, as on a
cluster with a shared one. Nothing is to be seen of the hosts from outside: the switch has a namespace of its own, keys and
configuration lie in the cluster's folder, and are put over /etc/hosts and /etc/ssh/ssh_config by mounts that only the hosts have. So
`ssh node2` works within, with no options.

No namespace has a name. They are there for as long as their processes, and these die with the process that made them, when that
one is killed, too.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cluster import pids
from cluster.host import NET, Host
from cluster.switches import Bridge

FOLDER_PREFIX = "stagerun-cluster-"
_OWNER = "owner"
_SSH_CONFIG = """Host *
  User root
  IdentityFile {dir}/id
  IdentitiesOnly yes
  UserKnownHostsFile {dir}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  BatchMode yes
  ConnectTimeout 5
"""
_SSHD_CONFIG = """Port 22
ListenAddress {address}
HostKey {dir}/host_key
PidFile none
AuthorizedKeysFile {dir}/id.pub
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
PrintMotd no
PrintLastLog no
AcceptEnv *
MaxStartups 100
MaxSessions 100
"""


class Cluster:
    """`hosts` are node1 .. nodeN, in a network of their own; the same addresses in every cluster."""

    def __init__(self, folder: Path, switch: Bridge, shared: Sequence[Path]) -> None:
        self.folder, self.switch, self.shared = folder, switch, shared
        self.switch_ticks = pids.started(switch.pid)
        self.hosts: list[Host] = []
        self.own_daemons: dict[str, list[list[int]]] = {}  # number and start, by host

    def __getitem__(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)

    def daemons(self, host: Host) -> set[int]:
        """What belongs to the host itself, and is not to be ended with what tests have left in it."""
        return {pid for pid, ticks in self.own_daemons.get(host.name, []) if pids.started(pid) == ticks}

    def add_daemons(self, host: Host) -> None:
        """All that runs in it now does."""
        self.own_daemons[host.name] = [[pid, pids.started(pid)] for pid in {*host.processes(), *self.daemons(host)}]

    def quiet(self) -> None:
        """Every host on, every link as it was, and nothing left of what was run."""
        for host in self.hosts:
            if host.life is None or pids.started(host.life.first) != host.life.ticks:
                if host.life is not None:  # it ended by itself
                    self.switch.detach(host.name)
                    host.life = None
                host.power_on()
            host.heal()
            host.shape(rate_mbit=0.0)
        for host in self.hosts:
            host.wait_up()  # before that its own making would be taken for a left-over
            for pid in host.processes():
                pids.end(pid, pids.started(pid))

    def hostfile(self, form: str = "{name} slots={slots}", slots: int = 1, name: str = "hostfile") -> Path:
        """A new file with a line for each host."""
        file = self.folder / name
        file.write_text("".join(form.format(name=host.name, slots=slots) + "\n" for host in self.hosts))
        return file

    def down(self) -> None:
        for host in self.hosts:
            if host.life is not None:
                pids.end(host.life.first, host.life.ticks)
                host.life = None
        pids.end(self.switch.pid, self.switch_ticks)
        shutil.rmtree(self.folder, ignore_errors=True)


def make(count: int, shared: Sequence[Path] = (), loopback_names: bool = False) -> Cluster:
    """`count` hosts that are up. `shared`: folders below /tmp that all hosts see all the same. `loopback_names`: each host's own name is
    127.0.1.1, as Debian's installer has it.

    To be called in the main thread, whose end is the hosts' end, too.
    """
    _sweep()
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir="/tmp"))
    folder.chmod(0o755)
    (folder / "tmp").mkdir()
    (folder / _OWNER).write_text(f"{os.getpid()} {pids.started(os.getpid())}")
    for name in ("id", "host_key"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(folder / name)]
        subprocess.run(words, check=True)
    public = " ".join((folder / "host_key.pub").read_text().split()[:2])
    (folder / "known_hosts").write_text(f"node*,{NET}.* {public}\n")
    (folder / "ssh_config").write_text(_SSH_CONFIG.format(dir=folder))
    names = [f"{NET}.{i} node{i}" for i in range(1, count + 1)]
    (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names]) + "\n")
    cluster = Cluster(folder, Bridge.start(), [folder, *shared])
    try:
        for index in range(1, count + 1):
            host = Host(cluster, index)
            config = _SSHD_CONFIG.format(dir=folder, address=host.address)
            (folder / f"sshd{index}.conf").write_text(config)
            cluster.hosts.append(host)
            host.power_on()
        for host in cluster.hosts:
            host.wait_up()
    except BaseException:
        cluster.down()
        raise
    for host in cluster.hosts if loopback_names else ():
        own = folder / f"hosts-{host.name}"
        others = [name for name in names if not name.endswith(host.name)]
        own.write_text("\n".join(["127.0.0.1 localhost", *others, f"127.0.1.1 {host.name}"]) + "\n")
        host.run("mount", "--bind", own, "/etc/hosts", check=True)
    return cluster


@contextmanager
def cluster(count: int, **options: Any) -> Iterator[Cluster]:
    made = make(count, **options)
    try:
        yield made
    finally:
        made.down()


def _sweep() -> None:
    """Removes the folders of processes that were killed; their hosts have died with them."""
    for folder in Path("/tmp").glob(f"{FOLDER_PREFIX}*"):
        with suppress(OSError, ValueError):
            pid, ticks = map(int, (folder / _OWNER).read_text().split())
            if pids.started(pid) != ticks:
                shutil.rmtree(folder, ignore_errors=True)
