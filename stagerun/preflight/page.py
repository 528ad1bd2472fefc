"""One page on the hosts of a job: a line for each, what a step takes, and what is wrong. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median_low
from typing import Any

from stagerun.preflight.compare import Finding, worst
from stagerun.preflight.facts import Facts
from stagerun.preflight.measured import Measured, bits
from stagerun.text import columns, count, size

# With more hosts than that only those are listed of which there is something to say.
MOST_LINES = 40


def page(name: str, facts: Mapping[str, Facts], measured: Measured | None, findings: Sequence[Finding]) -> str:
    """`name` of the schedule; `measured` None: nothing was, because of the findings. A host that one is about and that has no facts is
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
    text = f"preflight of {name}: {count(len(facts) + len(missing), 'host')}"
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
    return lines


def _verdict(facts: Mapping[str, Facts], measured: Measured | None, findings: Sequence[Finding]) -> str:
    refused = sum(1 for finding in findings if finding.code)
    if not refused:
        return "verdict: ready" if not findings else f"verdict: ready, with {count(len(findings), 'warning')}"
    text = f"verdict: not ready: {count(refused, 'finding')}"
    return text if measured is not None or not facts else f"{text}; nothing was measured"
