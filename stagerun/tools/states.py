"""States of two runs that differ: `diff --first` trains short stretches again, for the exact iteration, its tensors, and whether a bit was
upset."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from stagerun import store
from stagerun.base.errors import StagerunError, StorageError
from stagerun.base.snapshots import TRAINING_SET
from stagerun.base.text import count, listed
from stagerun.comm import SoloComm
from stagerun.command.ending import say
from stagerun.data import datum
from stagerun.data.index import printable
from stagerun.data.loaders import opened, order_of
from stagerun.engine import codec
from stagerun.engine.device import differences
from stagerun.engine.state import counters, live
from stagerun.plan import Plan, State
from stagerun.schedule.improvement import NOTHING_YET
from stagerun.system.world import World
from stagerun.tools.first_difference import Cause, First, Run, causes
from stagerun.tools.output import DISK, plan_of, stored_schedule
from stagerun.tools.verify import VerifyOptions
from stagerun.tools.verify_run import Stretch, courses_of, events_of, trained_again
from stagerun.train.context import Context, StageRun
from stagerun.train.hooks import stored_state
from stagerun.train.restore import restored

SEARCH_S = 30.0  # for a bit that explains a digest


@dataclass(frozen=True, slots=True)
class Held:
    """The state at an iteration: its tensors, and the digest of its counters. `proofs`: of the training that led to it, if that was here."""

    tensors: codec.Tensors
    counted: codec.Digests
    environment: Mapping[str, str]
    proofs: Mapping[int, str] = field(default_factory=dict)

    @property
    def digested(self) -> Callable[[Tensor], int]:
        """Return how the run's device digests a tensor."""
        return codec.digest if self.environment.get("device") == "cpu" else codec.mixed

    @property
    def digest(self) -> str:
        digests = {name: self.digested(tensor) for name, tensor in self.tensors.items()}
        return f"{codec.combined({**digests, **self.counted}):016x}"


@dataclass(frozen=True, slots=True)
class Changed:
    """A tensor that differs, and how many of its values do; `bits`: the index of a value and its bits that differ, where these are few."""

    name: str
    values: int
    of: int
    bits: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @property
    def text(self) -> str:
        slot, _, name = self.name.rpartition("/")
        what = {"": "", "ema": "the average of "}.get(slot, "the momentum of ")
        layer = name.rpartition(".")[0] or name
        bits = "; ".join(f"value {at}, bit {', '.join(map(str, numbers))}" for at, numbers in self.bits)
        return f"{what}`{name}` (layer {layer}): {self.values} of {self.of} values{': ' * bool(bits)}{bits}"


_FEW, _MOST_BITS = 2, 8  # values whose bits are shown, and bits of them


def changes(before: codec.Tensors, now: codec.Tensors) -> list[Changed]:
    """Return the tensors that differ, in the order of their names; weights first."""
    changed = []
    for name in sorted(before.keys() | now.keys(), key=lambda name: ("/" in name, name)):
        if name not in before or name not in now or before[name].shape != now[name].shape:
            size = (before if name in before else now)[name].numel()
            changed.append(Changed(name, size, size))
            continue
        one, other = (_bytes(tensors[name]) for tensors in (before, now))
        differing = np.flatnonzero((one != other).any(axis=1))
        if len(differing):
            bits = tuple((int(i), _bits(one[i] ^ other[i])) for i in differing[: _FEW + 1])
            shown = len(bits) <= _FEW and sum(len(numbers) for _, numbers in bits) <= _MOST_BITS
            changed.append(Changed(name, len(differing), len(one), bits if shown else ()))
    return changed


def _bytes(tensor: Tensor) -> np.ndarray:
    """Return uint8[values, bytes of one]."""
    host = tensor.detach().cpu().contiguous()
    return host.reshape(-1).view(torch.uint8).reshape(host.numel(), host.element_size()).numpy()


def _bits(one: np.ndarray) -> tuple[int, ...]:
    """Return the numbers of the bits that are set, the lowest bit of the first (lowest) byte is 0."""
    return tuple(int(bit) for bit in np.flatnonzero(np.unpackbits(one, bitorder="little")))


def upset_bit(held: Held, wanted: str) -> tuple[Changed | None, int]:
    """Return the bit whose flip gives a state the digest `wanted`, and how many tensors were searched, the smallest first."""
    digests = {name: held.digested(tensor) for name, tensor in held.tensors.items()} | held.counted
    names, target, end = sorted(digests), int(wanted, 16), time.monotonic() + SEARCH_S
    on_cpu = held.digested is codec.digest
    lines = {name: f"{name} {digests[name]:016x}\n" for name in names}
    for number, name in enumerate(sorted(held.tensors, key=lambda name: held.tensors[name].nbytes)):
        tensor = held.tensors[name].detach().clone().cpu().contiguous()
        values = _bytes(tensor)
        flat = values.reshape(-1)  # a view, as `values` is
        # As in `codec.combined`, with the text before and after this tensor's digest made once.
        at = names.index(name)
        before = "".join(lines[other] for other in names[:at]) + f"{name} "
        after = "\n" + "".join(lines[other] for other in names[at + 1 :])
        for byte in range(len(flat)):
            if time.monotonic() > end:
                return None, number
            for bit in range(8):
                flat[byte] ^= 1 << bit
                digest = xxh3_64_intdigest(flat.data) if on_cpu else codec.mixed(tensor)
                flat[byte] ^= 1 << bit
                if xxh3_64_intdigest(f"{before}{digest:016x}{after}".encode()) == target:
                    value, inside = divmod(byte, values.shape[1])
                    return Changed(name, 1, len(values), ((value, (8 * inside + bit,)),)), number + 1
    return None, len(held.tensors)


def held_by(run: Run, stage: str, iter: int) -> Held | None:
    """Return the state in a run's snapshot; None without one that can be read."""
    ref = run.at(stage, iter)
    try:
        return Held(*stored_state(ref, store.read(DISK, run.out, ref)), ref.environment) if ref is not None else None
    except (store.Damaged, ValueError, KeyError):
        return None


def name_tensors(first: First, runs: tuple[Run, Run]) -> None:
    """Name the tensors that differ, where both runs have a snapshot there."""
    one, other = (held_by(run, first.stage, first.iter) for run in runs)
    if one is not None and other is not None:
        first.tensors, first.of = changes(one.tensors, other.tensors), len(one.tensors.keys() | other.tensors.keys())


class Search:
    """Stretches of two runs that are trained again, and what they say of the first difference."""

    def __init__(self, first: First, runs: tuple[Run, Run], trust_code: bool, quiet: bool) -> None:
        self.first, self.runs, self.trust_code, self.quiet = first, runs, trust_code, quiet
        schedules = [stored_schedule(run.out, trust_code) for run in runs]
        self.plans = [plan_of(schedule, run.out) for schedule, run in zip(schedules, runs, strict=True)]

    def search(self) -> None:
        """Complete the first difference."""
        first = self.first
        first.searched = True
        target = first.iter if first.proven is None else first.proven
        if target > (most := self.plans[0].schedule.stage(first.stage).solver.max_iter):
            raise StorageError(f"the log has iteration {target} of `{first.stage}`, which ends at {most}")
        if not first.start:
            self._compare_images()
        recorded = [self._recorded(run, target) for run in self.runs]
        one = self._again(0, target)
        other = one if self._only("library", "processor") else self._again(1, target)
        if one.digest == other.digest:
            self._judge(one, recorded, target)
            return
        pairs = zip("AB", recorded, (one, other), strict=True)
        if unlike := [name for name, digest, again in pairs if digest not in ("", again.digest)]:
            first.notes.append(f"training again here does not repeat {' and '.join(unlike)}")
        else:
            self._narrow(one, other, target)

    def _only(self, *kinds: str) -> bool:
        """Return whether the runs differ in these alone, if at all. What another version of stagerun trained is trained again by this one."""
        other_code = [cause for cause in self.first.causes if not cause.text.startswith("stagerun ")]
        return {cause.kind for cause in other_code} <= set(kinds)

    def _recorded(self, run: Run, iter: int) -> str:
        """Return the digest of a run's state, by its log or its snapshot; '' if unknown."""
        if proof := run.proofs(self.first.stage).get(iter):
            return proof
        held = held_by(run, self.first.stage, iter)
        return held.digest if held is not None else ""

    # The images

    def _compare_images(self) -> None:
        first, stage = self.first, self.first.stage
        after = first.same if first.same is not None else self.runs[0].begins.get(stage, 0)
        span, other = (run.positions(stage, after, first.iter) for run in self.runs)
        paths = {plan.schedule.lmdb(plan.schedule.stage(stage).data.train) for plan in self.plans}
        if span is None or span != other or len(paths) == 1:
            return
        try:
            changed = changed_image(self.plans, stage, *span)
        except StagerunError as error:
            first.notes.append(f"the images can't be compared: {error.message}")
            return
        # A set that differs elsewhere explains nothing here.
        first.causes = [cause for cause in first.causes if not cause.text.startswith(TRAINING_SET)]
        if changed is not None:
            position, text = changed
            batch = self.plans[0].schedule.stage(stage).solver.batch_size
            first.iter = min(first.iter, after + 1 + (position - span[0]) // batch)
            # Another order of images may follow from the schedule.
            first.causes = sorted([Cause("data", text), *first.causes], key=lambda cause: cause.kind != "schedule")

    # Training again

    def _again(self, n: int, until: int) -> Held:
        """Train the stage of a run again up to an iteration, from its newest snapshot at which both runs are equal, or from its start."""
        first, run, plan = self.first, self.runs[n], self.plans[n]
        if first.start:
            return self._start(n)
        bases = [ref for ref in run.of(first.stage) if first.same is not None and ref.iter <= first.same]
        base = max(bases, key=lambda ref: (ref.iter, ref.attempt), default=None)
        facts = run.environment(first.stage, until)
        begins = base.iter if base is not None else run.begins.get(first.stage, 0)
        texts = (facts.get(name, "1") for name in ("workers", "threads"))
        workers, threads = (int(text) if text.isdecimal() else 1 for text in texts)
        if not self.quiet:
            say(f"training `{first.stage}` of {'AB'[n]} again, {begins} to {until}")
        stretch = Stretch(first.stage, base, begins, until, (), workers, threads)
        options = VerifyOptions(str(run.out), trust_code=self.trust_code)
        with trained_again(options, plan, run.out, stretch) as out:
            courses = courses_of(events_of(out))[0]
            ref = next((ref for ref in store.inventory(DISK, out).of(first.stage) if ref.iter == until), None)
            if ref is None or first.stage not in courses:
                raise StorageError(f"`{first.stage}` trained again never came to iteration {until}")
            proofs = {iter: proof.state for iter, proof in courses[first.stage].proofs.items()}
            return Held(*stored_state(ref, store.read(DISK, out, ref)), ref.environment, proofs)

    def _start(self, n: int) -> Held:
        """Return the state that a stage starts with."""
        stage, run, plan = self.first.stage, self.runs[n], self.plans[n]
        planned = next(one for one in plan.stages if one.name == stage)
        ids = {ref.parent for ref in run.of(stage)}
        parent = next((ref for ref in plan.inventory.snapshots if ref.id in ids), None)
        cpu = torch.device("cpu")
        context = Context(plan.schedule, str(run.out), SoloComm(), World(), cpu, None, lambda: False)
        context.rules_checked = True
        fresh = replace(planned, state=State.FRESH, iter=planned.stage.begins, start=parent, end=None)
        files = store.read(DISK, run.out, parent) if parent is not None else None
        state = restored(StageRun(context, fresh, files=files))
        counted = counters(state.iter, state.plateau, NOTHING_YET, state.skips, state.skips_in_all, state.rollbacks)
        return Held(live(state), counted, run.environment(stage, state.iter))

    def _narrow(self, one: Held, other: Held, target: int) -> None:
        """Both runs, trained again here, differ as they did: find the first iteration, and its tensors."""
        first = self.first
        both = sorted(one.proofs.keys() & other.proofs.keys())
        at = next((iter for iter in both if one.proofs[iter] != other.proofs[iter]), target)
        first.start = first.start or at == self.runs[0].begins.get(first.stage, 0)
        if at != target:
            one, other = self._again(0, at), self._again(1, at)
        first.iter = at
        if first.start:
            first.positions, first.causes = None, causes(first, *self.runs)
        else:
            first.same, first.positions = at - 1, self.runs[0].positions(first.stage, at - 1, at)
        first.tensors, first.of = changes(one.tensors, other.tensors), len(one.tensors)
        first.notes.append("made again here, both differ as before")

    def _judge(self, here: Held, recorded: Sequence[str], target: int) -> None:
        """Both runs come to the same state here: say with which of them it agrees, and what differs in the other."""
        first, agrees = self.first, [digest == here.digest for digest in recorded]
        if agrees[0] == agrees[1]:
            facts, order = self.runs[0].environment(first.stage, target), self.plans[0].schedule.determinism
            why = differences(facts, dict(here.environment), order)
            first.notes.append("; ".join(["training again here agrees with neither run", *why]))
            return
        bad = int(agrees[0])
        text = f"training again here agrees with {'AB'[1 - bad]}"
        held, searched = held_by(self.runs[bad], first.stage, target), 0
        if held is not None:
            first.tensors, first.of = changes(here.tensors, held.tensors), len(here.tensors)
        elif recorded[bad] and self._only("library", "processor", "workers", "threads"):
            changed, searched = upset_bit(here, recorded[bad])
            first.tensors, first.of = [changed] if changed else None, len(here.tensors)
        if first.causes:
            first.notes.append(text)
        elif first.tensors is not None and all(one.bits for one in first.tensors):
            first.causes.append(Cause("bit", f"an upset bit in {'AB'[bad]}: {text}, and no recorded fact differs"))
        else:
            what = f"an upset in the iteration of {'AB'[bad]}, or a fact that no run records"
            first.causes.append(Cause("unknown", f"{what}: {text}"))
            if searched:
                first.notes.append(f"no single bit of {count(searched, 'tensor')} explains that state")


def changed_image(plans: Sequence[Plan], stage: str, begin: int, end: int) -> tuple[int, str] | None:
    """Return the first of these positions at which two runs trained on other images, and what differs; None if there is none. DataError,
    StorageError."""
    sides = []
    for plan in plans:
        of = plan.schedule.stage(stage)
        records = opened(plan.schedule, [of.data.train])[of.data.train.path]
        sides.append((records, order_of(records, plan.schedule, of).at(begin, end - begin + 1)))
    (one, order), (other, another) = sides
    for n, (i, j) in enumerate(zip(order.tolist(), another.tolist(), strict=True)):
        if one.index is not None and other.index is not None and one.index.digests[i] == other.index.digests[j]:
            continue
        (key, before), (other_key, now) = one.get(i), other.get(j)
        if before != now:
            a, b = (datum.parse(value) for value in (before, now))
            label = f"label {a.label} -> {b.label}" if a.label != b.label else ""
            pixels = "other pixels" if bytes(a.data) != bytes(b.data) else ""
            what = " and ".join(filter(None, (label, pixels))) or "another record"
            keys = listed([f"`{printable(name)}`" for name in dict.fromkeys((key, other_key))])
            return begin + n, f"the image at position {begin + n}, key {keys}: {what}"
    return None
