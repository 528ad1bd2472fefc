"""A real Slurm over the hosts: slurmctld on one of them, slurmd and munged on each. Nothing of it is outside the cluster's folder and the
hosts' own /run and /tmp."""

import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path

from cluster import needed
from cluster.host import Host
from cluster.hosts import Cluster

# What ordinary clusters have, but for short waits; RequeueExit, which few have, is not set. No accounting: squeue and scontrol tell
# what tests need. `config_overrides`: nodes of as many cores as are said, with task/none.
_CONF = """ClusterName=test
SlurmctldHost={head}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
SlurmctldPidFile=/run/slurmctld.pid
SlurmctldLogFile={dir}/slurmctld.log
SlurmdPidFile=/run/slurmd.pid
SlurmdLogFile={dir}/slurmd.%n.log
SlurmdSpoolDir=/tmp/slurmd
StateSaveLocation={dir}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=5
MinJobAge=300
InactiveLimit=0
SlurmctldTimeout=30
SlurmdTimeout=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=low  Nodes=ALL Default=YES PriorityTier=1 GraceTime=15 PreemptMode=REQUEUE MaxTime=60 State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=60 State=UP
"""
_NODE = "NodeName={name} NodeAddr={address} Sockets=2 CoresPerSocket=2 ThreadsPerCore=1 RealMemory=4000 State=UNKNOWN"
_MUNGE = "/run/munge"
_PMIX = "/usr/lib/*/pmix2/lib"


@dataclass(frozen=True)
class Slurm:
    """`env`: what commands need in their environment."""

    cluster: Cluster
    head: Host
    conf: Path

    @property
    def env(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.conf)}

    def run(self, *command: object, check: bool = True, timeout: float = 120, cwd: Path | None = None) -> str:
        """A command of Slurm, on the head; what it says."""
        done = self.head.run(*command, env=self.env, check=check, timeout=timeout, cwd=cwd)
        return done.stdout + done.stderr

    def submit(self, *arguments: object, cwd: Path | None = None) -> int:
        """sbatch; the job's number."""
        said = self.run("sbatch", *arguments, cwd=cwd)
        found = re.search(r"Submitted batch job (\d+)", said)
        assert found, said
        return int(found[1])

    def job(self, number: int) -> Mapping[str, str]:
        """What scontrol tells of it: JobState, Restarts, ExitCode, ..."""
        said = self.run("scontrol", "show", "job", number, "--oneliner")
        return dict(word.split("=", 1) for word in said.split() if "=" in word)

    def wait(self, number: int, states: Sequence[str], timeout: float = 300, hurry: bool = True) -> Mapping[str, str]:
        """The job in one of these states. `hurry`: a job that was requeued waits two minutes before it may start; here it doesn't."""
        until = time.monotonic() + timeout
        while (job := self.job(number))["JobState"] not in states:
            assert time.monotonic() < until, job
            if hurry:
                self.hurry(number, job)
            time.sleep(0.5)
        return job

    def hurry(self, number: int, job: Mapping[str, str], *more: str) -> None:
        """Has a job that was requeued start now. `more`: further updates. Not in the same second: Slurm tells a job's lives apart by
        whole seconds, and would revoke the credential of the new one with that of the last ("Killing non-startable batch job")."""
        waits = job["JobState"] == "PENDING" and job["Reason"] == "BeginTime" and job["StartTime"] != "Unknown"
        if waits and time.mktime(time.strptime(job["StartTime"], "%Y-%m-%dT%H:%M:%S")) > time.time() + 5:
            self.run("scontrol", "update", f"jobid={number}", "starttime=now+2", *more, check=False)

    def add_node(self, host: Host) -> None:
        """Starts the daemons of one host: of one that was switched on again, too."""
        host.run("mkdir", "-p", _MUNGE, "/tmp/slurmd", check=True)
        folder = self.conf.parent
        for there in glob(_PMIX):
            host.run("mount", "--bind", folder / "pmix", there, check=True)
        munge = {"key-file": folder / "munge.key", "log-file": folder / f"munged.{host.name}.log"}
        munge |= {"seed-file": f"{_MUNGE}/seed", "pid-file": f"{_MUNGE}/pid", "socket": f"{_MUNGE}/munge.socket.2"}
        words = [f"--{key}={value}" for key, value in munge.items()]
        _daemon(host, [needed.found("munged"), "--force", *words], self.env)
        if host is self.head:
            _daemon(host, [needed.found("slurmctld"), "-f", self.conf, "-c"], self.env)
        if f"NodeName={host.name} " in self.conf.read_text():
            _daemon(host, [needed.found("slurmd"), "-f", self.conf, "-N", host.name], self.env)
        self.cluster.add_daemons(host)

    def wait_idle(self, timeout: float = 180) -> None:
        """Returns when every node is."""
        until = time.monotonic() + timeout
        while set(self.run("sinfo", "-h", "-o", "%T", "-p", "low", check=False).split()) != {"idle"}:
            assert time.monotonic() < until, self.run("sinfo", check=False) + self.log()
            time.sleep(0.25)

    def quiet(self) -> None:
        """No jobs, and every node idle; daemons again on hosts that have none."""
        for host in self.cluster.hosts:
            if not self.cluster.daemons(host):
                self.add_node(host)
        until = time.monotonic() + 60
        while " UP" not in self.run("scontrol", "ping", check=False):  # a slurmctld that was started just now
            assert time.monotonic() < until, self.log()
            time.sleep(0.25)
        self.run("scancel", "--full", "-u", "root", check=False)
        for number in self.run("squeue", "-h", "-o", "%A").split():
            self.run("scancel", "-s", "KILL", number, check=False)
        self.wait_idle()

    def log(self) -> str:
        """What slurmctld has said last."""
        return "\n".join((self.conf.parent / "slurmctld.log").read_text().splitlines()[-20:])


def start(cluster: Cluster, head: Host | None = None, nodes: Sequence[Host] | None = None, more: str = "") -> Slurm:
    """`head`: node1, by default. `nodes`: by default all, the head, too. `more`: further lines of slurm.conf."""
    head, nodes = head or cluster.hosts[0], nodes or cluster.hosts
    folder = cluster.folder / "slurm"
    (folder / "state").mkdir(parents=True)
    conf = folder / "slurm.conf"
    lines = "\n".join(_NODE.format(name=host.name, address=host.address) for host in nodes)
    conf.write_text(_CONF.format(head=head.name, address=head.address, dir=folder, nodes=lines) + more)
    # slurmd of 22.05 wants to know, even where it uses none.
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    # Its PMIx plugin loads `libpmix.so` from a folder in which Debian has it for developers alone: each host gets one that has it.
    for found in glob(_PMIX):
        shutil.copytree(found, folder / "pmix", symlinks=True)
        (folder / "pmix" / "libpmix.so").symlink_to("libpmix.so.2")
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    slurm = Slurm(cluster, head, conf)
    for host in cluster.hosts:
        slurm.add_node(host)
    slurm.wait_idle()
    return slurm


def _daemon(host: Host, command: Sequence[object], env: Mapping[str, str]) -> None:
    # Without pipes: a daemon that goes on holding one would be waited for.
    log = host.cluster.folder / f"daemons-{host.name}.log"
    with open(log, "ab") as file:
        code, _ = host.start(*command, env=env, stdout=file, stderr=file, cwd="/").wait(120)
    assert code == 0, log.read_text()
