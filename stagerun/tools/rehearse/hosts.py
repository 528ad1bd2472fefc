"""`stagerun rehearse --hosts`: which host is missing, slow or different. Facts first, which need no torch; then workers measure; one page says
what came out."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from stagerun.base.errors import ExitCode, UsageError
from stagerun.base.recipe import Schedule
from stagerun.command.ending import say, tell
from stagerun.command.shared import limits
from stagerun.language import load
from stagerun.launch import StopRequest
from stagerun.launch.compare import Finding, differences, troubles, worst
from stagerun.launch.facts import Facts, host_facts
from stagerun.launch.hosts import Task, on_hosts
from stagerun.launch.options import HostOptions
from stagerun.launch.start import Orders, work
from stagerun.launch.watch.worker import Monitored
from stagerun.launch.worker_count import check_workers
from stagerun.system.world import World
from stagerun.tools.rehearse.hosts_page import Measured, page, record, verdicts

if TYPE_CHECKING:
    from stagerun.tools.rehearse.command import RehearseOptions


def check_hosts(options: "RehearseOptions", reach: HostOptions) -> int:
    """Start the workers on the hosts, or be one of them."""
    if not options.on_hosts:
        of_rehearsal = (
            options.only,
            options.until,
            options.iters,
            options.device_batch,
            options.synthetic,
            options.workers,
        )
        if any(of_rehearsal) or options.find_lr is not None:
            raise UsageError(
                "--hosts compares hosts, and rehearses no stage", "leave out what is about stages, or --hosts"
            )
        return _on_hosts(options, reach)

    def job(world: World, stop: StopRequest, watch: Monitored | None) -> int:
        return _measured(options, world, stop, watch)

    return work(job, _orders(options))


def _orders(options: "RehearseOptions") -> Orders:
    words = replace(options, on_hosts=True).arguments()
    return Orders(tuple(words), options.threads, saves=False, limits=limits(()))


def _on_hosts(options: "RehearseOptions", hosts: HostOptions) -> int:
    schedule = load(options.folder, options.overrides)
    require_stages(schedule)
    there = replace(options, folder=hosts.folder_there(options.folder))
    return on_hosts(Task(_orders(there), options.folder, schedule), hosts, options.nproc)


def require_stages(schedule: Schedule) -> None:
    if not any(stage.enabled for stage in schedule.stages):
        raise UsageError(f"no stage of {schedule.name} is enabled", "take `enabled: false` out of one of them")


def show(
    options: "RehearseOptions",
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


def _measured(options: "RehearseOptions", world: World, stop: StopRequest, watch: Monitored | None) -> int:
    from stagerun.tools.rehearse.hosts_measure import measure, meet
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
                tell("interrupted: nothing is kept")
            comm.close()
            return ExitCode.INTERRUPTED
        found += verdicts(measured)
    name = schedule.name if schedule is not None else options.folder
    rank0(comm, lambda: show(options, name, facts, measured, found))
    comm.close()
    return worst(found)
