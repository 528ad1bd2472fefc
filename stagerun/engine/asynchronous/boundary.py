"""The end of a leg: all ranks take what the servers have, and hear in which order each has applied what it has. Collective."""

from collections.abc import Mapping, Sequence

import torch

from stagerun.comm import Comm
from stagerun.engine.asynchronous.record import Arrived
from stagerun.engine.asynchronous.servers import Server
from stagerun.engine.asynchronous.shards import Shards
from stagerun.engine.state import TrainState


@torch.no_grad()
def assemble(comm: Comm, state: TrainState, shards: Shards, own: Mapping[int, Server], hosts: Sequence[int]) -> None:
    """Weights and history come from the servers, the rest of the network from rank 0. `own`: the servers of this rank, by number; `hosts`: the
    rank of each."""
    update, tensors = state.solver, [p.tensor for p in state.solver.parameters]
    for s, host in enumerate(hosts):
        mine = own.get(s)
        vector = mine.vector if mine is not None else tensors[0].new_empty(shards.sizes[s])
        if len(vector):
            comm.broadcast(vector, host)
            shards.unpack(s, vector, tensors)
        remembered = mine.remembered() if mine is not None else {}
        for slot, kept in update.history.items():
            counts = slot == "t"
            size = len(shards.parts[s]) if counts else shards.sizes[s]
            if not size:
                continue
            slot_tensors = [kept[p.name] for p in update.parameters]
            whole = remembered[slot] if mine is not None else slot_tensors[0].new_empty(size)
            comm.broadcast(whole, host)
            if not counts:
                shards.unpack(s, whole, slot_tensors)
                continue
            for part, count in zip(shards.parts[s], whole, strict=True):
                if part.begin == 0:
                    slot_tensors[part.index].copy_(count)
    trained = {p.name for p in update.parameters}
    for name, tensor in state.model.state_dict().items():
        if name not in trained:
            whole = tensor.contiguous()
            comm.broadcast(whole)
            tensor.copy_(whole)


def arrivals(comm: Comm, own: Mapping[int, Arrived], hosts: Sequence[int]) -> list[Arrived]:
    """What each server has applied. `own`: of those of this rank; `hosts` as in `assemble`."""
    said = [comm.broadcast_bytes(_said(own[s]) if s in own else None, host) for s, host in enumerate(hosts)]
    return [_heard(one) for one in said]


def _said(arrived: Arrived) -> bytes:
    return torch.tensor([arrived.order, arrived.staleness], dtype=torch.int32).numpy().tobytes()


def _heard(data: bytes) -> Arrived:
    order, staleness = (
        torch.frombuffer(bytearray(data), dtype=torch.int32).reshape(2, -1).tolist() if data else ((), ())
    )
    return Arrived(tuple(order), tuple(staleness))
