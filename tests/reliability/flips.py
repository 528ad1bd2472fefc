"""Flipped bits, cut files and zeroed pages in a snapshot. What is counted: RESULTS.md."""

import hashlib
import os
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import small
import tiny
from facade import Keeper, SnapshotRef, most_bytes
from reliability.trial import Trial

from stagerun import store
from stagerun.language import load

PAGE = 4096
PER_TRIAL = 100
MANIFEST = "MANIFEST.json"
# Of the faults, those that flip one bit of the manifest, and those that cut or zero it. By its size it would be one in a thousand.
BITS_OF_MANIFEST, REST_OF_MANIFEST = 0.15, 0.05


@dataclass(frozen=True)
class Fault:
    """`file` holds `data` instead."""

    kind: str
    file: Path
    at: int
    data: bytes

    def __str__(self) -> str:
        return f"{self.kind} of {self.file.name} at byte {self.at}"


def draw(rng: random.Random, files: dict[Path, bytes]) -> Fault:
    """One that changes something."""
    of_manifest = rng.random() < BITS_OF_MANIFEST + REST_OF_MANIFEST
    bit = of_manifest and rng.random() < BITS_OF_MANIFEST / (BITS_OF_MANIFEST + REST_OF_MANIFEST)
    paths = [path for path in files if (path.name == MANIFEST) == of_manifest]
    while True:
        path = rng.choices(paths, [len(files[path]) for path in paths])[0]
        kind = "flip" if bit else rng.choice(("cut", "zero") if of_manifest else ("flip", "cut", "zero"))
        data = bytearray(files[path])
        at = rng.randrange(len(data))
        if kind == "flip":
            data[at] ^= 1 << rng.randrange(8)
        elif kind == "cut":
            del data[at:]
        else:
            at -= at % PAGE
            data[at : at + PAGE] = bytes(len(data[at : at + PAGE]))
        if data != files[path]:
            return Fault(kind, path, at, bytes(data))


class Half:
    """A run of which stage `cyc1` is half trained, with snapshots at 2 and at 4."""

    def __init__(self, folder: Path) -> None:
        out = folder / "out"
        tiny.make_data(folder / "data")
        schedule = small.make_schedule(folder / "schedule", folder / "data")
        done = small.run(schedule, out, "--until", "cyc1")
        assert done.returncode == 0, done.stdout + done.stderr
        self.keeper = Keeper(load(str(schedule)), out)
        for ref in self.keeper.inventory().of("cyc1"):
            if ref.iter == 5:
                shutil.rmtree(out / "snapshots" / ref.name)
        self.before, self.newest = self.keeper.inventory().of("cyc1")
        assert (self.before.iter, self.newest.iter) == (2, 4)
        self.root = out / "snapshots"
        self.files = {path: path.read_bytes() for path in sorted((self.root / self.newest.name).iterdir())}
        self.good = {ref.name: digest(store.read(self.keeper.disk, out, ref)) for ref in (self.before, self.newest)}

    def used(self) -> tuple[SnapshotRef, str]:
        """The snapshot that a run goes on from, and the digest of what it reads."""
        most = most_bytes(self.keeper.schedule.model)
        while True:
            planned = self.keeper.plan().next
            assert planned is not None and planned.start is not None
            files = self.keeper.read(planned.start, most)
            if files is not None:
                return planned.start, digest(files)

    def wrong(self, fault: Fault) -> str:
        """Why the fault was not met as it should be; '' if it was. Afterwards all is as before."""
        fault.file.write_bytes(fault.data)
        try:
            ref, found = self.used()
        finally:
            aside = self.root / f".bad-{self.newest.name}"
            if aside.exists():
                os.rename(aside, self.root / self.newest.name)
            fault.file.write_bytes(self.files[fault.file])
        if ref.name == self.newest.name:
            return f"{fault}: not found"
        if ref.name != self.before.name or found != self.good[self.before.name]:
            return f"{fault}: {ref.name} was used, and not {self.before.name} as it was written"
        return ""


def digest(files: dict[str, bytes]) -> str:
    return hashlib.sha256(b"".join(name.encode() + files[name] for name in sorted(files))).hexdigest()


def trials(rng: random.Random, folder: Path) -> Iterator[Trial]:
    half = Half(folder)
    while True:
        counts: Counter[str] = Counter()
        wrong = ""
        for _ in range(PER_TRIAL):
            fault = draw(rng, half.files)
            problem = half.wrong(fault)
            wrong = wrong or problem
            where = " of the manifest" if fault.file.name == MANIFEST else ""
            counts[f"{fault.kind}{where}, found and the one before used"] += not problem
        ref, found = half.used()
        if (ref.name, found) != (half.newest.name, half.good[half.newest.name]):
            wrong = wrong or "the snapshot without a fault was not used"
        yield Trial(faults=PER_TRIAL, counts=dict(counts), wrong=wrong)
