"""`stagerun topology`: a machine, what each worker would get of it, and whether `run` would bind it there."""

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from stagerun.base.errors import Problem, RecipeError, Span, StorageError, UsageError, nearest
from stagerun.base.text import columns, count, size
from stagerun.command.options import command, option
from stagerun.command.shared import Json
from stagerun.launch.placing import Plan, Seat, make_plan
from stagerun.launch.sharing import choose, default_workers
from stagerun.system.cores import Core, Gpu, Machine, Node, numbers, ranges, read
from stagerun.system.world import default_threads


@command()
def topology(
    workers_per_node: int | None = option(
        "--workers-per-node N", "Workers on this machine.  [default: as `run`]", least=1
    ),
    comm_cores: int | None = option(
        "--comm-cores N",
        "Cores of each worker that are set apart for all that doesn't compute.  [default: one in 12, at most 4]",
        least=0,
    ),
    faked: str | None = option("--faked FILE", "Another machine, described in FILE, in place of this one."),
    save: str | None = option("--save FILE", "Also write the machine's description into FILE."),
    as_json: Json = False,
) -> None:
    """Draws this machine's cores, and which of them each worker gets where `run` binds them.

    A worker has whole cores of one NUMA node, all workers as many. Most of them compute, one thread each; of 12 or more the last
    ones (1 of 12) are set apart for communication, loading, saving and the monitor. With GPUs a worker has cores near its GPU.

    FILE holds a line for each NUMA node, its cores and GPUs, and what a job may use of them:

    \b
      node 0 socket 0 memory 96G    socket and memory may be left out
      cores 0-23 siblings 48-71     first CPUs of the cores; second ones (SMT)
      gpu 0 NVIDIA H200             at this node; before all nodes: at none
      node 1 socket 1 memory 96G
      cores 24-43 siblings 72-91
      cores 44-47 slow              of the slower kind, where there are two
      allowed 0-15,48-63            the job's affinity or cpuset; default: all
      quota 4                       its control group's processors
    """
    click.echo(draw(workers_per_node, comm_cores, faked, save, as_json), nl=False)


def draw(workers: int | None, comm_cores: int | None, faked: str | None, save: str | None, json_wanted: bool) -> str:
    """The whole output. RecipeError, UsageError, StorageError."""
    machine = _described(faked) if faked is not None else read(Path("/"), os.environ)
    if save is not None:
        try:
            Path(save).write_text(describe(machine))
        except OSError as error:
            raise StorageError(f"{save} can't be written: {error.strerror}") from error
    number = workers or default_workers(machine)
    plan = make_plan(machine, number, comm_cores)
    environment = {} if faked is not None else os.environ
    choice = choose(machine, number, 1, environment)
    if json_wanted:
        found = record(machine, plan)
        found["auto"] = {"bind": choice.bind and bool(plan.seats), "why": choice.why}
        return json.dumps(found) + "\n"
    return picture(machine, plan, _bound(plan, number, choice.bind, choice.why, faked is not None))


def _bound(plan: Plan, workers: int, bind: bool, why: str, faked: bool) -> str:
    """What `run` would do, as a sentence."""
    who = "" if faked else "here, "
    if not plan.seats:
        return ""
    if bind:
        return f"{who}`run --nproc {workers}` binds by itself: {why}"
    text = f"{who}`run --nproc {workers}` binds only with --bind cores: {why}"
    if not faked and (threads := default_threads(workers)) != plan.threads:
        text += f"; without it a worker has {count(threads, 'thread')}"
    return text


def _described(faked: str) -> Machine:
    try:
        text = Path(faked).read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(
            f"--faked {faked} can't be read: {why}", "`stagerun topology --save FILE` writes one"
        ) from error
    return parse(text, faked)


# -- a machine as a small text

# `#` begins a comment. A GPU before the first node is at an unknown one; a third `siblings` may follow the second.
_UNITS = {"G": 10**9, "M": 10**6, "K": 10**3}
_DIGITS = 9


class _Words:
    """The words of a line that are left, each with its column; `at` is the one that was read last."""

    def __init__(self, path: str, line: int, source: str) -> None:
        self.path, self.line, self.source = path, line, source
        self.left = [(m.start() + 1, m[0]) for m in re.finditer(r"\S+", source.partition("#")[0])]
        self.at = (1, "")

    def refuse(self, message: str, hint: str = "") -> RecipeError:
        """A mistake at the word that was read last."""
        span = Span(self.path, self.line, self.at[0], max(1, len(self.at[1])))
        return RecipeError([Problem(message, span, self.source, hint)])

    def next(self, what: str) -> str:
        self.at = self.left.pop(0) if self.left else (len(self.source.rstrip()) or 1, "")
        if not self.at[1]:
            raise self.refuse(f"{what} is missing")
        return self.at[1]

    def take(self, word: str) -> bool:
        """Reads `word`, if it comes next."""
        there = bool(self.left) and self.left[0][1] == word
        if there:
            self.at = self.left.pop(0)
        return there

    def number(self, what: str) -> int:
        word = self.next(what)
        if not word.isdecimal() or len(word) > _DIGITS:
            raise self.refuse(f"{what} must be a whole number, not `{word}`")
        return int(word)

    def cpus(self, what: str) -> list[int]:
        word = self.next(what)
        try:
            return numbers(word)
        except ValueError:
            raise self.refuse(f"`{word}` is not a list of CPUs", "write 0-23 or 0,2,4-7") from None

    def positive(self, text: str, kind: str, hint: str) -> float:
        """`text`, the word that was read last or a part of it, as a number."""
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise self.refuse(f"`{self.at[1]}` is not a {kind}", hint)
        return value


class _Reader:
    def __init__(self) -> None:
        self.cores: list[Core] = []
        self.nodes: list[Node] = []
        self.sockets: dict[int, int] = {}
        self.gpus: list[Gpu] = []
        self.allowed: set[int] | None = None
        self.quota: float | None = None
        self.taken: set[int] = set()

    def node(self, words: _Words) -> None:
        number = words.number("the node's number")
        if number in self.sockets:
            raise words.refuse(f"node {number} is there twice")
        self.sockets[number] = len(self.nodes)
        self.nodes.append(
            Node(number)
        )  # already here: a mistake in what follows must not cause others in the lines below
        if words.take("socket"):
            self.sockets[number] = words.number("the socket's number")
        if words.take("memory"):
            word = words.next("the size of the memory")
            unit = _UNITS.get(word[-1].upper(), 1)
            value = words.positive(word[:-1] if unit > 1 else word, "size", "write 96G")
            self.nodes[-1] = Node(number, round(value * unit))

    def cores_of(self, words: _Words) -> None:
        if not self.nodes:
            raise words.refuse("`cores` before the first `node`", "a line `node 0` above it")
        columns = [self._new(words, "the list of CPUs")]
        while words.take("siblings"):
            columns.append(self._new(words, "the list of siblings"))
            if len(columns[-1]) != len(columns[0]):
                raise words.refuse(f"{len(columns[-1])} siblings of {len(columns[0])} cores")
        node = self.nodes[-1].number
        slow = words.take("slow")
        self.cores += [Core(tuple(sorted(cpus)), node, self.sockets[node], slow) for cpus in zip(*columns, strict=True)]

    def _new(self, words: _Words, what: str) -> list[int]:
        found = words.cpus(what)
        for cpu in found:
            if cpu in self.taken:
                raise words.refuse(f"CPU {cpu} is there twice")
            self.taken.add(cpu)
        return found

    def gpu(self, words: _Words) -> None:
        number = words.number("the GPU's number")
        if any(gpu.number == number for gpu in self.gpus):
            raise words.refuse(f"GPU {number} is there twice")
        name = " ".join(word for _, word in words.left)
        words.left.clear()
        self.gpus.append(Gpu(number, self.nodes[-1].number if self.nodes else None, name))

    def allow(self, words: _Words) -> None:
        self.allowed = (self.allowed or set()) | set(words.cpus("the list of CPUs"))

    def limit(self, words: _Words) -> None:
        word = words.next("the number of processors")
        self.quota = words.positive(word, "number of processors", "write 4 or 0.5")

    def machine(self) -> Machine:
        cores = tuple(sorted(self.cores, key=lambda core: (core.node, core.cpus)))
        used = {core.node for core in cores}
        nodes = tuple(sorted((n for n in self.nodes if n.number in used), key=lambda n: n.number))
        allowed = self.taken if self.allowed is None else self.taken & self.allowed
        gpus = tuple(sorted(self.gpus, key=lambda gpu: gpu.number))
        return Machine(cores, nodes, gpus, frozenset(allowed), self.quota)


_LINES: dict[str, Callable[[_Reader, _Words], None]] = {
    "node": _Reader.node,
    "cores": _Reader.cores_of,
    "gpu": _Reader.gpu,
    "allowed": _Reader.allow,
    "quota": _Reader.limit,
}


def parse(text: str, path: str) -> Machine:
    """RecipeError with all mistakes; `path` names the file in them."""
    reader, problems = _Reader(), list[Problem]()
    for number, source in enumerate(text.splitlines(), 1):
        words = _Words(path, number, source)
        if not words.left:
            continue
        try:
            first = words.next("")
            if first not in _LINES:
                raise words.refuse(f"no line begins with `{first}`", nearest(first, list(_LINES)) or "")
            _LINES[first](reader, words)
            if words.left:
                raise words.refuse(f"`{words.next('')}` has no meaning here")
        except RecipeError as error:
            problems += error.problems
    machine = reader.machine()
    if [gpu.number for gpu in machine.gpus] != list(range(len(machine.gpus))):
        problems.append(Problem("the GPUs are not numbered 0, 1, 2 ...", Span(path, 1, 1)))
    if not problems and not machine.usable:
        what = "no core of the allowed CPUs" if machine.cores else "no line `cores`"
        problems.append(Problem(f"{what} in this description of a machine", Span(path, 1, 1)))
    if problems:
        raise RecipeError(problems)
    return machine


def describe(machine: Machine) -> str:
    """The text from which `parse` makes an equal machine (memory to the byte)."""
    out = [f"gpu {gpu.number} {gpu.name}".rstrip() for gpu in machine.gpus if gpu.node is None]
    for node in machine.nodes:
        cores = [core for core in machine.cores if core.node == node.number]
        memory = f" memory {_size(node.memory)}" if node.memory else ""
        out.append(f"node {node.number} socket {cores[0].socket}{memory}")
        for slow in (False, True):
            for width in sorted({len(core.cpus) for core in cores if core.slow is slow}, reverse=True):
                rows = zip(*(core.cpus for core in cores if core.slow is slow and len(core.cpus) == width), strict=True)
                out.append("cores " + " siblings ".join(_in_order(row) for row in rows) + " slow" * slow)
        out += [f"gpu {gpu.number} {gpu.name}".rstrip() for gpu in machine.gpus if gpu.node == node.number]
    if machine.limited:
        out.append(f"allowed {ranges(machine.allowed & machine.cpus)}")
    if machine.quota is not None:
        out.append(f"quota {machine.quota:g}")
    return "\n".join(out) + "\n"


def _in_order(cpus: tuple[int, ...]) -> str:
    """As `ranges`, in the given order: the i-th CPUs of two lists are siblings."""
    return ranges(cpus) if list(cpus) == sorted(cpus) else ",".join(map(str, cpus))


def _size(count: int) -> str:
    return f"{count // 10**9}G" if count % 10**9 == 0 else str(count)


# -- for a person and for a program

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
    marks = {cpu: _MARKS[seat.worker % len(_MARKS)] for seat in seats for cpu in seat.compute}
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
    seen_here = [f"{mark} {text}" for mark, text in meanings.items() if mark in seen]
    yield "  (a character for each core: the worker that has it" + "".join(f", {text}" for text in seen_here) + ")"


def _of(core: Core, machine: Machine, marks: dict[int, str], apart: set[int]) -> str:
    usable = [cpu for cpu in core.cpus if cpu in machine.allowed]
    if not usable:
        return _CLOSED
    worker = [marks[cpu] for cpu in usable if cpu in marks]
    return worker[0] if worker else _APART if set(usable) & apart else _IDLE


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


def record(machine: Machine, plan: Plan) -> dict[str, Any]:
    return {
        "nodes": [{"node": node.number, "memory_bytes": node.memory} for node in machine.nodes],
        "cores": [asdict(core) for core in machine.cores],
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
