"""A machine shared out among the workers that are there, whatever their launcher has left to each of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stagerun.topology.choice import Choice, choose
from stagerun.topology.machine import Gpu, Machine
from stagerun.topology.placing import Plan, Seat, make_plan


@dataclass(frozen=True, slots=True)
class Found:
    """One rank's place before anything is bound. `host` is another word on each host; `allowed`: CPUs."""

    host: str
    local_rank: int
    allowed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank gets. `seat`: None where nobody can be bound. `alone`: its launcher gave these CPUs to it alone. `unused`: cores of
    the host that no worker was given."""

    choice: Choice
    plan: Plan
    seat: Seat | None
    alone: bool = False
    unused: int = 0


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
    given = {cpu for r in here for cpu in ranks[r].allowed}
    unused = sum(given.isdisjoint(core.cpus) for core in machine.cores)
    machine = replace(machine.within(own), gpus=_gpus(machine, [here.index(r) for r in alike]))
    choice = choose(machine, len(alike), len({found.host for found in ranks}), environment, len(ranks))
    if any(own & set(ranks[r].allowed) for r in here if r not in alike):
        choice = Choice(False, "the launcher has given workers of one host CPUs that overlap, but are not the same")
        return Share(choice, make_plan(machine, len(alike), comm_cores, threads), None)
    plan = make_plan(machine, len(alike), comm_cores, threads)
    if not plan.seats:
        return Share(Choice(False, plan.why[-1]), plan, None)
    return Share(choice, plan, plan.seats[alike.index(rank)], len(alike) < len(here), unused)


def _gpus(machine: Machine, workers: Sequence[int]) -> tuple[Gpu, ...]:
    """Those of the host's workers with these numbers: worker n computes on GPU n."""
    chosen = [gpu for gpu in machine.gpus if gpu.number in workers]
    return tuple(replace(gpu, number=number) for number, gpu in enumerate(chosen))
