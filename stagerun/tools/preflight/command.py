"""`stagerun preflight`: facts first, which need no torch; then workers measure; one page says what came out."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from stagerun.base.errors import ExitCode, UsageError
from stagerun.base.recipe import Schedule
from stagerun.command.ending import say, tell
from stagerun.command.options import arguments, command
from stagerun.command.shared import Folder, Json, Nproc, OutToCome, Overrides, Threads, limits
from stagerun.language import load
from stagerun.launch import StopRequest
from stagerun.launch.compare import Finding, differences, troubles, worst
from stagerun.launch.facts import Facts, host_facts
from stagerun.launch.hosts import Task, on_hosts
from stagerun.launch.options import HostOptions, ReachOptions, chosen_hosts
from stagerun.launch.start import Job, Orders, joined, start, work
from stagerun.launch.watch.worker import Monitored
from stagerun.launch.worker_count import check_workers, devices
from stagerun.system.world import World
from stagerun.tools.preflight.page import Measured, page, record, verdicts


@dataclass(frozen=True, slots=True)
class PreflightOptions:
    folder: Folder
    overrides: Overrides = ()
    out: OutToCome = None
    nproc: Nproc = None
    threads: Threads = None
    as_json: Json = False

    def arguments(self) -> list[str]:
        """The command line of a worker."""
        return ["preflight", *arguments(self)]

    @property
    def orders(self) -> Orders:
        return Orders(tuple(self.arguments()), self.threads, saves=False, limits=limits(()))


@command()
def preflight(options: PreflightOptions, reach: ReachOptions) -> int:
    """Looks at every host of a job before it is paid for: which is missing, slow or different.

    Start it as the run itself: on one machine, with --hosts and what the run has beside it, or under torchrun, mpirun or srun. It compares versions,
    code, schedule and images; it looks at scratch and output folders; it measures the links between the hosts, the sum of the gradients,
    and a training step on made-up images, on each host alone and on all together. It takes some seconds, and leaves nothing behind.

    \b
    Ends with 0 where the hosts are ready, else with the code of the first of these that was found:
      64  other versions or code, a mistake in the schedule    65  images missing or not the same
      77  a folder may not be written                          74  no room, or no such folder
      78  another schedule                                     69  a host or link is missing or slow
    """
    if (hosts := chosen_hosts(reach, options.nproc)) is not None:
        return _on_hosts(options, hosts)

    def job(world: World, stop: StopRequest, watch: Monitored | None) -> int:
        return _measured(options, world, stop, watch)

    return work(job, options.orders) if joined(options.nproc) else _start(options, job)


def _start(options: PreflightOptions, job: Job) -> int:
    schedule = load(options.folder, options.overrides)
    require_stages(schedule)
    nproc = options.nproc or devices(schedule)
    check_workers(schedule, nproc)
    mine = host_facts(options.folder, options.overrides, options.out, writes=True)
    found = troubles({mine.host: mine})
    if worst(found):
        show(options, schedule.name, {mine.host: mine}, None, found)
        return worst(found)
    return start(job, options.orders, nproc)


def _on_hosts(options: PreflightOptions, hosts: ReachOptions) -> int:
    schedule = load(options.folder, options.overrides)
    require_stages(schedule)
    bundle, folder = hosts.bundle(options.folder, schedule)
    there = replace(options, folder=folder)

    def survey(facts: Mapping[str, Facts], missing: Mapping[str, str]) -> int:
        """Shows the page where something is wrong already, and returns its code; else 0, and the workers print the page."""
        lost = [Finding(hosts=(host,), text=text, code=ExitCode.PEER) for host, text in missing.items()]
        found = [*lost, *troubles(facts), *differences(facts)]
        if worst(found):
            show(options, schedule.name, facts, None, found)
        return worst(found)

    task = Task(
        there.orders,
        {"folder": folder, "overrides": options.overrides, "out": options.out},
        lambda size: check_workers(schedule, size),
        bundle=bundle,
        survey=survey,
    )
    return on_hosts(task, HostOptions(**asdict(hosts), restarts=0))


def require_stages(schedule: Schedule) -> None:
    if not any(stage.enabled for stage in schedule.stages):
        raise UsageError(f"no stage of {schedule.name} is enabled", "take `enabled: false` out of one of them")


def show(
    options: PreflightOptions,
    name: str,
    facts: Mapping[str, Facts],
    measured: Measured | None,
    findings: Sequence[Finding],
) -> None:
    if options.as_json:
        say(json.dumps(record(name, facts, measured, findings), indent=2))
    else:
        say(page(name, facts, measured, findings))


# -- a worker


def _measured(options: PreflightOptions, world: World, stop: StopRequest, watch: Monitored | None) -> int:
    from stagerun.tools.preflight.measure import measure, meet
    from stagerun.train.agreement import rank0
    from stagerun.train.join import join

    device, comm = join(world, options.threads, stop, watch, patient=True)
    hosts, facts = meet(
        comm, world, lambda: host_facts(options.folder, options.overrides, options.out, writes=world.rank == 0)
    )
    found = [*troubles(facts), *differences(facts)]
    schedule, measured = None, None
    if not worst(found):
        schedule = load(options.folder, options.overrides)
        require_stages(schedule)
        check_workers(schedule, comm.size)
        # As `run` does; not before, since a bound worker sees its own cores alone.
        measured = measure(schedule, comm, device, hosts, stop)
        if measured is None:
            if comm.rank == 0:
                tell("interrupted: a preflight keeps nothing")
            comm.close()
            return ExitCode.INTERRUPTED
        found += verdicts(measured)
    name = schedule.name if schedule is not None else options.folder
    rank0(comm, lambda: show(options, name, facts, measured, found))
    comm.close()
    return worst(found)
