"""Agreement of the workers of a job: rank 0 decides, or all try, and an error reaches every rank. Checks that they have the same code,
schedule and images, see the same output folder, and hold the same state."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NoReturn, TypeVar, cast

import torch

import stagerun
from stagerun import store
from stagerun.base.errors import ExitCode, PeerError, RanksDiffer, StagerunError, UsageError
from stagerun.base.events import Note
from stagerun.base.recipe import Schedule
from stagerun.base.text import count, listed
from stagerun.comm import Comm, gather_json
from stagerun.engine.codec import combined
from stagerun.launch.watched import Monitored
from stagerun.system import host
from stagerun.system.host import code_digest, host_name, version
from stagerun.system.typed import read_as
from stagerun.system.world import World
from stagerun.train.compare import Finding, Reads, other_schedules, outliers, what_is_read, worst

_T = TypeVar("_T")


class ToldByAnother(StagerunError):
    """Raised on a rank whose peer reports the error: same exit code, nothing to print."""

    def __init__(self, code: int) -> None:
        super().__init__("")
        self.exit_code = ExitCode(code)


class SeveralFailed(StagerunError):
    """The errors of several ranks, each on separate lines, with its host."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = ExitCode(code)


def rank0(comm: Comm, decide: Callable[[], _T]) -> _T:
    """Return what `decide()` returns on rank 0, on every rank: a value that JSON preserves. Collective.

    A StagerunError of rank 0 is raised there, and ToldByAnother elsewhere, so that no rank waits for one that has ended.
    """
    if comm.rank == 0:
        try:
            answer = decide()
        except StagerunError as error:
            comm.broadcast_bytes(json.dumps({"code": int(error.exit_code)}).encode())
            raise
        comm.broadcast_bytes(json.dumps({"code": 0, "answer": answer}).encode())
        return answer
    decided = json.loads(comm.broadcast_bytes(None))
    if decided["code"]:
        raise ToldByAnother(decided["code"])
    return cast(_T, decided["answer"])


def everyone(comm: Comm, do: Callable[[], _T]) -> _T:
    """Call `do()` on every rank, and return its result here. Collective. If ranks raise a StagerunError, rank 0 raises all of them as
    one."""
    here: StagerunError | None = None
    try:
        result = do()
    except StagerunError as error:
        here = error
    status = [int(here.exit_code), host_name(), here.render()] if here is not None else []
    failed = {rank: status for rank, status in enumerate(gather_json(comm, status)) if status}
    if not failed:
        return result
    code, _, first = next(iter(failed.values()))
    if comm.rank != 0:
        raise ToldByAnother(code)
    if here is not None and all(text == first for _, _, text in failed.values()):
        raise here
    raise SeveralFailed(code, "\n".join(f"rank {rank} on {host}: {text}" for rank, (_, host, text) in failed.items()))


def anyone(comm: Comm, yes: bool) -> bool:
    """Return whether any rank says yes. Collective."""
    votes = torch.tensor([float(yes)])
    comm.all_reduce(votes)()
    return bool(votes > 0)


def hosts_of(comm: Comm) -> list[str]:
    """Return the host of each rank. Collective."""
    return gather_json(comm, host_name())


def only_here(comm: Comm, hosts: Sequence[str], out: str) -> str:
    """Return a warning if the output folder is on a file system of rank 0's host alone, else ''. Collective."""
    if len(set(hosts)) == 1:
        return ""
    kind = rank0(comm, lambda: store.local_kind(Path(out)))
    return store.lost_with(Path(out), kind, hosts[0]) if kind else ""


def require_same_code(comm: Comm) -> None:
    """Raise a StagerunError on rank 0 if hosts differ in stagerun or torch, naming the outliers. Collective.

    It comes before any other collective: ranks of different code would wait for different things.
    """
    code = {"stagerun": stagerun.__version__, "torch": version("torch").partition("+")[0], "code": code_digest()[:12]}
    if comm.size == 1 or not _differs(comm, code, code):
        return
    ranks = gather_json(comm, [host_name(), code])
    names = _names([host for host, _ in ranks], [str(code) for _, code in ranks])

    def differing(part: str, name: str, hint: str) -> list[Finding]:
        values = {rank: code[part] for rank, (_, code) in zip(names, ranks, strict=True)}
        return outliers(values, name, hint, ExitCode.RECIPE)

    findings = [
        finding
        for part in ("stagerun", "torch")
        for finding in differing(part, part, f"install the same {part} on all hosts")
    ]
    refuse(comm, findings or differing("code", "stagerun's code", "copy the same stagerun to all hosts"))


def require_same_schedule(comm: Comm, world: World, schedule: Schedule) -> None:
    """Raise if ranks differ in their schedules or images, as `require_same_code` does. All settings are compared: ranks that evaluate
    at different iterations would wait for each other forever. One worker of each host looks at the images; missing ones are reported
    when they are opened. Collective."""
    if comm.size == 1:
        return
    looks = world.local_rank == 0
    local = what_is_read(schedule, [], images=looks)
    settings = {"settings": local.settings}
    seen = settings | {"images": [image.seen and asdict(image.seen) for image in local.images]}
    if not _differs(comm, seen, seen if looks else settings):
        return
    ranks = [(host, read_as(Reads, reads)) for host, reads in gather_json(comm, [host_name(), asdict(local)])]
    of_host = {host: reads.images for host, reads in ranks if reads.images}
    all_reads = [replace(reads, images=reads.images or of_host.get(host, ())) for host, reads in ranks]
    names = _names([host for host, _ in ranks], [repr((reads.settings, reads.images)) for reads in all_reads])
    if findings := other_schedules(dict(zip(names, all_reads, strict=True))):
        refuse(comm, findings)


def _differs(comm: Comm, whole: Mapping[str, object], part: Mapping[str, object]) -> bool:
    """Return whether any rank's `part` differs from rank 0's `whole`. Two small collectives."""
    first = json.loads(comm.broadcast_bytes(json.dumps(whole).encode() if comm.rank == 0 else None))
    return anyone(comm, any(first.get(name) != value for name, value in part.items()))


def refuse(comm: Comm, findings: Sequence[Finding]) -> NoReturn:
    """Raise on all ranks; rank 0 reports the findings."""
    code = worst(findings)
    if comm.rank != 0:
        raise ToldByAnother(code)
    raise SeveralFailed(code, "\n".join(finding.render() for finding in findings))


def _names(hosts: Sequence[str], states: Sequence[str]) -> list[str]:
    """Name each rank: by its host if all ranks of that host are alike, else with its number, too."""
    kinds = Counter(host for host, _ in set(zip(hosts, states, strict=True)))
    return [host if kinds[host] == 1 else f"rank {rank} on {host}" for rank, host in enumerate(hosts)]


# Tensors and ranks that are named, of those that differ.
_NAMED = 3
_RESUME = "this state is not saved; run the same command again to resume from the newest snapshot"


def compare(comm: Comm, where: str, digests: Mapping[str, int], good: bool = True) -> tuple[bool, RanksDiffer | None]:
    """Return whether every rank passes `good`, and the error if `digests` (by tensor) differ between ranks; both the same on every
    rank. Collective: one sum of a few bytes, and more only if they differ. PeerError.

    The ranks compute their states from the same sums: a bit that flips in the memory of one stays there, and no loss shows it.
    """
    table = torch.zeros(comm.size + 1, dtype=torch.int64)
    table[comm.rank] = combined(digests) - (1 << 63)  # int64 has as many numbers
    table[-1] = not good
    comm.all_reduce(table, "compare what they hold")()
    all_good = not table[-1]
    if len(set(table[:-1].tolist())) == 1:
        return all_good, None
    try:
        everybody = gather_json(comm, [host_name(), dict(digests)])
    except PeerError as lost:  # the states differ: don't save this one because a peer is lost
        text = f"{where}: workers hold different bits, and one ended before it could say which: {lost.message}"
        return all_good, RanksDiffer(text, _RESUME)
    return all_good, different(where, [host for host, _ in everybody], [its for _, its in everybody])


def different(where: str, hosts: Sequence[str], digests: Sequence[Mapping[str, int]]) -> RanksDiffer:
    """Return the error that names tensors and ranks, for `digests`, by rank, that are not all the same."""
    kinds = [combined(its) for its in digests]
    majority, many = Counter(kinds).most_common(1)[0]
    names = [name for name in digests[0] if len({its.get(name) for its in digests}) > 1]
    which = listed([f"`{name}`" for name in names], _NAMED)
    ranks = [f"rank {rank}" + (f" on {host}" if len(set(hosts)) > 1 else "") for rank, host in enumerate(hosts)]
    text = f"{listed(ranks, _NAMED)} have different bits in {which}"
    if 2 * many > len(kinds):
        deviating = [rank for rank, kind in zip(ranks, kinds, strict=True) if kind != majority]
        has = "has" if len(deviating) == 1 else "have"
        text = f"{listed(deviating, _NAMED)} {has} other bits than the other {count(many, 'worker')} in {which}"
    return RanksDiffer(f"{where}: {text}", f"{_RESUME}; if it names them again, test memory and processor there")


@torch.no_grad()
def hand_out(comm: Comm, tensors: Iterable[torch.Tensor]) -> None:
    """Copy rank 0's values into the tensors of every rank. Collective."""
    for tensor in tensors:
        whole = tensor.contiguous()  # a broadcast needs dense memory in the same order on both sides
        comm.broadcast(whole)
        tensor.copy_(whole)


def bind_cores(world: World, comm: Comm, watch: Monitored | None = None) -> Note:
    """Bind this worker and its monitor for `--bind numa`; return the note of rank 0. Collective. A launcher that gave each worker of a
    host separate CPUs (Open MPI, `srun --cpu-bind`) has bound them already. UsageError if a worker would get no core."""
    allowed = frozenset(os.sched_getaffinity(0))
    others = gather_json(comm, [host_name(), sorted(allowed)])
    if any(host == host_name() and set(cpus) != allowed for host, cpus in others):
        return Note(text="--bind numa: the launcher has already bound each worker")

    def bind() -> str:
        node, cpus = host.shares(host.nodes(allowed), world.local_size)[world.local_rank]
        try:
            host.bind(cpus)
            if watch is not None:
                host.bind(cpus, watch.pid)
        except OSError as error:
            raise UsageError(f"--bind numa: {error.strerror}", "take --bind none") from error
        return f"{count(len(cpus), 'CPU')} of NUMA node {node}"

    cores = [f"rank {rank} to {node}" for rank, node in enumerate(gather_json(comm, everyone(comm, bind)))]
    return Note(text="bound to cores: " + listed(cores, 4))
