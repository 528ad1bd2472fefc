"""Whether `--bind auto` binds, and how many workers a machine has when nobody says."""

from collections.abc import Mapping
from dataclasses import dataclass

from stagerun.topology.machine import Machine

# What a batch system sets in a job: its name, and where it tells how many CPUs of this host belong to the job ('': nowhere).
_BATCH = {
    "SLURM_JOB_ID": ("Slurm", "SLURM_CPUS_ON_NODE"),
    "PBS_JOBID": ("PBS", "NCPUS"),
    "LSB_JOBID": ("LSF", ""),
    "JOB_ID": ("Grid Engine", "NSLOTS"),
}


@dataclass(frozen=True, slots=True)
class Choice:
    bind: bool
    why: str


def choose(
    machine: Machine, workers: int, hosts: int, environment: Mapping[str, str], size: int | None = None
) -> Choice:
    """What `--bind auto` does for `workers` on this machine, of a job on so many hosts with `size` workers in all (None: as many on
    each host).

    It binds where that has a use, and the cores are known to be the job's own: two jobs that each believe to be alone would sit on
    the same cores, the others idle. It looks at what stays the same from one life of a job to the next alone: the number of
    threads follows from it, and the bits from that.
    """
    if not machine.usable or (workers * hosts if size is None else size) == 1:
        return Choice(False, "there is one worker: the kernel places its threads")
    if machine.short_of_time:
        return Choice(False, f"a quota of {machine.quota:g} processors doesn't say which ones: others may use the same")
    if workers > len(machine.usable):
        return Choice(False, "there are more workers than cores")
    if machine.limited:
        return Choice(True, "some of this machine's CPUs were given to the job")
    for name, (system, share) in _BATCH.items():
        if name in environment:
            told = environment.get(share, "")
            whole = told.isdecimal() and int(told) >= len(machine.usable)
            if whole:
                return Choice(True, f"{system} has given this whole machine to the job")
            if told:
                return Choice(
                    False, f"{system} has given {told} CPUs of this machine to the job, and doesn't say which"
                )
    if hosts > 1:
        return Choice(True, f"the job has {hosts} hosts")
    if len(machine.nodes) > 1:
        return Choice(True, f"this machine has {len(machine.nodes)} NUMA nodes")
    return Choice(False, "this machine has one NUMA node and may have other work: the kernel places the threads")


def default_workers(machine: Machine, most: int | None = None) -> int:
    """Workers on a machine when nobody says: one per GPU; else one per NUMA node that has at least half as many usable cores as the
    largest, but no more than `most` (the batch has no more device batches); 1 where a quota is the limit."""
    if machine.gpus:
        return len(machine.gpus)
    if machine.short_of_time:
        return 1
    cores = [sum(core.node == node.number for core in machine.usable) for node in machine.nodes]
    nodes = sum(2 * number >= max(cores) > 0 for number in cores)
    return max(1, nodes if most is None else min(nodes, most))
