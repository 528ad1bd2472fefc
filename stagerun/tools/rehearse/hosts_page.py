"""What was measured on the hosts, what that says about each, and one page on all of it. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median_high, median_low
from typing import Any

from stagerun.base.errors import ExitCode
from stagerun.base.text import columns, count, size
from stagerun.launch.compare import Finding, worst
from stagerun.launch.facts import Facts

# All workers wait for the slowest in every iteration. Hosts of one kind are within a tenth or two of each other; half as slow again is
# another job on the host, a throttled processor or memory that is on the wrong node, and costs a third of all that is paid.
SLOW_STEP = 1.5
# Ports of one switch differ by little; a third is a link that came up at a lower speed, a bad cable, or a route through another network.
SLOW_LINK = 1 / 3
# Round trips vary more, with what else runs on a host; below a millisecond it does not matter.
SLOW_ROUND_TRIP, LEAST_ROUND_TRIP_S = 5.0, 1e-3
# With more hosts each one is paired with so many others, of all distances in the list, and not with all.
MOST_ROUNDS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTimes:
    """One host's slowest worker, with all workers of the host busy and no other host waited for: seconds of forward and backward of
    one device batch, and of one update of the weights. `python_seconds`: of the stage's own function for one image, in one thread."""

    host: str
    workers: int
    pass_seconds: float
    update_seconds: float
    python_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        return self.pass_seconds + self.update_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """From one host to another: bytes per second, and seconds of a round trip."""

    sender: str
    receiver: str
    rate: float
    round_trip: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """`together_seconds` is a step of all workers with their gradients added up, None where that would have taken too long.
    `all_reduce_seconds` is for `gradient_bytes`; extrapolated from `all_reduce_bytes`, if these are fewer."""

    stage: str
    device: str
    workers: int
    device_batch_size: int
    batch_size: int
    passes: int  # forward and backward passes of the busiest worker in one iteration
    hosts: tuple[HostTimes, ...]
    links: tuple[Link, ...]
    gradient_bytes: int
    all_reduce_bytes: int
    all_reduce_seconds: float
    together_seconds: float | None
    python: str = ""  # the stage's function of images (`transform_param { python }`)
    loader_threads: int = 1

    @property
    def loading_seconds(self) -> float:
        """What the function alone takes for the images of an iteration, on the slowest host, its workers and their threads sharing them."""
        return max(host.python_seconds for host in self.hosts) * self.batch_size / (self.workers * self.loader_threads)

    @property
    def alone_seconds(self) -> float:
        """A step of the slowest host."""
        return max(host.seconds for host in self.hosts)

    @property
    def exposed_seconds(self) -> float:
        """Communication that backward doesn't hide, per iteration: measured, or else all of it."""
        if self.together_seconds is None:
            return self.all_reduce_seconds
        return max(0.0, self.together_seconds - self.alone_seconds)

    @property
    def compute_seconds(self) -> float:
        """The computing of one iteration of the real batch, on the slowest host."""
        return max(self.passes * host.pass_seconds + host.update_seconds for host in self.hosts)

    @property
    def iteration_seconds(self) -> float:
        return self.compute_seconds + self.exposed_seconds


def rounds(hosts: int, most: int = MOST_ROUNDS) -> list[list[tuple[int, int]]]:
    """Pairs of hosts, by number, in rounds in which each host has at most one: all pairs where there are no more than `most` rounds of
    them, else `most` rounds spread over all. The circle method: host 0 stays, the others move on by one."""
    circle = list(range(hosts + hosts % 2))  # with an odd number, whoever meets the last one rests
    found = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(min(p), max(p)) for p in pairs if max(p) < hosts])
        circle[1:] = [circle[-1], *circle[1:-1]]
    if len(found) <= most:
        return found
    return [found[i * len(found) // most] for i in range(most)]


def verdicts(measured: Measured) -> list[Finding]:
    """What is slow, and how many times as slow as usual."""
    links = list(_slow_links(measured))
    odd = any(finding.code for finding in links)
    return [*_slow_hosts(measured.hosts), *links, *([] if odd else _slow_network(measured))]


_SLOW_HOST = "look there for another job, a throttled processor or memory on the wrong node; or leave the host out"


def _slow_hosts(hosts: Sequence[HostTimes]) -> Iterator[Finding]:
    usual = median_low(host.seconds for host in hosts)  # where half of them are slow, that of the others
    if len(hosts) == 2:
        fast, slow = sorted(hosts, key=lambda host: host.seconds)
        if slow.seconds > SLOW_STEP * fast.seconds:
            text = (
                f"{slow.host} takes {_s(slow.seconds)} for a training step alone, and {fast.host} {_s(fast.seconds)}: "
                f"{slow.seconds / fast.seconds:.1f} times as long"
            )
            yield Finding(hosts=(slow.host, fast.host), text=text, hint=_SLOW_HOST, code=ExitCode.PEER)
        return
    for host in hosts:
        if host.seconds > SLOW_STEP * usual:
            text = (
                f"{host.host}: slow: a training step alone takes {_s(host.seconds)} (median of the hosts {_s(usual)}): "
                f"{host.seconds / usual:.1f} times as long"
            )
            yield Finding(hosts=(host.host,), text=text, hint=_SLOW_HOST, code=ExitCode.PEER)


_SLOW_LINK = "look at the speed the port came up with (ethtool), at the cable, and at the route between them"
_SLOW_NETWORK = "a faster network, fewer hosts, or a larger batch; `ethtool` shows the speed that a port came up with"


def _slow_links(measured: Measured) -> Iterator[Finding]:
    """A host is slow by the best that it gets with any other: of three hosts with one slow port, four of the six links are slow. A link is
    slow by what both its ends are known to do."""
    links = measured.links
    if not links:
        return
    names = [host.host for host in measured.hosts]
    best = {
        "sends": {name: max((x.rate for x in links if x.sender == name), default=0.0) for name in names},
        "receives": {name: max((x.rate for x in links if x.receiver == name), default=0.0) for name in names},
    }
    slow: dict[str, set[str]] = {"sends": set(), "receives": set()}
    for name in names if len(names) > 2 else ():
        said = []
        for does, rates in best.items():
            usual = median_high(rates.values())
            if rates[name] < SLOW_LINK * usual:
                slow[does].add(name)
                said.append(f"{does} {bits(rates[name])} at best (median of the hosts {bits(usual)})")
        if said:
            factor = max(median_high(rates.values()) / max(rates[name], 1.0) for rates in best.values())
            text = f"{name}: slow link: {', '.join(said)}: {factor:.0f} times as slow"
            yield Finding(hosts=(name,), text=text, hint=_SLOW_LINK, code=ExitCode.PEER)
    for link in links:
        expected = min(best["sends"][link.sender], best["receives"][link.receiver])
        known = link.sender in slow["sends"] or link.receiver in slow["receives"]
        if link.rate < SLOW_LINK * expected and not known:
            text = (
                f"slow link from {link.sender} to {link.receiver}: {bits(link.rate)}, where both have {bits(expected)} with "
                f"others: {expected / max(link.rate, 1.0):.0f} times as slow"
            )
            yield Finding(hosts=(link.sender, link.receiver), text=text, hint=_SLOW_LINK, code=ExitCode.PEER)
    if len(names) == 2:
        yield from _two(links)
    yield from _far(links, names)


def _two(links: Sequence[Link]) -> Iterator[Finding]:
    """Neither of two hosts is the odd one; only the two directions can be compared."""
    fast, slow = sorted(links, key=lambda link: -link.rate)
    if slow.rate < SLOW_LINK * fast.rate:
        text = (
            f"slow link from {slow.sender} to {slow.receiver}: {bits(slow.rate)}, and {bits(fast.rate)} the other way: "
            f"{fast.rate / max(slow.rate, 1.0):.0f} times as slow"
        )
        yield Finding(hosts=(slow.sender, slow.receiver), text=text, hint=_SLOW_LINK, code=ExitCode.PEER)


def _slow_network(m: Measured) -> Iterator[Finding]:
    """Where all links are as slow as each other, or most are, none of them is odd: but what it costs is known."""
    if m.links and m.exposed_seconds > m.compute_seconds:
        rates = [link.rate for link in m.links]
        text = (
            f"the network is slow for this model: {_s(m.exposed_seconds)} of communication in each iteration, and {_s(m.compute_seconds)} "
            f"of computing; the fastest link between two hosts carries {bits(max(rates))}, the slowest {bits(min(rates))}"
        )
        yield Finding(hosts=tuple(host.host for host in m.hosts), text=text, hint=_SLOW_NETWORK)


def _far(links: Sequence[Link], names: Sequence[str]) -> Iterator[Finding]:
    if len(names) < 3:
        return
    best = {n: min((x.round_trip for x in links if n in (x.sender, x.receiver)), default=0.0) for n in names}
    usual = median_low(best.values())
    for name, trip in best.items():
        if trip > max(SLOW_ROUND_TRIP * usual, usual + LEAST_ROUND_TRIP_S):
            text = f"{name}: a round trip takes {1e3 * trip:.1f} ms at best, where the median of the hosts is {1e3 * usual:.1f} ms"
            yield Finding(hosts=(name,), text=text)


def bits(rate: float) -> str:
    """Bytes per second as `940 Mbit/s`."""
    value = 8 * rate
    for unit in ("bit/s", "kbit/s", "Mbit/s"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} Gbit/s"


def _s(seconds: float) -> str:
    return f"{seconds:.3g} s"


# -- the page

# With more hosts than this, only those are listed that a finding is about.
MOST_LINES = 40


def page(name: str, facts: Mapping[str, Facts], measured: Measured | None, findings: Sequence[Finding]) -> str:
    """`name` of the schedule; `measured` is None where the findings prevented it. A host of a finding that has no facts is
    missing."""
    missing = [host for finding in findings for host in finding.hosts if host not in facts]
    parts = ["\n".join(_head(name, facts, missing, measured)), _table(facts, missing, measured, findings)]
    if measured is not None:
        parts.append("\n".join(_step(measured)))
    refused = [finding for finding in findings if finding.code]
    warned = [finding for finding in findings if not finding.code]
    parts += ["\n".join(f"warning: {finding.render()}" for finding in warned)] if warned else []
    parts += ["\n".join(finding.render() for finding in refused)] if refused else []
    parts.append(_verdict(facts, measured, findings))
    return "\n\n".join(parts)


def record(
    name: str, facts: Mapping[str, Facts], measured: Measured | None, findings: Sequence[Finding]
) -> dict[str, Any]:
    """The same as a JSON object."""
    derived = ("alone_seconds", "exposed_seconds", "iteration_seconds")
    return {
        "schedule": name,
        "code": worst(findings),
        "hosts": {host: one.as_json() for host, one in facts.items()},
        "measured": measured and asdict(measured) | {name: getattr(measured, name) for name in derived},
        "findings": [asdict(finding) for finding in findings],
    }


def _head(name: str, facts: Mapping[str, Facts], missing: Sequence[str], measured: Measured | None) -> list[str]:
    text = f"hosts for {name}: {count(len(facts) + len(missing), 'host')}"
    if missing:
        text += f", {len(missing)} missing"
    if measured is not None:
        text += f", {count(measured.workers, 'worker')} on {measured.device}"
    lines = [text]
    if facts:
        one = next(iter(facts.values()))
        said = [f"{p} {one.versions[p]}" for p in ("stagerun", "torch", "python")]
        lines.append(f"on {next(iter(facts))}: {', '.join(said)}; {one.processor}, {one.instruction_set}")
        if one.out is not None:
            kind = f"{one.out.kind}, which other hosts may see, too" if one.out.shared else f"{one.out.kind}, its own"
            lines.append(f"output: {one.out.path} on {kind}, {size(one.out.free)} free")
    return lines


def _table(
    facts: Mapping[str, Facts], missing: Sequence[str], measured: Measured | None, findings: Sequence[Finding]
) -> str:
    blamed = {host for finding in findings if finding.code for host in finding.hosts}
    shown = list(facts)
    if len(shown) > MOST_LINES:
        shown = [host for host in shown if host in blamed][:MOST_LINES] or shown[:MOST_LINES]
    scratch = any(one.scratch for one in facts.values())
    head = ["host", "cores", "memory", "GPUs", "images", *["scratch free"] * scratch]
    timed = {host.host: host for host in measured.hosts} if measured is not None else {}
    links = measured is not None and bool(measured.links)
    head += ["workers", "step alone", *["of median"] * (len(timed) > 1)] if timed else []
    head += ["sends", "receives", "round trip"] if links else []
    usual = median_low(host.seconds for host in timed.values()) if timed else 0.0
    rows = []
    for host in shown:
        one = facts[host]
        row = [host, str(one.cores), f"{one.memory / 1e9:.0f} GB", str(len(one.gpus) or "-"), _images(one)]
        row += [size(one.scratch.free) if one.scratch else "-"] * scratch
        if host in timed:
            mine = timed[host]
            row += [str(mine.workers), f"{mine.seconds:.3g} s", *[f"{mine.seconds / usual:.2f}"] * (len(timed) > 1)]
        if links and measured is not None:
            row += _links(host, measured)
        rows.append(row)
    rows += [[host, *["-"] * (len(head) - 1)] for host in missing[:MOST_LINES]]
    lines = columns([head, *rows])
    if len(shown) < len(facts):
        lines.append(f"and {len(facts) - len(shown)} more hosts")
    return "\n".join(lines)


def _images(one: Facts) -> str:
    if not one.images:
        return "-"
    missing = [image.role for image in one.images if image.seen is None]
    return f"no {' and '.join(missing)}" if missing else "there"


def _links(host: str, measured: Measured) -> list[str]:
    """The best of the hosts that it was paired with, which is what it can do."""
    sent = [link.rate for link in measured.links if link.sender == host]
    got = [link.rate for link in measured.links if link.receiver == host]
    trips = [link.round_trip for link in measured.links if host in (link.sender, link.receiver)]
    return [bits(max(sent)), bits(max(got)), f"{1e3 * min(trips):.2f} ms"] if sent and got else ["-", "-", "-"]


def _step(m: Measured) -> list[str]:
    update = max(host.update_seconds for host in m.hosts)
    lines = [
        f"a step of stage `{m.stage}`, {count(m.device_batch_size, 'image')} per worker: {m.alone_seconds:.3g} s on the slowest host "
        f"alone (update of the weights {update:.2g} s)"
    ]
    hidden = ""
    if m.workers > 1:
        lines[0] += "; all together " + (
            "not measured: the sum takes too long" if m.together_seconds is None else f"{m.together_seconds:.3g} s"
        )
        less = f" (from {size(m.all_reduce_bytes)} of them)" if m.all_reduce_bytes < m.gradient_bytes else ""
        rate = 2 * (m.workers - 1) / m.workers * m.gradient_bytes / max(m.all_reduce_seconds, 1e-9)
        lines.append(
            f"gradients: {size(m.gradient_bytes)}, added up in {m.all_reduce_seconds:.3g} s{less}: {bits(rate)} per worker"
        )
        hidden = f", {m.exposed_seconds:.2g} s of communication that computing does not hide"
    passes = "1 pass" if m.passes == 1 else f"{m.passes} passes"
    lines.append(
        f"an iteration of {m.batch_size} images, {passes} per worker: {m.compute_seconds:.3g} s of computing{hidden}: "
        f"{m.batch_size / m.iteration_seconds:.0f} images/s where images are ready in time"
    )
    if m.python:
        one = max(host.python_seconds for host in m.hosts)
        slower = f", longer than the {m.iteration_seconds:.3g} s of the rest: workers wait for images"
        lines.append(
            f"images: `{m.python}` takes {1000 * one:.3g} ms an image on the slowest host, {m.loading_seconds:.3g} s for those of an iteration "
            f"where {count(m.loader_threads, 'thread')} per worker can share them"
            + slower
            * (m.loading_seconds > m.iteration_seconds)
        )
    return lines


def _verdict(facts: Mapping[str, Facts], measured: Measured | None, findings: Sequence[Finding]) -> str:
    refused = sum(1 for finding in findings if finding.code)
    if not refused:
        return "verdict: ready" if not findings else f"verdict: ready, with {count(len(findings), 'warning')}"
    text = f"verdict: not ready: {count(refused, 'finding')}"
    return text if measured is not None or not facts else f"{text}; nothing was measured"
