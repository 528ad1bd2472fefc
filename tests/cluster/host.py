"""One host: its namespaces, made and ended; and commands in it."""

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster import needed, pids

if TYPE_CHECKING:
    from cluster.hosts import Cluster

NET = "10.99.0"
_BOOT_S = 20.0
# The first process of a host, before it is the sshd: waits for its network, then makes what is its own.
_BOOT = """
read -r up
set -e
dir=$1 index=$2; shift 2
hostname "node$index"
mount --bind "$dir/hosts" /etc/hosts
mount --bind "$dir/ssh_config" /etc/ssh/ssh_config
: > "$dir/empty"
for start in /root/.bashrc /root/.profile /root/.bash_profile; do  # what a shell does first here is nothing to test
    [ ! -f "$start" ] || mount --bind "$dir/empty" "$start"
done
mount -t tmpfs tmpfs /run
mkdir -m 755 /run/sshd
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs -o "size=2g,mode=1777" tmpfs "$dir/tmp"
for shared; do
    mkdir -p "$dir/tmp${shared#/tmp}"
    mount --bind "$shared" "$dir/tmp${shared#/tmp}"
done
mount --rbind "$dir/tmp" /tmp
exec "$SSHD" -D -e -f "$dir/sshd$index.conf" < /dev/null
"""


@dataclass
class Life:
    """A host's processes, as numbered outside. `unshare` is the parent of `first`, the host's own number 1."""

    unshare: int
    first: int
    ticks: int  # when `first` was started


class Started:
    """A command that runs in a host. `process` only waits for it."""

    def __init__(self, words: Sequence[str], **options: Any) -> None:
        self.process = subprocess.Popen(words, start_new_session=True, text=True, **options)

    @property
    def pid(self) -> int:
        """The command's own, as numbered outside."""
        until = time.monotonic() + 5
        while not (found := pids.children(self.process.pid)):
            assert self.process.poll() is None and time.monotonic() < until, "it has ended"
            time.sleep(0.005)
        return found[0]

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float = 120) -> tuple[int, str]:
        """Its exit code, and what it said to a pipe."""
        out, _ = self.process.communicate(timeout=timeout)
        return self.process.returncode, out or ""


class Host:
    def __init__(self, cluster: "Cluster", index: int) -> None:
        self.cluster, self.index = cluster, index
        self.name, self.address = f"node{index}", f"{NET}.{index}"
        self.life: Life | None = None
        self.boots = 0

    def __repr__(self) -> str:
        return f"{self.name}{'' if self.life else ' (off)'}"

    def power_on(self) -> None:
        assert self.life is None, f"{self.name} is on"
        folder = self.cluster.folder
        self.boots += 1
        shared = [str(path) for path in self.cluster.shared if str(path).startswith("/tmp/")]
        boot = ["bash", "-c", _BOOT, "host", str(folder), str(self.index), *shared]
        kinds = ["--net", "--uts", "--ipc", "--pid", "--mount", "--mount-proc", "--fork", "--kill-child"]
        with open(folder / f"{self.name}.log", "ab") as log:
            process = subprocess.Popen(
                [*pids.DYING, "unshare", *kinds, *boot],
                stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
                env={"PATH": needed.PATH, "SSHD": needed.found("sshd"), "LANG": "C.UTF-8"},
            )  # fmt: skip
        pids.keep(process)
        until = time.monotonic() + _BOOT_S
        while not (inner := pids.children(process.pid)) or pids.command_line(inner[0])[:4] != "bash":
            assert process.poll() is None and time.monotonic() < until, self.log()
            time.sleep(0.005)
        self.life = Life(process.pid, inner[0], pids.started(inner[0]))
        mac = f"02:c1:00:00:00:{self.index:02x}"  # of its card, as it were: the others remember it
        self.cluster.switch.attach(self.name, f"p{self.index}b{self.boots}", inner[0], f"{self.address}/24", mac)
        assert process.stdin is not None
        process.stdin.write(b"up\n")
        process.stdin.close()

    def wait_up(self) -> None:
        """Returns when its sshd answers."""
        until = time.monotonic() + _BOOT_S
        while True:
            # In the host's own network alone: its mounts may not be made yet.
            probe = f"exec 3<>/dev/tcp/{self.address}/22"
            words = ["nsenter", "-t", str(self._life.first), "-n", "bash", "-c", probe]
            if subprocess.run(words, stderr=subprocess.DEVNULL).returncode == 0:
                return
            assert pids.started(self._life.first) and time.monotonic() < until, self.log()
            time.sleep(0.02)

    def power_off(self) -> None:
        """Everything in it is gone, and nobody hears of it."""
        life = self._life
        self.cut()
        self.life = None
        pids.end(life.first, life.ticks)
        self.cluster.switch.detach(self.name)

    def cut(self) -> None:
        """Takes its cable out, so to say: no frame gets through any more, and nobody is told."""
        self.cluster.switch.cut(self.name, True)

    def heal(self) -> None:
        self.cluster.switch.cut(self.name, False)

    def shape(self, rate_mbit: float) -> None:
        """Both directions; 0: no limit."""
        self.cluster.switch.shape(self.name, rate_mbit)

    @property
    def _life(self) -> Life:
        assert self.life is not None, f"{self.name} is off"
        return self.life

    def log(self) -> str:
        """What its sshd has said."""
        return (self.cluster.folder / f"{self.name}.log").read_text()

    # -- what runs in it

    def words(self, command: Sequence[object], cwd: Path | str | None = None) -> list[str]:
        """The command that runs `command` in this host, as if somebody had typed it there."""
        enter = ["nsenter", "-t", str(self._life.first), "-n", "-u", "-i", "-p", "-m", "--"]
        return [*enter, "env", "-C", str(cwd or Path.cwd()), *map(str, command)]

    def start(
        self, *command: object, env: Mapping[str, str] | None = None, cwd: Path | str | None = None, **options: Any
    ) -> Started:
        """`env`: beside this process's own. `options`: as of Popen; by default both outputs go to one pipe."""
        given = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **options}
        return Started(self.words(command, cwd), env={**os.environ, **(env or {})}, **given)

    def run(
        self,
        *command: object,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        timeout: float = 120,
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """To its end, with both outputs apart."""
        done = subprocess.run(
            self.words(command, cwd), env={**os.environ, **(env or {})}, timeout=timeout,
            stdin=subprocess.DEVNULL, capture_output=True, text=True,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    def processes(self, containing: str = "") -> dict[int, str]:
        """Command lines of what runs in it, by number outside; not the sshd that is the host itself, nor daemons of the cluster."""
        kept = {self._life.first, *self.cluster.daemons(self)}
        found = {pid: pids.command_line(pid) for pid in pids.within(self._life.first) if pid not in kept}
        return {pid: words for pid, words in found.items() if containing in words}

    def gone(self, containing: str, within_s: float = 5.0) -> bool:
        """Whether no process with these words on its command line is left. A host that is off has none."""
        until = time.monotonic() + within_s
        while self.life is not None and self.processes(containing):
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
        return True
