"""A machine and its plan, for a person and for a program."""

from collections.abc import Iterator, Sequence
from typing import Any

from stagerun.text import columns, count, size
from stagerun.topology.machine import Core, Machine, ranges
from stagerun.topology.placing import Plan, Seat

_APART, _IDLE, _CLOSED = "+", ".", "x"
_MARKS = "0123456789abcdefghijklmnopqrstuvwyz"  # of workers; x has a meaning
_GROUP, _ROW = 8, 64


def picture(machine: Machine, plan: Plan, bind: str = "") -> str:
    """Some lines: the machine, a character for each core, a row for each worker, and why. `bind`: what `run` would do with it."""
    lines = [_first(machine), ""]
    lines += _map(machine, plan.seats)
    if plan.seats:
        lines += ["", *_table(plan)]
    lines += ["", *(f"- {sentence}" for sentence in (*plan.why, *filter(None, [bind])))]
    return "\n".join(lines) + "\n"


def _first(machine: Machine) -> str:
    sockets = len({core.socket for core in machine.cores})
    memory = sum(node.memory for node in machine.nodes)
    parts = [count(sockets, "socket"), count(len(machine.nodes), "NUMA node"), count(len(machine.cores), "core")]
    if len(machine.cpus) > len(machine.cores):
        parts[-1] += f" with {len(machine.cpus)} hardware threads"
    slow = sum(core.slow for core in machine.cores)
    parts += [f"{slow} of them slower"] * bool(slow) + [size(memory)] * bool(memory)
    parts += [count(len(machine.gpus), "GPU")] * bool(machine.gpus)
    if machine.limited:
        parts.append(f"CPUs {ranges(machine.allowed & machine.cpus)} allowed")
    if machine.quota is not None:
        parts.append(f"a quota of {machine.quota:g}")
    return ", ".join(parts)


def _map(machine: Machine, seats: Sequence[Seat]) -> Iterator[str]:
    """A character for each core, by node."""
    marks = {cpu: _mark(seat) for seat in seats for cpu in seat.compute}
    apart = {cpu for seat in seats if seat.cores_apart for cpu in seat.apart}
    seen = {"".join(_of(core, machine, marks, apart)) for core in machine.cores}
    for node in machine.nodes:
        cores = [core for core in machine.cores if core.node == node.number]
        text = "".join(_of(core, machine, marks, apart) for core in cores)
        gpus = ranges(gpu.number for gpu in machine.gpus if gpu.node == node.number)
        head = f"node {node.number}  socket {cores[0].socket}  CPUs {ranges(c for core in cores for c in core.cpus)}"
        yield head + f"  {size(node.memory)}" * bool(node.memory) + f"  GPU {gpus}" * bool(gpus)
        for start in range(0, len(text), _ROW):
            row = text[start : start + _ROW]
            yield "  " + " ".join(row[i : i + _GROUP] for i in range(0, len(row), _GROUP))
    meanings = {_APART: "set apart", _IDLE: "idle", _CLOSED: "not allowed"}
    told = [f"{mark} {text}" for mark, text in meanings.items() if mark in seen]
    yield "  (a character for each core: the worker that has it" + "".join(f", {text}" for text in told) + ")"


def _of(core: Core, machine: Machine, marks: dict[int, str], apart: set[int]) -> str:
    usable = [cpu for cpu in core.cpus if cpu in machine.allowed]
    if not usable:
        return _CLOSED
    worker = [marks[cpu] for cpu in usable if cpu in marks]
    return worker[0] if worker else _APART if set(usable) & apart else _IDLE


def _mark(seat: Seat) -> str:
    return _MARKS[seat.worker % len(_MARKS)]


def _table(plan: Plan) -> list[str]:
    gpus = any(seat.gpu is not None for seat in plan.seats)
    rows = [["worker", "node", *["GPU"] * gpus, "threads", "compute on CPUs", "the rest on CPUs", "memory"]]
    for seat in plan.seats:
        rows.append(
            [
                str(seat.worker),
                ranges(seat.nodes),
                *[str(seat.gpu)] * gpus,
                str(plan.threads),
                ranges(seat.compute),
                "the same" if seat.apart == seat.compute else ranges(seat.apart),
                "-" if seat.memory is None else f"node {seat.memory}",
            ]
        )
    return columns(rows)


def as_json(machine: Machine, plan: Plan) -> dict[str, Any]:
    return {
        "nodes": [{"node": node.number, "memory_bytes": node.memory} for node in machine.nodes],
        "cores": [{"cpus": list(c.cpus), "node": c.node, "socket": c.socket, "slow": c.slow} for c in machine.cores],
        "gpus": [{"gpu": gpu.number, "node": gpu.node, "name": gpu.name} for gpu in machine.gpus],
        "allowed": sorted(machine.allowed & machine.cpus),
        "quota": machine.quota,
        "threads": plan.threads,
        "idle_cores": plan.idle,
        "workers": [
            {
                "worker": seat.worker,
                "nodes": list(seat.nodes),
                "gpu": seat.gpu,
                "compute": sorted(seat.compute),
                "apart": sorted(seat.apart),
                "cores": seat.cores,
                "cores_apart": seat.cores_apart,
                "memory_node": seat.memory,
            }
            for seat in plan.seats
        ],
        "why": list(plan.why),
    }
