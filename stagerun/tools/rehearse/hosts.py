"""The hosts of a job: the checks of `run`, then links and training steps, and a page that says which host is slow or unlike the others."""

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import median_high, median_low
from typing import NamedTuple

import psutil
import torch

from stagerun.base.errors import ExitCode
from stagerun.base.recipe import Schedule
from stagerun.base.text import columns, count, size
from stagerun.comm import SoloComm, gather_json
from stagerun.data.loaders import preflight
from stagerun.engine.device import environment
from stagerun.system.host import host_name, nvidia_gpus
from stagerun.tools.rehearse import one_stage
from stagerun.tools.rehearse.frame import Answer, Interrupted, Session
from stagerun.tools.rehearse.schedule import rehearsal
from stagerun.tools.rehearse.trials import turn
from stagerun.train.agreement import everyone, require_same_schedule
from stagerun.train.compare import Finding, outliers, worst

# All workers wait for the slowest in every iteration. Hosts of one kind are within a tenth or two of each other; half as slow again is
# another job on the host, a throttled processor or memory on the wrong node, and costs a third of all that is paid.
SLOW_STEP = 1.5
# Ports of one switch differ by little; a third is a link that came up at a lower speed, a bad cable, or a route through another network.
SLOW_LINK = 1 / 3
_SLOW_HOST = "look on it for another job, a throttled processor or memory on the wrong node; or leave the host out"
_SLOW_LINK = "look at the speed the port came up with (ethtool), at the cable, and at the route between them"
_BITS = "on unlike hosts another number of workers, or another order of hosts, may give other bits"
_HINTS = {"cores": "all wait for the slowest; `--threads` makes them alike", "GPUs": "all wait for the slowest"}


class HostSpeed(NamedTuple):
    """`seconds` of a step of the host's slowest worker, with all workers of the host busy and no other host waited for. `link`: bytes per second
    added up with the better of the two next hosts; 0 for a single host."""

    host: str
    workers: int
    seconds: float
    link: float = 0.0


def compare(session: Session) -> Answer:
    """Raise in the words of `run` where code, schedule or images prevent a run, naming hosts."""
    comm, (schedule, _) = session.comm, session.read()
    everyone(comm, lambda: preflight(schedule))
    require_same_schedule(comm, session.world, schedule)
    heard = gather_json(comm, [host_name(), machine(session.device)])
    machines, speeds = dict(heard), measure(session, schedule, [host for host, _ in heard])
    findings = [*differences(machines), *slow_ones(speeds)]
    record = {
        "schedule": schedule.name,
        "code": worst(findings),
        "hosts": machines,
        "measured": [speed._asdict() for speed in speeds],
        "findings": [asdict(finding) for finding in findings],
    }
    return Answer(record, page(schedule.name, machines, speeds, findings), worst(findings))


def machine(device: torch.device) -> dict[str, str]:
    gpus = ", ".join(f"{number} x {name}" for name, number in Counter(nvidia_gpus()).items())
    return {
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{psutil.virtual_memory().total / 1e9:.0f} GB",
        "GPUs": gpus or "none",
        **environment(device, 0, ""),
    }


def differences(machines: Mapping[str, Mapping[str, str]]) -> Iterator[Finding]:
    """Warn of what changes bits or speed. The firmware keeps some memory."""
    for what in next(iter(machines.values())):
        if what != "memory":
            yield from outliers({host: one[what] for host, one in machines.items()}, what, _HINTS.get(what, _BITS))


# -- measured

_MESSAGE, _MESSAGES = 1 << 22, 3  # bytes; the fastest counts
MOST = 10**6  # iterations: as many as a turn has


def measure(session: Session, schedule: Schedule, hosts: Sequence[str]) -> list[HostSpeed]:
    """Collective; PeerError, Interrupted. `hosts` by rank."""
    comm, link = session.comm, 0.0
    leaders = [hosts.index(name) for name in dict.fromkeys(hosts)]
    # A ring, one pair after the other: a slow port slows two pairs, and the next hosts have another one.
    for pair in sorted({tuple(sorted(pair)) for pair in zip(leaders, leaders[1:] + leaders[:1], strict=True)}):
        if (part := comm.part(sorted(set(pair)))) is not None and part.size > 1:
            for _ in range(_MESSAGES):
                data, since = torch.zeros(_MESSAGE, dtype=torch.uint8), time.monotonic()
                part.all_reduce(data, "measure the link")()
                link = max(link, _MESSAGE / (time.monotonic() - since))
        comm.barrier()
    step = rehearsal(one_stage(session.options, schedule), MOST, 1, None)
    with session.images(step, True) as source:
        heard = gather_json(comm, [turn(session, source, SoloComm(comm.pulse)), link])
    if not all(one for one, _ in heard):
        raise Interrupted(comm.rank)
    speeds = []
    for leader in leaders:
        steps = [one[0] for (one, _), name in zip(heard, hosts, strict=True) if name == hosts[leader]]
        speeds.append(HostSpeed(hosts[leader], len(steps), max(steps), heard[leader][1]))
    return speeds


def slow_ones(speeds: Sequence[HostSpeed]) -> Iterator[Finding]:
    """Compare each host with the median; where half of the hosts are slow, with the other half."""
    step, link = median_low(one.seconds for one in speeds), median_high(one.link for one in speeds)
    for host, _, seconds, rate in speeds:
        text = f"{host}: slow: a training step alone takes {seconds:.3g} s (median of the hosts {step:.3g} s)"
        if seconds > SLOW_STEP * step:
            yield Finding(
                hosts=(host,), text=f"{text}: {seconds / step:.1f} times as long", hint=_SLOW_HOST, code=ExitCode.PEER
            )
        text = f"{host}: slow link: {size(rate)}/s at best (median of the hosts {size(link)}/s)"
        if rate < SLOW_LINK * link:
            yield Finding(
                hosts=(host,), text=f"{text}: {link / rate:.0f} times as slow", hint=_SLOW_LINK, code=ExitCode.PEER
            )


def page(
    name: str, machines: Mapping[str, Mapping[str, str]], speeds: Sequence[HostSpeed], findings: Sequence[Finding]
) -> str:
    """`name` of the schedule."""
    rows = [("host", "cores", "memory", "GPUs", "workers", "step alone", "link")]
    for host, workers, seconds, link in speeds:
        cores, memory, gpus = (machines[host][what] for what in rows[0][1:4])
        rows.append((host, cores, memory, gpus, str(workers), f"{seconds:.3g} s", f"{size(link)}/s"))
    slow = [finding.render() for finding in findings if finding.code]
    unlike = [f"warning: {finding.render()}" for finding in findings if not finding.code]
    verdict = f"not ready: {count(len(slow), 'finding')}" if slow else "ready"
    head = f"hosts for {name}: {count(len(speeds), 'host')}"
    parts = [[head], columns(rows), unlike, slow, [f"verdict: {verdict}"]]
    return "\n\n".join("\n".join(part) for part in parts if part)
