"""How the workers of a job agree: rank 0 decides, or all try, and an error reaches every rank. And checks that they have the same code,
schedule and images, see the same output folder, and still hold the same state."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NoReturn, TypeVar, cast

import torch

import stagerun
from stagerun import store
from stagerun.base.errors import ExitCode, PeerError, RanksDiffer, StagerunError
from stagerun.base.recipe import Schedule
from stagerun.base.text import count, listed
from stagerun.comm import Comm, gather_json
from stagerun.engine.codec import combined
from stagerun.system.host import host_name
from stagerun.system.machine import code_digest, version
from stagerun.system.typed import read_as
from stagerun.system.world import World
from stagerun.train.compare import Finding, Reads, odd_ones, other_schedules, what_is_read, worst

_T = TypeVar("_T")


class ToldByAnother(StagerunError):
    """Raised on a rank whose peer reports the error: same exit code, nothing to print."""

    def __init__(self, code: int) -> None:
        super().__init__("")
        self.exit_code = ExitCode(code)


class SeveralFailed(StagerunError):
    """The errors of several ranks, each on lines of its own, with its host."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = ExitCode(code)


def rank0(comm: Comm, decide: Callable[[], _T]) -> _T:
    """Return what `decide()` returns on rank 0, on every rank: a value that JSON holds as it is. Collective.

    A StagerunError of rank 0's is raised there, and ToldByAnother elsewhere, so that no rank waits for one that is gone.
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
    """Call `do()` on every rank, and return what it returns here. Collective. If ranks raise a StagerunError, rank 0 raises all of them as one."""
    mine: StagerunError | None = None
    try:
        done = do()
    except StagerunError as error:
        mine = error
    host = host_name()
    status = {"code": int(mine.exit_code), "text": mine.render(), "host": host} if mine else {"code": 0}
    failed = [(rank, s) for rank, s in enumerate(gather_json(comm, status)) if s["code"]]
    if not failed:
        return done
    code = failed[0][1]["code"]
    if comm.rank != 0:
        raise ToldByAnother(code)
    if mine is not None and all(s["text"] == failed[0][1]["text"] for _, s in failed):
        raise mine
    raise SeveralFailed(code, "\n".join(f"rank {rank} on {s['host']}: {s['text']}" for rank, s in failed))


def anyone(comm: Comm, yes: bool) -> bool:
    """Return whether any rank says yes. Collective."""
    asked = torch.tensor([float(yes)])
    comm.all_reduce(asked)()
    return bool(asked > 0)


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
    mine = {"stagerun": stagerun.__version__, "torch": version("torch").partition("+")[0], "code": code_digest()[:12]}
    if comm.size == 1 or not _differs(comm, mine, mine):
        return
    heard = gather_json(comm, [host_name(), mine])
    names = _names([host for host, _ in heard], [str(one) for _, one in heard])

    def odd(what: str, called: str, hint: str) -> list[Finding]:
        values = {name: one[what] for name, (_, one) in zip(names, heard, strict=True)}
        return odd_ones(values, called, hint, ExitCode.RECIPE)

    found = [f for what in ("stagerun", "torch") for f in odd(what, what, f"install the same {what} on all hosts")]
    refuse(comm, found or odd("code", "stagerun's code", "copy the same stagerun to all hosts"))


def require_same_schedule(comm: Comm, world: World, schedule: Schedule) -> None:
    """Raise if ranks differ in their schedules or images, as `require_same_code` does. More is compared than what training depends on:
    ranks that evaluate at other iterations would wait for each other forever. One worker of each host looks at the images; what is missing
    is reported when they are opened. Collective."""
    if comm.size == 1:
        return
    looks = world.local_rank == 0
    mine = what_is_read(schedule, [], images=looks)
    settings = {"settings": mine.settings}
    seen = settings | {"images": [image.seen and asdict(image.seen) for image in mine.images]}
    if not _differs(comm, seen, seen if looks else settings):
        return
    heard = gather_json(comm, [host_name(), asdict(mine)])
    hosts, reads = [host for host, _ in heard], [read_as(Reads, one) for _, one in heard]
    of_host = {host: one.images for host, one in zip(hosts, reads, strict=True) if one.images}
    reads = [replace(one, images=one.images or of_host.get(host, ())) for host, one in zip(hosts, reads, strict=True)]
    names = _names(hosts, [repr((one.settings, one.images)) for one in reads])
    if found := other_schedules(dict(zip(names, reads, strict=True))):
        refuse(comm, found)


def _differs(comm: Comm, whole: Mapping[str, object], part: Mapping[str, object]) -> bool:
    """Return whether any rank's `part` (what this rank knows) differs from rank 0's `whole`. Two small collectives."""
    first = json.loads(comm.broadcast_bytes(json.dumps(whole).encode() if comm.rank == 0 else None))
    return anyone(comm, any(first.get(name) != value for name, value in part.items()))


def refuse(comm: Comm, findings: Sequence[Finding]) -> NoReturn:
    """Raise on all ranks; rank 0 says why."""
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
_GO_ON = "this state is not saved; run the same command again: it goes on from the newest snapshot"


def compare(comm: Comm, where: str, digests: Mapping[str, int], good: bool = True) -> tuple[bool, RanksDiffer | None]:
    """Return whether every rank says `good`, and the error if `digests` (by tensor) differ between ranks; both the same on every rank.
    Collective: one sum of a few bytes, and more only where they differ. PeerError.

    The ranks compute their state from the same sums, each for itself: a bit that flips in the memory of one, or an update that goes wrong
    there, stays there, and no loss shows it.
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
    except PeerError as gone:  # that they differ is known: not a state to save because a peer is lost
        text = f"{where}: workers hold different bits, and one ended before it could say which: {gone.message}"
        return all_good, RanksDiffer(text, _GO_ON)
    return all_good, different(where, [host for host, _ in everybody], [found for _, found in everybody])


def different(where: str, hosts: Sequence[str], digests: Sequence[Mapping[str, int]]) -> RanksDiffer:
    """Return the error that names tensors and ranks, for `digests`, by rank, that are not all the same. Pure."""
    kinds = [combined(found) for found in digests]
    kind, many = Counter(kinds).most_common(1)[0]
    names = [name for name in digests[0] if len({found.get(name) for found in digests}) > 1]
    which = listed([f"`{name}`" for name in names], _NAMED)
    called = [f"rank {rank}" + (f" on {host}" if len(set(hosts)) > 1 else "") for rank, host in enumerate(hosts)]
    odd = [name for name, its in zip(called, kinds, strict=True) if its != kind]
    text, again = (
        f"{listed(called, _NAMED)} have different bits in {which}",
        "comes again, test memory and processor of each",
    )
    if 2 * many > len(kinds):
        has, those = ("has", "that rank") if len(odd) == 1 else ("have", "those ranks")
        text = f"{listed(odd, _NAMED)} {has} other bits than the other {count(many, 'worker')} in {which}"
        again = f"names {those} again, test memory and processor there"
    return RanksDiffer(f"{where}: {text}", f"{_GO_ON}; if it {again}")


@torch.no_grad()
def hand_out(comm: Comm, tensors: Iterable[torch.Tensor]) -> None:
    """Copy rank 0's values into the tensors of every rank. Collective."""
    for tensor in tensors:
        whole = tensor.contiguous()  # a broadcast needs dense memory in the same order on both sides
        comm.broadcast(whole)
        tensor.copy_(whole)
