"""A machine shared out among the workers that are there, whatever their launcher has left to each of them; whether `--bind auto` binds,
and how many workers a machine has by default."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from stagerun.launch.placing import Plan, Seat, make_plan
from stagerun.system.cores import Gpu, Machine

# What a batch system sets in a job: its name, and where it tells how many CPUs of this host belong to the job ('': nowhere; Grid
# Engine's NSLOTS are those of all hosts).
_BATCH = {
    "SLURM_JOB_ID": ("Slurm", "SLURM_CPUS_ON_NODE"),
    "PBS_JOBID": ("PBS", "NCPUS"),
    "LSB_JOBID": ("LSF", ""),
    "JOB_ID": ("Grid Engine", ""),
}
# By these a host that was reached by ssh knows that it may not be the job's own.
BATCH_JOBS = tuple(_BATCH)


@dataclass(frozen=True, slots=True)
class Wish:
    """How workers are to be bound to cores: `bound` None leaves it to the machine. `threads` of each; None: OMP_NUM_THREADS says it, or the
    plan does."""

    bound: bool | None = None
    comm_cores: int | None = None
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    bind: bool
    why: str


@dataclass(frozen=True, slots=True)
class Found:
    """One rank's place before anything is bound. `host` is another word on each host; `allowed`: CPUs. `boot`: the running kernel's
    own word, '' where it has none: containers have names of their own, and one kernel."""

    host: str
    local_rank: int
    allowed: tuple[int, ...]
    boot: str = ""


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank gets. `seat`: None if no one can be bound. `alone`: its launcher gave these CPUs to it alone."""

    choice: Choice
    plan: Plan
    seat: Seat | None
    alone: bool = False


def choose(
    machine: Machine,
    workers: int,
    hosts: int,
    environment: Mapping[str, str],
    size: int | None = None,
    given: Collection[int] | None = None,
) -> Choice:
    """What `--bind auto` does for `workers` on this machine, of a job on so many hosts with `size` workers in all (None: as many on
    each host). `given`: CPUs of all workers of this host, where a launcher has given some of them CPUs of their own.

    It binds where that has a use, and the cores are known to be the job's own: two jobs that each believe to be alone would sit on
    the same cores, the others idle. It looks at what stays the same from one life of a job to the next alone: the number of
    threads follows from it, and the bits from that.
    """
    if not machine.usable or (workers * hosts if size is None else size) == 1:
        return Choice(False, "there is one worker: the kernel places its threads")
    if (machine if given is None else machine.within(given)).short_of_time:
        return Choice(False, f"a quota of {machine.quota:g} processors doesn't say which ones: others may use the same")
    if workers > len(machine.usable):
        return Choice(False, "there are more workers than cores")
    if machine.limited:
        return Choice(True, "some of this machine's CPUs were given to the job")
    for name, (system, share) in _BATCH.items():
        if name in environment:
            return _of_batch_system(system, environment.get(share, ""), len(machine.cpus & machine.allowed))
    if hosts > 1:
        return Choice(True, f"the job has {hosts} hosts")
    if len(machine.nodes) > 1:
        return Choice(True, f"this machine has {len(machine.nodes)} NUMA nodes")
    return Choice(False, "this machine has one NUMA node and may have other work: the kernel places the threads")


def _of_batch_system(system: str, said: str, cpus: int) -> Choice:
    """`said`: how many CPUs of this machine, which has `cpus`. One that counts cores says fewer, and then no one is bound."""
    if not said:
        return Choice(False, f"{system} doesn't say how many CPUs of this machine belong to the job")
    if said.isdecimal() and int(said) >= cpus:
        return Choice(True, f"{system} has given this whole machine to the job")
    return Choice(False, f"{system} has given {said} CPUs of this machine to the job, and doesn't say which")


def default_workers(machine: Machine, most: int | None = None) -> int:
    """Workers on a machine by default: one per GPU; else one per NUMA node that has at least half as many usable cores as the
    largest, but no more than `most` (the batch has no more device batches); 1 where a quota is the limit."""
    if machine.gpus:
        return len(machine.gpus)
    if machine.short_of_time:
        return 1
    cores = [sum(core.node == node.number for core in machine.usable) for node in machine.nodes]
    nodes = sum(2 * number >= max(cores) > 0 for number in cores)
    return max(1, nodes if most is None else min(nodes, most))


def share(
    machine: Machine,
    ranks: Sequence[Found],
    rank: int,
    environment: Mapping[str, str],
    comm_cores: int | None = None,
    threads: int | None = None,
) -> Share:
    """The share of `rank`, on whose host `machine` is. Workers that may use the same CPUs share them out; one that has CPUs of its own
    (Open MPI, `srun --cpu-bind`) stays within them. UsageError as of `make_plan`."""
    mine = ranks[rank]
    here = sorted((r for r in range(len(ranks)) if ranks[r].host == mine.host), key=lambda r: (ranks[r].local_rank, r))
    alike = [r for r in here if ranks[r].allowed == mine.allowed]
    own = set(mine.allowed)
    machine = replace(machine.within(own), gpus=_gpus(machine, [here.index(r) for r in alike]))
    given = {cpu for r in here for cpu in ranks[r].allowed}
    choice = choose(machine, len(alike), len({found.host for found in ranks}), environment, len(ranks), given)
    plan = make_plan(machine, len(alike), comm_cores, threads)
    if any(own & set(ranks[r].allowed) for r in here if r not in alike):
        choice = Choice(False, "the launcher has given workers of one host CPUs that overlap, but are not the same")
        return Share(choice, plan, None)
    if any(_same_machine(found, mine) for found in ranks):
        return Share(Choice(False, "hosts of the job share the CPUs of one machine"), plan, None)
    if not plan.seats:
        return Share(Choice(False, plan.why[-1]), plan, None)
    return Share(choice, plan, plan.seats[alike.index(rank)], len(alike) < len(here))


def _same_machine(one: Found, other: Found) -> bool:
    """Whether two hosts are one machine under two names, with CPUs that both may use."""
    same = one.host != other.host and one.boot == other.boot != ""
    return same and not set(one.allowed).isdisjoint(other.allowed)


def _gpus(machine: Machine, workers: Sequence[int]) -> tuple[Gpu, ...]:
    """Those of the host's workers with these numbers: worker n computes on GPU n. Empty if the driver reports fewer than torch has
    found: then it isn't known where they are."""
    chosen = [gpu for gpu in machine.gpus if gpu.number in workers]
    if len(chosen) < len(workers):
        return ()
    return tuple(replace(gpu, number=number) for number, gpu in enumerate(chosen))
