"""Comparison of hosts: what each host reads of a schedule, as a value that JSON can send, and which hosts differ."""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from stagerun.base.errors import DataError, ExitCode, StagerunError
from stagerun.base.recipe import CODE, LABELS, Cache, Data, Schedule, Source, Stage
from stagerun.base.text import count, size
from stagerun.data.weights import mean_digests
from stagerun.language import canonical
from stagerun.system.image_folder import is_class_folder, seen, small
from stagerun.system.image_sets import Glance, glance

T = TypeVar("T")
_NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A difference between hosts, worded as an error. `hosts`: those it is about, in the order of the facts; () for the reporting host.
    `code`: exit code of a refusal, 0 of a warning."""

    text: str
    hint: str = ""
    code: int = 0
    hosts: tuple[str, ...] = ()

    def render(self) -> str:
        return self.text + (f"\n  hint: {self.hint}" if self.hint else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """An LMDB of the schedule. `seen` is None if it is missing or unusable (then a Finding says why)."""

    role: str  # "train" or "val"
    path: str
    seen: Glance | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """A host's reading of a schedule: `settings` is a digest of everything in it but its paths, `files` digests of its files by name."""

    settings: str
    files: Mapping[str, str]
    images: tuple[Images, ...] = ()


def what_is_read(schedule: Schedule, troubles: list[Finding], images: bool = True) -> Reads:
    """Read the settings and, with `images`, the state of each LMDB; problems with one are added to `troubles`."""
    folder = schedule.python.folder or "."
    digests = {
        os.path.relpath(path, folder): hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
        for path, text in schedule.files
    }
    files = {name: digest[:16] for name, digest in {**digests, **mean_digests(schedule)}.items()}
    trained = {source.path for source in schedule.training_sets}
    looked = tuple(
        Images(
            role="train" if source.path in trained else "val",
            path=source.path,
            seen=tried(troubles, partial(_glance, source)),
        )
        for source in (schedule.sources if images else ())
    )
    return Reads(settings=settings_digest(schedule), files=files, images=looked)


def _glance(source: Source) -> Glance:
    """Look at a set; images in class folders, imported or not, by their names and sizes. DataError."""
    if is_class_folder(source.path):
        listed = small(source.path)
        state = seen(listed)
        looked = Glance(records=len(listed.names), size=state.bytes, fingerprint=state.files, ends="")
    else:
        looked = glance(source.path)
    if looked.records != source.images:
        raise DataError(
            f"{source.path}: holds {looked.records} records, but the schedule says images: {source.images}",
            f"write `images: {looked.records}` next to its `source` in schedule.prototxt, or name the right folder",
        )
    return looked


def settings_digest(schedule: Schedule) -> str:
    """Return a digest of the schedule without its paths on this host, and without settings that only this host's time and room depend
    on. Hosts must agree whether to use scratch: they copy together."""

    def of_all(data: Data) -> Data:
        return replace(
            data,
            train=replace(data.train, path="", labels_path=None),
            val=tuple(replace(source, path="", labels_path=None) for source in data.val),
            scratch=None if data.scratch is None else "",
            scratch_reserve=0.0,
            loader_threads=None,
            cache=Cache.AUTO,
        )

    code = {
        f"{key}: {text}"
        for stage in schedule.stages
        for key, text in stage.identity.items()
        if key.startswith(CODE) or key == LABELS
    }
    code |= {f"labels: {val.labels_digest}" for stage in schedule.stages for val in stage.data.val if val.labels_digest}
    code |= {f"mean_file {name}: {digest}" for name, digest in mean_digests(schedule).items()}
    alike = schedule.with_data(of_all)
    text = "\n".join([canonical(replace(alike, stages=tuple(map(_without_paths, alike.stages)))), *sorted(code)])
    return hashlib.sha256(text.encode()).hexdigest()


def _without_paths(stage: Stage) -> Stage:
    """Remove the paths of weights and mean images on this host."""
    solver = stage.solver
    transform, tested = (replace(one, mean_path="") for one in (solver.transform, solver.test_transform))
    solver = replace(solver, transform=transform, test_transform=tested)
    if solver.weights is not None:
        solver = replace(solver, weights=replace(solver.weights, path=""))
    return replace(stage, solver=solver)


def tried(troubles: list[Finding], do: Callable[[], T]) -> T | None:
    """Return `do()`; None after a StagerunError, which is added to `troubles`."""
    try:
        return do()
    except StagerunError as error:
        text = error.render() if not error.hint else error.message
        troubles.append(Finding(code=int(error.exit_code), text=text, hint=error.hint))
        return None


# -- compared. Pure


def worst(findings: Iterable[Finding]) -> int:
    """Return the exit code of all findings, 0 if none refuses. Of several the least, the nearest to a mistake of the user."""
    return min((int(finding.code) for finding in findings if finding.code), default=0)


def other_schedules(reads: Mapping[str, Reads]) -> list[Finding]:
    """Return findings on hosts that read something else than most of them."""
    findings = []
    (_, most), *others = _groups({host: its.settings for host, its in reads.items()})
    for _, hosts in others:
        norm, here = reads[most[0]].files, reads[hosts[0]].files
        files = sorted(name for name in here.keys() | norm.keys() if here.get(name) != norm.get(name))
        differing = ", ".join(files) or "the options (`--set`)"
        hint = "copy the schedule's folder to every host" if files else "give the same --set on all hosts"
        text = f"{names(hosts)}: the schedule is another than on {names(most)}: {differing}"
        findings.append(Finding(hosts=tuple(hosts), text=text, hint=hint, code=ExitCode.RESUME_REFUSED))
    for role in ("train", "val"):
        images = {host: [i for i in its.images if i.role == role] for host, its in reads.items()}
        findings += _other_images(images, role)
    return findings


def _other_images(images: Mapping[str, Sequence[Images]], role: str) -> list[Finding]:
    """Compare hosts that have the images: by fingerprint if all have one, else by the file."""
    seen = {host: (image.path, image.seen) for host, sets in images.items() for image in sets if image.seen}
    all_fingerprints = all(looked.fingerprint for _, looked in seen.values())
    hint = "copy the same LMDB to all hosts, with its side file"
    if not all_fingerprints:
        hint += "; where they hold the same records, `stagerun data verify --index` on each host shows it"
    states = {}
    for host, (_, looked) in seen.items():
        file = f"{size(looked.size)}, ends {looked.ends[:12]}"
        state = f"fingerprint {looked.fingerprint[:12]}" if all_fingerprints else file
        states[host] = f"{count(looked.records, 'record')}, {state}"
    where = next((path for path, _ in seen.values()), "")
    return outliers(states, f"{role} images ({where})", hint, ExitCode.DATA)


def outliers(values: Mapping[str, str], what: str, hint: str = "", code: int = 0) -> list[Finding]:
    """Return a finding for each value that differs from the value of most hosts; without a majority a single finding names all. `values` by
    host."""
    groups = _groups(values)
    if len(groups) < 2:
        return []
    (usual, most), *others = groups
    if len(most) == len(others[0][1]):
        text = f"{what}: " + "; ".join(f"{value} on {names(hosts)}" for value, hosts in groups)
        return [Finding(hosts=tuple(values), text=text, hint=hint, code=code)]
    norm = f"{usual} on {names(most)}"
    texts = {tuple(hosts): f"{names(hosts)}: {what}: {value}; {norm}" for value, hosts in others}
    return [Finding(hosts=hosts, text=text, hint=hint, code=code) for hosts, text in texts.items()]


def _groups(values: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    """Return (value, its hosts), the largest group first; of equal ones the group of the first host."""
    groups: dict[str, list[str]] = {}
    for host, value in values.items():
        groups.setdefault(value, []).append(host)
    return sorted(groups.items(), key=lambda group: -len(group[1]))


def names(hosts: Sequence[str]) -> str:
    """Return `node1, node2`; of many hosts only the first few."""
    if len(hosts) > _NAMED + 1:
        return f"{', '.join(hosts[:_NAMED])} and {len(hosts) - _NAMED} other hosts"
    return ", ".join(hosts)
