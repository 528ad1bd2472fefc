"""In what hosts differ, by their facts, and which is the odd one. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stagerun.base.errors import ExitCode
from stagerun.base.text import count, size
from stagerun.launch.facts import Facts, Images, Reads
from stagerun.system.lmdb_file import Glance

_BITS = "on unlike hosts another number of workers, or another order of hosts, may give other bits"
_HINTS = dict.fromkeys(("torch", "processor", "instruction set", "processor flags"), _BITS) | {
    "cores": "all wait for the slowest; `--threads` makes them alike",
    "GPUs": "all wait for the slowest",
}
_NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`hosts` are those it is about, in the order of the facts. `code` is the exit code of a refusal, 0 of a warning."""

    hosts: tuple[str, ...]
    text: str
    hint: str = ""
    code: int = 0

    def render(self) -> str:
        return self.text + (f"\n  hint: {self.hint}" if self.hint else "")


def worst(findings: Iterable[Finding]) -> int:
    """The exit code of all of them; 0 where none refuses. Of several the least, which is the nearest to a mistake of the user's."""
    return min((int(finding.code) for finding in findings if finding.code), default=0)


def troubles(facts: Mapping[str, Facts]) -> list[Finding]:
    """What is wrong with a host by itself; hosts with the same trouble are one finding."""
    found: dict[tuple[str, str, int], list[str]] = {}
    for host, one in facts.items():
        for trouble in one.troubles:
            found.setdefault((trouble.text, trouble.hint, trouble.code), []).append(host)
    return [
        Finding(
            hosts=tuple(hosts),
            text=f"{f'all {len(hosts)} hosts' if 1 < len(hosts) == len(facts) else _names(hosts)}: {text}",
            hint=hint,
            code=code,
        )
        for (text, hint, code), hosts in found.items()
    ]


def differences(facts: Mapping[str, Facts]) -> list[Finding]:
    """What must be the same on all hosts and isn't, and what only changes bits or speed (code 0). `facts` by the name that a host is to
    be called by, in the order of ranks. A host that could not read its schedule is not compared by it."""
    found = other_schedules({host: one.reads for host, one in facts.items() if one.reads is not None})
    for what in next(iter(facts.values())).machine:
        if what != "memory":  # of which the firmware keeps some
            values = {host: one.machine.get(what, "none") for host, one in facts.items()}
            found += odd_ones(values, what, _HINTS.get(what, ""))
    return found


def other_schedules(reads: Mapping[str, Reads]) -> list[Finding]:
    """What hosts read otherwise than most of them."""
    found = []
    groups = _groups({host: one.settings for host, one in reads.items()})
    for _, hosts in groups[1:]:
        norm, mine = reads[groups[0][1][0]].files, reads[hosts[0]].files
        files = sorted(name for name in mine.keys() | norm.keys() if mine.get(name) != norm.get(name))
        what = ", ".join(files) or "the options (`--set`)"
        hint = "copy the schedule's folder to every host" if files else "give the same --set on all hosts"
        text = f"{_names(hosts)}: the schedule is another than on {_names(groups[0][1])}: {what}"
        found.append(Finding(hosts=tuple(hosts), text=text, hint=hint, code=ExitCode.RESUME_REFUSED))
    for role in ("train", "val"):
        found += _other_images({host: [i for i in one.images if i.role == role] for host, one in reads.items()}, role)
    return found


def _other_images(images: Mapping[str, Sequence[Images]], role: str) -> list[Finding]:
    """For hosts that have them. By fingerprint if all have one; else by the file."""
    seen = {host: image.seen for host, found in images.items() for image in found if image.seen is not None}
    all_fingerprints = all(looked.fingerprint for looked in seen.values())

    def state(looked: Glance) -> str:
        if all_fingerprints:
            return f"{count(looked.records, 'record')}, fingerprint {looked.fingerprint[:12]}"
        return f"{count(looked.records, 'record')}, {size(looked.size)}, ends {looked.ends[:12]}"

    where = next((images[host][-1].path for host in seen), "")
    hint = "copy the same LMDB to all hosts, with its side file"
    if not all_fingerprints:
        hint += "; where they hold the same records, `stagerun data index` on each host shows it"
    states = {host: state(looked) for host, looked in seen.items()}
    return odd_ones(states, f"{role} images ({where})", hint, ExitCode.DATA)


def odd_ones(values: Mapping[str, str], what: str, hint: str = "", code: int = 0) -> list[Finding]:
    """A finding for each value that is not that of most hosts; one that names all, where no value is that of most. `values` by host."""
    groups = _groups(values)
    if len(groups) < 2:
        return []
    (usual, most), (_, second) = groups[:2]
    if len(most) == len(second):
        text = f"{what}: " + "; ".join(f"{value} on {_names(hosts)}" for value, hosts in groups)
        return [Finding(hosts=tuple(values), text=text, hint=hint, code=code)]
    return [
        Finding(
            hosts=tuple(hosts),
            text=f"{_names(hosts)}: {what}: {value}; {usual} on {_names(most)}",
            hint=hint,
            code=code,
        )
        for value, hosts in groups[1:]
    ]


def _groups(values: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    """(value, hosts that have it), the most first; of as many that of the first host."""
    groups: dict[str, list[str]] = {}
    for host, value in values.items():
        groups.setdefault(value, []).append(host)
    return sorted(groups.items(), key=lambda group: -len(group[1]))


def _names(hosts: Sequence[str]) -> str:
    """`node1, node2`; of many only the first few."""
    if len(hosts) > _NAMED + 1:
        return f"{', '.join(hosts[:_NAMED])} and {len(hosts) - _NAMED} other hosts"
    return ", ".join(hosts)
