"""Modelled power cuts. What is counted: RESULTS.md."""

import hashlib
import random
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import disks
from disks import Folder, HookedDisk, Killed, ModelDisk, killed
from facade import SnapshotRef
from reliability.trial import Trial

from stagerun import store

OUT = Path("/runs/out")
RESULT = OUT / "results" / "r.json"
STATES = 25  # looked at after each power cut
LIVES = 4  # in one trial, one after the other
MOST_CALLS = 220  # of a sequence, before the power is cut


class Lost(Exception):
    pass


def content(iter: int) -> dict[str, bytes]:
    """The files of the snapshot of an iteration: some are empty, one has several chunks."""
    return {
        "model.safetensors": b"%d " % iter * 700,
        "optim.safetensors": b"m" * (iter % 7 * 300),
        "state.json": b"{%d}" % iter,
    }


class Sequence:
    """What runs do to an output folder, drawn by `rng`, and what they may count on: `newest`, the iteration of the newest
    snapshot whose commit has returned and that was not set aside since; `results`, of which the small file holds one, and must once
    the first is `written`; and `pinned`, the names of snapshots whose pinning has returned."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.iter = 0  # of the last commit that was begun
        self.newest = 0
        self.results: set[bytes] = set()
        self.written = False
        self.pinned: set[str] = set()

    def life(self, disk: HookedDisk) -> None:
        """One process life, until the disk raises Killed."""
        store.prepare(disk, OUT)
        lease, attempt = taken(disk)
        store.sweep(disk, OUT)
        while True:
            step = self.rng.choices(("commit", "result", "aside", "pin", "beat"), (6, 2, 1, 1, 1))[0]
            if step == "commit":
                self.commit(disk, lease, attempt)
            elif step == "beat":
                lease.beat()
            else:
                getattr(self, step)(disk)

    def begin_again(self, disk: store.Disk) -> None:
        """After a power cut: what is on the disk now is what may be counted on."""
        self.newest = max((ref.iter for ref in store.inventory(disk, OUT).snapshots), default=0)
        with suppress(FileNotFoundError):
            self.results, self.written = {disk.read(RESULT, 100)}, True

    def commit(self, disk: store.Disk, lease: store.Lease, attempt: int) -> None:
        self.iter += 1
        self.newest = commit(disk, self.iter, attempt, lease).iter
        keep, pinned = self.rng.randint(1, 3), store.pins(disk, OUT)
        for old in store.superfluous(store.inventory(disk, OUT).of("cyc1"), keep, pinned, 1 << 40):
            store.discard(disk, OUT, old.name)

    def pin(self, disk: store.Disk) -> None:
        """Or takes a pin off."""
        if self.pinned and self.rng.random() < 0.5:
            name = self.rng.choice(sorted(self.pinned))
            self.pinned.discard(name)
            store.unpin(disk, OUT, name)
        elif found := store.inventory(disk, OUT).snapshots:
            name = self.rng.choice(found).name
            if store.pin(disk, OUT, name):
                self.pinned.add(name)

    def result(self, disk: store.Disk) -> None:
        new = b"%d" % self.rng.randrange(10**6)
        self.results.add(new)
        store.write_atomic(disk, RESULT, new)
        self.results, self.written = {new}, True

    def aside(self, disk: store.Disk) -> None:
        """One that is not the newest turns out to be damaged."""
        found = store.inventory(disk, OUT).snapshots
        older = [ref for ref in found if ref.iter != self.newest and ref.name not in self.pinned]
        if older:
            store.set_aside(disk, OUT, self.rng.choice(older).name)


def taken(disk: store.Disk) -> tuple[store.Lease, int]:
    """The folder, as the next run takes it: with the lock, on a clock that runs when somebody waits."""
    now = [0.0]

    def pause(seconds: float) -> None:
        now[0] += seconds

    lease = store.Lease(disk, OUT, clock=lambda: now[0], pause=pause)
    lease.beats = disk
    lease.wait(True, lambda text: None)
    return lease, lease.take("", store.attempts_seen(disk, OUT))


def commit(disk: store.Disk, iter: int, attempt: int, lease: store.Lease) -> SnapshotRef:
    return disks.commit(disk, OUT, "cyc1", iter, attempt, content(iter), lease.require_held, serial=iter)


def found_after(rng: random.Random, disk: ModelDisk) -> ModelDisk:
    """A disk that may be found when the power is back."""
    how = rng.choice(("kept", "lost", "half", "zeros", "each its own"))
    return disk.after_power_cut(
        lambda folder: rng.randint(0, len(folder.pending)),
        lambda data: torn(data, rng.choice(("kept", "lost", "half", "zeros")) if how == "each its own" else how, rng),
    )


def torn(data: bytes, how: str, rng: random.Random) -> bytes:
    cut = rng.randint(0, len(data))
    return {"kept": data, "lost": b"", "half": data[:cut], "zeros": data[:cut] + bytes(len(data) - cut)}[how]


def check(disk: ModelDisk, sequence: Sequence) -> None:
    """Lost if the next run would not find what it may count on; then a commit is tried."""
    inventory = store.inventory(disk, OUT)
    for ref in inventory.snapshots:
        if store.read(disk, OUT, ref) != content(ref.iter):
            raise Lost(f"{ref.name} reads as something else")
    if inventory.damaged:
        raise Lost(f"{inventory.damaged} are damaged")
    iters = [ref.iter for ref in inventory.snapshots]
    if max(iters, default=0) < sequence.newest:
        raise Lost(f"the commit of {sequence.newest} had returned, there is {iters}")
    if gone := [name for name in sequence.pinned if name not in {ref.name for ref in inventory.snapshots}]:
        raise Lost(f"{gone} were pinned")
    if not sequence.pinned <= store.pins(disk, OUT):
        raise Lost(f"{sequence.pinned} were pinned, the pins are {set(store.pins(disk, OUT))}")
    try:
        if disk.read(RESULT, 100) not in sequence.results:
            raise Lost("a small file is neither the old nor the new one")
    except FileNotFoundError:
        if sequence.written:
            raise Lost("a small file that had been written is gone") from None
    store.prepare(disk, OUT)
    lease, attempt = taken(disk)
    store.sweep(disk, OUT)
    if any(name.startswith((".tmp-", ".trash-")) for name in disk.names(OUT / "snapshots")):
        raise Lost("what was begun is not cleared away")
    iters = [ref.iter for ref in store.inventory(disk, OUT).snapshots]  # sweep may give a pinned one its name back
    commit(disk, sequence.iter + 1, attempt, lease)
    after = store.inventory(disk, OUT)
    if [ref.iter for ref in after.snapshots] != [*iters, sequence.iter + 1] or after.damaged:
        raise Lost(f"after the next commit there is {after}")


def digest(folder: Folder) -> bytes:
    """Covers the names below it and what their files hold; but for what every process makes up anew (the ends of names, the content of
    a sign of life, of which the length counts), since that makes no other disk."""
    entries = []
    for name, node in folder.names.items():
        if isinstance(node, Folder):
            whole = digest(node)
        elif re.search(r"a\d+\.json", name):
            whole = b"%d of %d" % (len(node.data.rstrip(b"\0")), len(node.data))
        else:
            whole = bytes(node.data)
        same = re.sub("-[0-9a-f]{8}$", "", name).encode()
        entries.append(
            bytes([isinstance(node, Folder)]) + hashlib.sha256(same).digest() + hashlib.sha256(whole).digest()
        )
    return hashlib.sha256(b"".join(sorted(entries))).digest()


def trial(rng: random.Random, seen: set[bytes], honest: bool = True) -> Trial:
    """`seen`: the digests of the disks that were found before, in other trials. `honest` is False for a disk whose syncs do nothing,
    which shows that the checks find what is lost."""
    sequence, counts, states, cuts, before = Sequence(rng), Counter[str](), 0, 0, len(seen)
    disk = ModelDisk(honest=honest)
    try:
        while cuts < LIVES:
            cuts += 1
            at = rng.randint(1, MOST_CALLS)
            hooked = HookedDisk(disk, killed(at))
            with suppress(Killed):
                sequence.life(hooked)
            counts[f"cuts in {hooked.calls[-1]}"] += 1
            for _ in range(STATES):
                states += 1
                found = found_after(rng, disk)
                seen.add(digest(found.root))
                check(found, sequence)
            disk = found_after(rng, disk)
            sequence.begin_again(disk)
    except Exception as error:
        what = f"life {cuts}, the power cut at call {at}, state {states}: {type(error).__name__}: {error}"
        return Trial(len(seen) - before, counts | {"lost": 1}, wrong=what)
    return Trial(len(seen) - before, counts | {"disks looked at, some alike": states})


def trials(rng: random.Random, folder: Path) -> Iterator[Trial]:
    seen: set[bytes] = set()
    while True:
        yield trial(rng, seen)
