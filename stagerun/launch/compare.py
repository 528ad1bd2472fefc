"""In what hosts differ, by their facts, and which is the odd one. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from stagerun.base.errors import ExitCode
from stagerun.base.text import count, size
from stagerun.launch.facts import Facts
from stagerun.system.lmdb_file import Glance

V = TypeVar("V")

# Exit codes from the one that a person must see to first; of several findings the first of these is the command's.
GRAVEST = (
    ExitCode.RECIPE,
    ExitCode.DATA,
    ExitCode.PERMISSION,
    ExitCode.STORAGE,
    ExitCode.RESUME_REFUSED,
    ExitCode.IN_USE,
    ExitCode.DIVERGED,
    ExitCode.BUG,
    ExitCode.RANKS_DIFFER,
    ExitCode.PEER,
)
# Other versions of these give other bits, or none: collectives must be the same on both ends.
_MUST_BE_SAME = ("stagerun", "torch")
# Main memory that differs by less is the same: the kernel and the firmware keep some of it for themselves.
_SAME_MEMORY = 0.05


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
    """The exit code of all of them; 0 where none refuses."""
    codes = {finding.code for finding in findings if finding.code}
    return next((int(code) for code in GRAVEST if code in codes), min(codes, default=0))


def troubles(facts: Mapping[str, Facts]) -> list[Finding]:
    """What is wrong with a host by itself; hosts with the same trouble are one finding."""
    found: dict[tuple[str, str, int], list[str]] = {}
    for host, one in facts.items():
        for trouble in one.troubles:
            found.setdefault((trouble.text, trouble.hint, trouble.code), []).append(host)
    return [
        Finding(hosts=tuple(hosts), text=f"{_names(hosts, len(facts))}: {text}", hint=hint, code=code)
        for (text, hint, code), hosts in found.items()
    ]


def differences(facts: Mapping[str, Facts]) -> list[Finding]:
    """What must be the same on all hosts and isn't, and what only changes bits or speed (code 0). `facts` by the name that a host is to
    be called by, in the order of ranks."""
    return [*_refusals(facts), *_warnings(facts)]


def unlike(sent: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """Who has another stagerun than most, of facts as they were sent by host, of which some can't be read here: those of other code may
    have other fields."""
    hint = "install the same stagerun on all hosts"
    said = {host: stagerun_of(one) for host, one in sent.items()}
    return odd_ones(said, "stagerun", hint, ExitCode.RECIPE) or [
        Finding(
            hosts=tuple(sent), text="what the hosts report of themselves can't be read", hint=hint, code=ExitCode.RECIPE
        )
    ]


def stagerun_of(said: Mapping[str, Any]) -> str:
    """The version in facts as they were sent, perhaps by another stagerun."""
    versions = said.get("versions")
    version = versions.get("stagerun") if isinstance(versions, Mapping) else None
    return f"{version or 'unknown'} ({str(said.get('code'))[:12]})"


def _refusals(facts: Mapping[str, Facts]) -> list[Finding]:
    found: list[Finding] = []
    mistake = ExitCode.RECIPE
    for name in _MUST_BE_SAME:
        hint = f"install the same {name} on all hosts"
        found += _odd(facts, name, partial(_release_of, name), hint, mistake)
    if not found:
        hint = "copy the same stagerun to all hosts"
        found += _odd(facts, "stagerun's code", lambda f: f.code[:12], hint, mistake)
    found += _other_settings(facts)
    for role in ("train", "val"):
        found += _other_images(facts, role)
    return found


def _warnings(facts: Mapping[str, Facts]) -> list[Finding]:
    found: list[Finding] = []
    bits = "on unlike hosts another number of workers, or another order of hosts, may give other bits"
    if len({_release_of("torch", one) for one in facts.values()}) == 1:
        found += _odd(facts, "torch's build", partial(_version_of, "torch"), bits)
    for name in sorted({name for one in facts.values() for name in one.versions} - set(_MUST_BE_SAME)):
        found += _odd(facts, name, partial(_version_of, name), "")
    found += _odd(facts, "instruction set", lambda f: f.instruction_set, bits)
    found += _odd(facts, "processor", lambda f: f.processor, bits)
    common = set.intersection(*({*one.flags} for one in facts.values())) if facts else set()
    found += _odd(facts, "processor flags", lambda f: " ".join(n for n in f.flags if n not in common) or "none", bits)
    found += _odd(facts, "cores", lambda f: str(f.cores), "all wait for the slowest; `--threads` makes them alike")
    found += _odd(facts, "GPUs", lambda f: _gpus(f.gpus), "all wait for the slowest")
    found += _odd(facts, "GPU driver", lambda f: f.driver or "none", "")
    least = min(one.memory for one in facts.values()) if facts else 0
    if any(one.memory > least * (1 + _SAME_MEMORY) for one in facts.values()):
        found += _odd(facts, "memory", lambda f: f"{f.memory / 1e9:.0f} GB", "")
    return found


def _other_settings(facts: Mapping[str, Facts]) -> list[Finding]:
    """For hosts that could read their schedule at all."""
    read = {host: one for host, one in facts.items() if one.settings}
    odd = _groups(read, lambda f: f.settings)
    if len(odd) < 2:
        return []
    norm = read[odd[0][1][0]].files
    found = []
    for _, hosts in odd[1:]:
        mine = read[hosts[0]].files
        files = sorted(name for name in mine.keys() | norm.keys() if mine.get(name) != norm.get(name))
        what = ", ".join(files) or "the options (`--set`)"
        hint = "copy the schedule's folder to every host" if files else "give the same --set on all hosts"
        rest = _names(odd[0][1], len(facts))
        text = f"{_names(hosts, len(facts))}: the schedule is another than on {rest}: {what}"
        found.append(Finding(hosts=tuple(hosts), text=text, hint=hint, code=ExitCode.RESUME_REFUSED))
    return found


def _other_images(facts: Mapping[str, Facts], role: str) -> list[Finding]:
    """For hosts that have them. By fingerprint if all have one; else by the file."""
    images = {host: image for host, one in facts.items() for image in one.images if image.role == role}
    seen = {host: image.seen for host, image in images.items() if image.seen is not None}
    all_fingerprints = all(looked.fingerprint for looked in seen.values())

    def state(looked: Glance) -> str:
        if all_fingerprints:
            return f"{count(looked.records, 'record')}, fingerprint {looked.fingerprint[:12]}"
        return f"{count(looked.records, 'record')}, {size(looked.size)}, ends {looked.ends[:12]}"

    where = next((images[host].path for host in seen), "")
    hint = "copy the same LMDB to all hosts, with its side file"
    if not all_fingerprints:
        hint += "; where they hold the same records, `stagerun data index` on each host shows it"
    states = {host: state(looked) for host, looked in seen.items()}
    return odd_ones(states, f"{role} images ({where})", hint, ExitCode.DATA)


def _odd(
    facts: Mapping[str, Facts], what: str, value: Callable[[Facts], str], hint: str, code: int = 0
) -> list[Finding]:
    """A finding for each value that is not that of most hosts; one for all, where no value is that of most."""
    return odd_ones({host: value(one) for host, one in facts.items()}, what, hint, code)


def odd_ones(values: Mapping[str, str], what: str, hint: str = "", code: int = 0) -> list[Finding]:
    """As `differences`, of one thing whose value by host is `values`."""
    groups = _groups(values, lambda v: v)
    if len(groups) < 2:
        return []
    first, second = groups[0], groups[1]
    if len(first[1]) == len(second[1]):  # no majority: all are named, and none is blamed
        text = f"{what}: " + "; ".join(f"{value} on {_names(hosts, 0)}" for value, hosts in groups)
        return [Finding(hosts=tuple(values), text=text, hint=hint, code=code)]
    rest = f"{first[0]} on {_names(first[1], 0)}"
    return [
        Finding(hosts=tuple(hosts), text=f"{_names(hosts, 0)}: {what}: {value}; {rest}", hint=hint, code=code)
        for value, hosts in groups[1:]
    ]


def _groups(of: Mapping[str, V], value: Callable[[V], str]) -> list[tuple[str, list[str]]]:
    """(value, hosts that have it), the most first; of as many that of the first host."""
    groups: dict[str, list[str]] = {}
    for host, one in of.items():
        groups.setdefault(value(one), []).append(host)
    return sorted(groups.items(), key=lambda group: -len(group[1]))


_NAMED = 4


def _names(hosts: Sequence[str], of: int) -> str:
    """`node1, node2`; `all 3 hosts`, where `of` is as many; of many only the first few."""
    if of > 1 and len(hosts) == of:
        return f"all {of} hosts"
    if len(hosts) > _NAMED + 1:
        return f"{', '.join(hosts[:_NAMED])} and {len(hosts) - _NAMED} other hosts"
    return ", ".join(hosts)


def _version_of(package: str, one: Facts) -> str:
    return one.versions.get(package, "none")


def _release_of(package: str, one: Facts) -> str:
    """`2.13.0` of `2.13.0+cpu`."""
    return _version_of(package, one).partition("+")[0]


def _gpus(names: Sequence[str]) -> str:
    if not names:
        return "none"
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
