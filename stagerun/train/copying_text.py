"""What is said about copies on scratch disks: how far each node is, and how it ended."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stagerun.events import Note
from stagerun.text import count, duration, size

_MOST_NODES_NAMED = 8


class Status(enum.IntEnum):
    """What a rank's copier is doing, or how it ended."""

    RUNNING = 0
    WAITING = 1  # for another process that makes the copies, of this run or another
    DONE = 2
    STOPPED = 3
    FAILED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What one rank has to say: how many bytes it has copied itself, in how long, and how many of them other nodes handed on; or
    `text`."""

    host: str
    bytes: int = 0
    seconds: float = 0.0
    handed: int = 0
    text: str = ""
    warning: bool = True


def progress_text(ranks: Sequence[tuple[str, Status, int, int]], scratch: str, elapsed: float) -> str:
    """`ranks`: (host, status, bytes done, bytes in all, 0 where that isn't known yet) of each rank."""
    begun = f"copying the images to {scratch}"
    everybody = {host for host, *_ in ranks}
    copying = {host: (done, total) for host, status, done, total in ranks if status is Status.RUNNING and total}
    ended = {host for host, status, *_ in ranks if status is Status.DONE}  # with one rank of a node all of them
    if not copying:
        waiting = {host for host, status, _, total in ranks if status is Status.WAITING and total} - ended
        names = sorted(waiting)
        if names:
            return f"{begun}: {_names(names)} wait{'s' if len(names) == 1 else ''} for a copy that another run makes"
        return f"{begun}: {len(ended)} of {count(len(everybody), 'node')} done"
    share = {host: done / total for host, (done, total) in copying.items()}
    slowest = min(share, key=lambda host: (share[host], host))
    done, total = copying[slowest]
    text = f"{size(done)} of {size(total)}, {size(done / elapsed)}/s"
    if done:
        text += f", {duration((total - done) * elapsed / done)} left"
    if len(everybody) == 1:
        return f"{begun}: {text}"
    each = ""
    if len(copying) <= _MOST_NODES_NAMED:
        each = ": " + ", ".join(f"{host} {100 * share[host]:.0f} %" for host in sorted(share))
    return f"{begun} of {len(copying)} of {count(len(everybody), 'node')}{each}; slowest {slowest}: {text}"


def as_notes(told: Sequence[Told], scratch: str, beside: bool) -> list[Note]:
    """One note about all copies, and one for each thing else, with the nodes where it was so."""
    notes = []
    done = [one for one in told if not one.text]
    if done:
        notes.append(Note(text=_ended(done, scratch) + (", and are read there from now on" if beside else "")))
    for text, warning in dict.fromkeys((one.text, one.warning) for one in told if one.text):
        hosts = list(dict.fromkeys(one.host for one in told if one.text == text))
        notes.append(Note(text=f"{_names(hosts)}: {text}", warning=warning))
    return notes


def _ended(done: Sequence[Told], scratch: str) -> str:
    hosts = {one.host for one in done}
    # Of a node's ranks one has copied.
    copied = {one.host: one for one in done if one.bytes}
    if not copied:
        return f"the images are in {scratch}" + (f" of all {len(hosts)} nodes" if len(hosts) > 1 else "")
    slowest = max(copied.values(), key=lambda one: (one.seconds, one.host))
    text = f"{size(slowest.bytes)} in {duration(slowest.seconds)}"
    if slowest.seconds:
        text += f", {size(slowest.bytes / slowest.seconds)}/s"
    if len(hosts) == 1:
        return f"the images were copied to {scratch}: {text}"
    there = f"; {count(len(hosts) - len(copied), 'node')} had them" if len(hosts) > len(copied) else ""
    if handed := sum(one.handed for one in done):
        share = 100 * handed / sum(one.bytes for one in copied.values())
        there = f", {share:.0f} % of all copies from node to node{there}"
    return f"the images were copied to {scratch} of {count(len(copied), 'node')}, slowest {slowest.host}: {text}{there}"


def copies_differ(path: str, digests: Mapping[str, str]) -> str:
    """`digests`: of the copy, by host, '' where there is none."""
    alike: dict[str, list[str]] = {}
    for host, digest in digests.items():
        if digest:
            alike.setdefault(digest, []).append(host)
    groups = sorted(alike.values(), key=lambda hosts: (len(hosts), hosts))
    return f"{path}: its copies on {' and on '.join(map(_names, groups))} have different bytes"


def _names(hosts: Sequence[str]) -> str:
    more = len(hosts) - _MOST_NODES_NAMED
    return ", ".join(hosts[:_MOST_NODES_NAMED]) + (f" and {more} more" if more > 0 else "")
