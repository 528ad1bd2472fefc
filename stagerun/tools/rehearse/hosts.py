"""`stagerun rehearse --hosts`: which host is missing, slow or different. Facts first, which need no torch; then workers measure; one page says
what came out."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median_high, median_low
from typing import TYPE_CHECKING

from stagerun.base.errors import ExitCode, UsageError
from stagerun.base.text import columns, count, listed, size
from stagerun.command.ending import say, tell
from stagerun.command.shared import limits
from stagerun.language import load
from stagerun.launch import StopRequest
from stagerun.launch.hosts import on_hosts
from stagerun.launch.options import HostOptions
from stagerun.launch.start import Orders, work
from stagerun.launch.watch.worker import Monitored
from stagerun.plan.choice import check_workers
from stagerun.system.world import World
from stagerun.tools.rehearse.facts import Facts, differences, host_facts, troubles
from stagerun.train.compare import Finding, worst

if TYPE_CHECKING:
    from stagerun.tools.rehearse.command import RehearseOptions

# All workers wait for the slowest in every iteration. Hosts of one kind are within a tenth or two of each other; half as slow again is
# another job on the host, a throttled processor or memory that is on the wrong node, and costs a third of all that is paid.
SLOW_STEP = 1.5
# Ports of one switch differ by little; a third is a link that came up at a lower speed, a bad cable, or a route through another network.
SLOW_LINK = 1 / 3
_SLOW_HOST = "look there for another job, a throttled processor or memory on the wrong node; or leave the host out"
_SLOW_LINK = "look at the speed the port came up with (ethtool), at the cable, and at the route between them"


def check_hosts(options: "RehearseOptions", reach: HostOptions) -> int:
    """Start the workers on the hosts, or be one of them."""
    if options.on_hosts:
        return work(lambda world, stop, watch: _measured(options, world, stop, watch), _orders(options))
    of_stages = (options.only, options.until, options.iters, options.device_batch, options.synthetic, options.workers)
    if any(of_stages) or options.find_lr is not None:
        raise UsageError("--hosts compares hosts, and rehearses no stage", "leave out what is about stages, or --hosts")
    schedule = load(options.folder, options.overrides)
    if not any(stage.enabled for stage in schedule.stages):
        raise UsageError(f"no stage of {schedule.name} is enabled", "take `enabled: false` out of one of them")
    there = replace(options, folder=reach.folder_there(options.folder))
    return on_hosts(_orders(there), options.folder, schedule, reach, options.nproc)


def _orders(options: "RehearseOptions") -> Orders:
    words = replace(options, on_hosts=True).arguments()
    return Orders(tuple(words), options.threads, saves=False, limits=limits(()))


def _measured(options: "RehearseOptions", world: World, stop: StopRequest, watch: Monitored | None) -> int:
    """A worker."""
    from stagerun.tools.rehearse.hosts_measure import measure, meet
    from stagerun.train.agreement import rank0
    from stagerun.train.join import join

    device, comm = join(world, options.threads, stop, watch, patient=True)
    hosts, facts = meet(
        comm, world, lambda: host_facts(options.folder, options.overrides, options.out, writes=world.rank == 0)
    )
    found, name, measured = [*troubles(facts), *differences(facts)], options.folder, None
    if not worst(found):
        schedule = load(options.folder, options.overrides)
        check_workers(schedule, comm.size)
        name, measured = schedule.name, measure(schedule, comm, device, hosts, stop)
        if measured is None:
            if comm.rank == 0:
                tell("interrupted: nothing is kept")
            comm.close()
            return ExitCode.INTERRUPTED
        found += slow_ones(measured.hosts)
    record = {
        "schedule": name,
        "code": worst(found),
        "hosts": {host: asdict(one) for host, one in facts.items()},
        "measured": measured and asdict(measured),
        "findings": [asdict(finding) for finding in found],
    }
    rank0(comm, lambda: say(json.dumps(record, indent=2) if options.as_json else page(name, facts, measured, found)))
    comm.close()
    return worst(found)


# -- what was measured


@dataclass(frozen=True, slots=True)
class HostSpeed:
    """`seconds` of a step of the host's slowest worker, with all workers of the host busy and no other host waited for. Bytes per second to and
    from the best of the other hosts; 0 where there is none."""

    host: str
    workers: int
    seconds: float
    sends: float = 0.0
    receives: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """`together_seconds`: a step of all workers, with the sum of the gradients; None where that would take too long."""

    stage: str
    device: str
    workers: int
    device_batch_size: int
    hosts: tuple[HostSpeed, ...]
    gradient_bytes: int
    together_seconds: float | None


def slow_ones(hosts: Sequence[HostSpeed]) -> Iterator[Finding]:
    """What is slow, and how many times as slow as usual. Where half of the hosts are slow, usual is what the others do. A host's link is slow
    by the best that it gets with any other: of three hosts with one slow port, four of the six links are slow."""
    step = median_low(host.seconds for host in hosts)
    usual = {does: median_high(getattr(host, does) for host in hosts) for does in ("sends", "receives")}
    for host in hosts:
        if host.seconds > SLOW_STEP * step:
            text = (
                f"{host.host}: slow: a training step alone takes {host.seconds:.3g} s (median of the hosts {step:.3g} s): "
                f"{host.seconds / step:.1f} times as long"
            )
            yield Finding(hosts=(host.host,), text=text, hint=_SLOW_HOST, code=ExitCode.PEER)
        for does, rate in usual.items():
            if (its := getattr(host, does)) < SLOW_LINK * rate:
                text = (
                    f"{host.host}: slow link: {does} {bits(its)} at best (median of the hosts {bits(rate)}): "
                    f"{rate / max(its, 1.0):.0f} times as slow"
                )
                yield Finding(hosts=(host.host,), text=text, hint=_SLOW_LINK, code=ExitCode.PEER)


def bits(rate: float) -> str:
    """Bytes per second, as `940 Mbit/s`."""
    value, units = 8 * rate, ["bit/s", "kbit/s", "Mbit/s", "Gbit/s"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}"


# -- the page


def page(name: str, facts: Mapping[str, Facts], measured: Measured | None, findings: Sequence[Finding]) -> str:
    """`name` of the schedule; `measured` is None where the findings prevented it."""
    head = f"hosts for {name}: {count(len(facts), 'host')}"
    if measured is not None:
        head += f", {count(measured.workers, 'worker')} on {measured.device}"
    one = next(iter(facts.values()))
    said = ", ".join(f"{package} {one.machine[package]}" for package in ("stagerun", "torch", "python"))
    lines = [head, f"on {next(iter(facts))}: {said}; {one.machine['processor']}, {one.machine['instruction set']}"]
    lines += [f"output: {one.output}"] if one.output else []
    refused = [finding.render() for finding in findings if finding.code]
    warned = [f"warning: {finding.render()}" for finding in findings if not finding.code]
    if refused:
        verdict = f"not ready: {count(len(refused), 'finding')}" + ("; nothing was measured" * (measured is None))
    else:
        verdict = f"ready, with {count(len(warned), 'warning')}" if warned else "ready"
    parts = [lines, _table(facts, measured), _step(measured) if measured is not None else [], warned, refused]
    return "\n\n".join("\n".join(part) for part in (*parts, [f"verdict: {verdict}"]) if part)


def _table(facts: Mapping[str, Facts], measured: Measured | None) -> list[str]:
    speeds = {host.host: host for host in measured.hosts} if measured is not None else {}
    head = ["host", "cores", "memory", "GPUs", "images", "scratch free"]
    rows = [head + (["workers", "step alone", "sends", "receives"] if speeds else [])]
    for host, one in facts.items():
        missing = [image.role for image in one.reads.images if image.seen is None] if one.reads is not None else []
        images = f"no {listed(missing)}" if missing else "there" if one.reads is not None else "-"
        scratch = "-" if one.scratch_free is None else size(one.scratch_free)
        row = [host, *(one.machine[what] for what in ("cores", "memory", "GPUs")), images, scratch]
        if (speed := speeds.get(host)) is not None:
            links = [bits(rate) if rate else "-" for rate in (speed.sends, speed.receives)]
            row += [str(speed.workers), f"{speed.seconds:.3g} s", *links]
        rows.append(row)
    return columns(rows)


def _step(m: Measured) -> list[str]:
    slowest = max(host.seconds for host in m.hosts)
    text = f"a step of stage `{m.stage}`, {count(m.device_batch_size, 'image')} per worker: {slowest:.3g} s on the slowest host alone"
    if m.workers == 1:
        return [text]
    together = "not measured, on links so slow" if m.together_seconds is None else f"{m.together_seconds:.3g} s"
    return [f"{text}; all together {together}, with {size(m.gradient_bytes)} of gradients added up"]
