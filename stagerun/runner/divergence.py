"""Whether all ranks still hold the same state. They compute it from the same sums, each for itself: a bit that flips in the memory
of one, or an update that goes wrong there, stays there, and no loss tells of it."""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from stagerun.comm import Comm, gather_json
from stagerun.engine.codec import combined
from stagerun.errors import PeerError, RanksDiffer
from stagerun.system.host import host_name
from stagerun.text import count, listed

# Tensors and ranks that are named, of those that differ.
_NAMED = 3


def compare(comm: Comm, where: str, digests: Mapping[str, int], good: bool = True) -> tuple[bool, RanksDiffer | None]:
    """(whether every rank says `good`, the error if `digests`, by tensor, are not the same on all ranks). Both are the same on every rank.
    Collective: one sum of a few bytes, and more only where they differ. PeerError."""
    told = torch.zeros(comm.size + 1, dtype=torch.int64)
    told[comm.rank] = combined(digests) - (1 << 63)  # int64 has as many numbers
    told[-1] = not good
    comm.all_reduce(told, "compare what they hold")()
    if len(set(told[:-1].tolist())) == 1:
        return not told[-1], None
    try:
        everybody = gather_json(comm, [host_name(), dict(digests)])
    except PeerError as gone:  # that they differ is known: not a state to save because a peer is lost
        return not told[-1], RanksDiffer(
            f"{where}: workers hold different bits, and one ended before it could say which: {gone.message}",
            "this state is not saved; run the same command again: it goes on from the newest snapshot",
        )
    return not told[-1], different(where, [host for host, _ in everybody], [found for _, found in everybody])


def different(where: str, hosts: Sequence[str], digests: Sequence[Mapping[str, int]]) -> RanksDiffer:
    """The error that names tensors and ranks, for `digests` that are not all the same. Pure; `hosts` and `digests` by rank."""
    kinds = [combined(found) for found in digests]
    kind, many = Counter(kinds).most_common(1)[0]
    names = [name for name in digests[0] if len({found.get(name) for found in digests}) > 1]
    which = _listed([f"`{name}`" for name in names])
    called = [f"rank {rank}" + (f" on {host}" if len(set(hosts)) > 1 else "") for rank, host in enumerate(hosts)]
    odd = [name for name, its in zip(called, kinds, strict=True) if its != kind]
    if 2 * many > len(kinds):
        text = f"{_listed(odd)} {'has' if len(odd) == 1 else 'have'} other bits than the other {count(many, 'worker')} in {which}"
        again = f"if it names {'that rank' if len(odd) == 1 else 'those ranks'} again, test memory and processor there"
    else:
        text = f"{_listed(called)} have different bits in {which}"
        again = "if it comes again, test memory and processor of each"
    return RanksDiffer(
        f"{where}: {text}",
        f"this state is not saved; run the same command again: it goes on from the newest snapshot; {again}",
    )


def _listed(names: Sequence[str]) -> str:
    shown = [*names[:_NAMED], f"{len(names) - _NAMED} more"] if len(names) > _NAMED else list(names)
    return listed(shown)
