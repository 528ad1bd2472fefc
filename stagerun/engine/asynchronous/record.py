"""The order of arrival in a stage, as snapshots keep it (`train.progress.ARRIVALS`): by it the stage can be trained again to the same bits.

A push is known by its claim: the how manyth of its leg that was granted. Per claim the record has the iteration and the replica; per
server the claims in the order in which they were applied, and how many updates each was behind: 10 bytes per push, and 8 per push and
server.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice

import torch
from torch import Tensor

from stagerun.engine.codec import decode, encode


@dataclass(frozen=True, slots=True)
class Arrived:
    """What one server has applied: `order`, the claims; `staleness`, of each the updates that it had not seen."""

    order: Sequence[int] = ()
    staleness: Sequence[int] = ()

    def seen(self) -> dict[int, int]:
        """By claim, the version of the server's weights that was pulled for it."""
        return {claim: at - behind for at, (claim, behind) in enumerate(zip(self.order, self.staleness, strict=True))}


@dataclass(frozen=True, slots=True)
class Leg:
    """The stretch of iterations `first` .. `last` - 1. `iterations` and `replicas` by claim; `servers` what each has applied."""

    first: int
    last: int
    iterations: Sequence[int]
    replicas: Sequence[int]
    servers: tuple[Arrived, ...]


@dataclass(slots=True)
class Record:
    """The legs of a stage so far, from its iteration 0 on."""

    legs: list[Leg] = field(default_factory=list)

    @property
    def last(self) -> int:
        """The iteration up to which the order is known."""
        return self.legs[-1].last if self.legs else 0

    def leg(self, first: int) -> Leg:
        return next(leg for leg in self.legs if leg.first == first)

    def encoded(self) -> bytes:
        legs = self.legs
        heads = [[g.first, g.last, len(g.iterations), 0, 0] for g in legs]  # what counted failed iterations
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
        return encode(found)


def _joined(parts: Sequence[Sequence[int]], dtype: torch.dtype) -> Tensor:
    return torch.tensor([number for part in parts for number in part], dtype=dtype)


def record_of(data: bytes) -> Record:
    """ValueError if it is none, or one that no run of this version can have written."""
    found = decode(data)
    for name, tensor in found.items():
        integers = not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool
        if not integers or not tensor.dim() or tensor.shape[1:] != ((5,) if name == "legs" else ()):
            raise ValueError(f"not a record of arrivals: `{name}` is {tensor.dtype} {tuple(tensor.shape)}")
    try:
        record = _legs(found)
    except KeyError as error:
        raise ValueError(f"not a record of arrivals: {error} is missing") from error
    at = 0
    for leg in record.legs:
        if leg.first != at or not _sound(leg):
            raise ValueError(f"not a record of arrivals: its leg at iteration {leg.first} is not one that a run has")
        at = leg.last
    return record


def _legs(found: Mapping[str, Tensor]) -> Record:
    iterations, replicas = iter(found["iterations"].tolist()), iter(found["replicas"].tolist())
    servers = [
        (
            iter(found[f"{s}/pushes"].tolist()),
            iter(found[f"{s}/order"].tolist()),
            iter(found[f"{s}/staleness"].tolist()),
        )
        for s in range(sum(name.endswith("/pushes") for name in found))
    ]
    legs = []
    for first, last, claims, *_ in found["legs"].tolist():
        arrived = []
        for pushes, order, staleness in servers:
            size = next(pushes, 0)
            arrived.append(Arrived(tuple(islice(order, size)), tuple(islice(staleness, size))))
        own = tuple(islice(iterations, claims)), tuple(islice(replicas, claims))
        legs.append(Leg(first, last, *own, tuple(arrived)))
    return Record(legs)


def _sound(leg: Leg) -> bool:
    claims = list(range(len(leg.iterations)))
    return (
        leg.first < leg.last
        and len(leg.replicas) == len(claims)
        and all(leg.first <= i < leg.last for i in leg.iterations)
        and bool(leg.servers)
        and all(
            sorted(one.order) == claims and len(one.staleness) == len(claims) and _in_time(one) for one in leg.servers
        )
    )


def _in_time(one: Arrived) -> bool:
    """Whether each claim has seen earlier ones alone: else a replay would wait for ever."""
    latest = list(accumulate(one.order, max, initial=-1))  # of the claims behind each version
    seen = one.seen().items()
    return all(0 <= behind <= at for at, behind in enumerate(one.staleness)) and all(latest[v] < c for c, v in seen)
