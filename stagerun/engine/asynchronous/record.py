"""The order of arrival in a stage, as snapshots keep it (`train.progress.ARRIVALS`): by it the stage can be trained again to the same bits.

A push is known by its claim: the how manyth of its leg that was granted. Per claim the record has the iteration and the replica; per
server the claims in the order in which they were applied, and how many updates each was behind: 10 bytes per push, and 8 per push and
server. A push whose replica died or stood still half way may be in the order of server 0 and not of others: what it had seen of those is kept
apart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from stagerun.engine.codec import decode, encode


@dataclass(frozen=True, slots=True)
class Arrived:
    """What one server has applied: `order`, the claims; `staleness`, of each the updates that it had not seen. `missed`: the claims that
    others have applied and it has not, each with the version of its weights that was pulled."""

    order: Sequence[int] = ()
    staleness: Sequence[int] = ()
    missed: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True, slots=True)
class Leg:
    """The stretch of iterations `first` .. `last` - 1. `iterations` and `replicas` by claim; `servers` what each has applied.
    `skips` and `skips_in_all`: those of TrainState at its end."""

    first: int
    last: int
    iterations: Sequence[int]
    replicas: Sequence[int]
    servers: tuple[Arrived, ...]
    skips: int = 0
    skips_in_all: int = 0


@dataclass(slots=True)
class Record:
    """The legs of a stage so far, from its iteration 0 on."""

    legs: list[Leg] = field(default_factory=list)  # appended to, and not changed
    _encoded: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)  # of the first `_kept` legs
    _kept: int = field(default=0, repr=False, compare=False)

    @property
    def last(self) -> int:
        """The iteration up to which the order is known."""
        return self.legs[-1].last if self.legs else 0

    def leg(self, first: int) -> Leg | None:
        """The leg that starts at an iteration; None: none does."""
        return next((leg for leg in self.legs if leg.first == first), None)

    def up_to(self, iter: int) -> "Record":
        return Record([leg for leg in self.legs if leg.last <= iter])

    def staleness(self) -> list[int]:
        """At server 0, in the order of application."""
        return [s for leg in self.legs for s in leg.servers[0].staleness]

    def encoded(self) -> bytes:
        if self._kept < len(self.legs):  # of a million pushes, all of them anew would take a second at each boundary
            new = _tensors(self.legs[self._kept :], self._kept)
            joined = {k: torch.cat([self._encoded[k], t]) if k in self._encoded else t for k, t in new.items()}
            self._encoded, self._kept = self._encoded | joined, len(self.legs)
        return encode(self._encoded or _tensors([], 0))


def _tensors(legs: Sequence[Leg], first: int) -> dict[str, Tensor]:
    """Encodes the legs from number `first` on."""
    lengths = [len(leg.iterations) for leg in legs]
    heads = [[g.first, g.last, n, g.skips, g.skips_in_all] for g, n in zip(legs, lengths, strict=True)]
    found = {
        "legs": torch.tensor(heads, dtype=torch.int64).reshape(-1, 5),
        "iterations": _joined([leg.iterations for leg in legs], torch.int64),
        "replicas": _joined([leg.replicas for leg in legs], torch.int16),
    }
    for s in range(len(legs[0].servers) if legs else 0):
        own = [leg.servers[s] for leg in legs]
        found[f"{s}/pushes"] = torch.tensor([len(one.order) for one in own], dtype=torch.int64)
        found[f"{s}/order"] = _joined([one.order for one in own], torch.int32)
        found[f"{s}/staleness"] = _joined([one.staleness for one in own], torch.int32)
        missed = [(k, *one) for k, arrived in enumerate(own, first) for one in arrived.missed]
        if missed:
            found[f"{s}/missed"] = torch.tensor(missed, dtype=torch.int64)  # leg, claim, version
    return found


def _joined(parts: Sequence[Sequence[int]], dtype: torch.dtype) -> Tensor:
    return torch.tensor([number for part in parts for number in part], dtype=dtype)


def record_of(data: bytes) -> Record:
    """ValueError if it is none, or one that no run can have written."""
    found = decode(data)
    try:
        record = _legs({name: _numbers(name, tensor) for name, tensor in found.items()})
    except (KeyError, IndexError) as error:
        raise ValueError(f"not a record of arrivals: {error}") from error
    at = 0
    for leg in record.legs:
        if leg.first != at or not _sound(leg):
            raise ValueError(f"not a record of arrivals: its leg at iteration {leg.first} is not one that a run has")
        at = leg.last
    return record


_ROWS = {"legs": 5, "missed": 3}  # numbers in a row; all else is one number per row


def _numbers(name: str, tensor: Tensor) -> list[Any]:
    width = _ROWS.get(name.rpartition("/")[2])
    integers = not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool
    if not integers or (tensor.shape[1:] != (() if width is None else (width,))) or not tensor.dim():
        raise ValueError(f"not a record of arrivals: `{name}` is {tensor.dtype} {tuple(tensor.shape)}")
    return tensor.tolist()


def _legs(found: Mapping[str, list[Any]]) -> Record:
    heads = found["legs"]
    ends = list(accumulate(n for _, _, n, _, _ in heads))
    iterations, replicas = found["iterations"], found["replicas"]
    servers = sum(name.endswith("/pushes") for name in found)
    pushes = [found[f"{s}/pushes"] for s in range(servers)]
    order = [found[f"{s}/order"] for s in range(servers)]
    staleness = [found[f"{s}/staleness"] for s in range(servers)]
    lost = [found.get(f"{s}/missed", []) for s in range(servers)]
    legs, at = [], [0] * servers
    for k, (first, last, n, skips, skips_in_all) in enumerate(heads):
        mine = []
        for s in range(servers):
            part = slice(at[s], at[s] + pushes[s][k])
            missed = tuple((claim, version) for leg, claim, version in lost[s] if leg == k)
            mine.append(Arrived(tuple(order[s][part]), tuple(staleness[s][part]), missed))
            at[s] = part.stop
        part = slice(ends[k] - n, ends[k])
        legs.append(Leg(first, last, tuple(iterations[part]), tuple(replicas[part]), tuple(mine), skips, skips_in_all))
    return Record(legs)


def _sound(leg: Leg) -> bool:
    claims = len(leg.iterations)
    return (
        leg.first < leg.last
        and len(leg.replicas) == claims
        and all(leg.first <= i < leg.last for i in leg.iterations)
        and bool(leg.servers)
        and all(
            len(one.order) == len(one.staleness)
            and len(set(one.order)) == len(one.order)
            and all(0 <= claim < claims for claim in one.order)
            and all(0 <= behind <= at for at, behind in enumerate(one.staleness))
            and all(0 <= claim < claims and 0 <= version <= len(one.order) for claim, version in one.missed)
            and not {claim for claim, _ in one.missed} & set(one.order)
            and _in_time(one)
            for one in leg.servers
        )
    )


def _in_time(one: Arrived) -> bool:
    """Whether each claim has seen earlier ones alone: else a replay would wait for ever."""
    latest = list(accumulate(one.order, max, initial=-1))  # of the claims behind each version
    seen = [(claim, at - behind) for at, (claim, behind) in enumerate(zip(one.order, one.staleness, strict=True))]
    return all(latest[version] < claim for claim, version in [*seen, *one.missed])
