"""How many workers a stage had, as its commands say, and what they leave in doubt. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from stagerun.caffe_import.stages import Step
from stagerun.caffe_import.train_lines import TrainLine
from stagerun.errors import Span

ONE_FOR_ALL = "import again with `--workers N`"


@dataclass(frozen=True, slots=True)
class Doubt:
    """An entry of what is not as it was. `place` is None for that of the net's batch."""

    place: Span | None
    what: str
    why: str
    todo: str


@dataclass(frozen=True, slots=True)
class Workers:
    """`number` is None where the batch is to be asked for. `factors` are those of the batch: `8 workers`; of a question what is
    known, and what isn't: `8 processes`, `the GPUs of each`."""

    number: int | None
    factors: tuple[str, ...] = ()
    doubts: tuple[Doubt, ...] = ()


def workers_of(step: Step, steps: Sequence[Step], given: int | None) -> Workers:
    """Those of a stage, one of `steps`. `given`: --workers, which counts for all stages, whatever commands say.

    They are asked for where a command has a number that can't be read, as `--gpu all`; where commands of the stage have
    different ones; and where its commands start one alone and those of other stages several, which may have been left out.
    """
    if given is not None:
        return _known(given)
    todo = f"fill in its batch_size, or {ONE_FOR_ALL}"
    if doubts := _open(step, todo):
        line = next(line for line in step.lines if line.launch.number is None)
        return Workers(None, _factors(line), doubts)
    numbers = {line.launch.number or 1: line for line in reversed(step.lines)}
    if len(numbers) > 1:
        first, *more = sorted(numbers.values(), key=step.lines.index)
        counts = " or ".join(str(number) for number in sorted(numbers))
        before = f"{_workers(first.launch.number)} in {_at(first)}"
        why = f"stage {step.name} has {_workers(more[0].launch.number)} here and {before}"
        return Workers(None, (f"{counts} workers",), (Doubt(more[0].solver.span, "batch_size", why, todo),))
    if any(line.launch.says for line in step.lines):
        return _known(next(iter(numbers)))
    return _unsaid(step, [s for s in steps if any(line.launch.says for line in s.lines)], todo)


def _known(number: int) -> Workers:
    return Workers(number, (f"{number} workers",) if number > 1 else ())


def _open(step: Step, todo: str) -> tuple[Doubt, ...]:
    """What the stage's commands say, but not as a number."""
    doubts = []
    for line in step.lines:
        launch = line.launch
        if launch.processes == 0 and launch.launcher is not None:
            why = f"stage {step.name}: the command does not say how many processes it starts"
            doubts.append(Doubt(launch.launcher.span, f"`{launch.launcher.text}`", why, todo))
        if launch.gpus == 0 and launch.gpu is not None:
            each = f"each of the {launch.processes} processes" if (launch.processes or 1) > 1 else "each process"
            who = "it" if launch.processes is None else each
            why = f"stage {step.name}: the command does not say how many GPUs {who} had"
            doubts.append(Doubt(launch.gpu.span, f"`--gpu {launch.gpu.text}`", why, todo))
    return tuple(doubts)


def _factors(line: TrainLine) -> tuple[str, ...]:
    """Of a question about a command with a number that isn't known."""
    processes, gpus = line.launch.processes, line.launch.gpus
    found = []
    if processes is not None and processes != 1:
        found.append(f"{processes} processes" if processes else "the processes")
    if gpus is not None and gpus != 1:
        found.append(f"{gpus or 'the'} GPUs" + (" of each" if found else ""))
    return tuple(found)


def _unsaid(step: Step, telling: Sequence[Step], todo: str) -> Workers:
    """A stage none of whose commands says anything of workers. `telling` are the stages where one does."""
    if not telling:
        why = "taken for a whole update, since nothing says how many workers there were"
        return Workers(1, (), (Doubt(None, "batch_size", why, f"{ONE_FOR_ALL} if there were several"),))
    other = next((s for s in telling if _number(s) != 1), telling[0])
    number = _number(other)
    theirs = f"{other.name} had {_workers(number)}" if number else f"how many {other.name} had is not known"
    if step.lines and number != 1:
        place = step.lines[0].solver.span
        why = f"stage {step.name}: the command starts one worker, without `mpirun -n` and `--gpu`; {theirs}"
        return Workers(
            None, (f"1 or {number} workers" if number else "the workers",), (Doubt(place, "batch_size", why, todo),)
        )
    why = f"stage {step.name}: taken for a whole update, of one worker, since nothing says how many it had; {theirs}"
    todo = f"write batch_size in {step.name}.prototxt if there were several"
    return Workers(1, (), (Doubt(step.lines[0].solver.span if step.lines else None, "batch_size", why, todo),))


def _number(step: Step) -> int | None:
    """Of the workers that its commands say; None where that isn't known."""
    numbers = {line.launch.number for line in step.lines}
    return numbers.pop() if len(numbers) == 1 else None


def _workers(number: int | None) -> str:
    return "one worker" if number == 1 else f"{number} workers"


def _at(line: TrainLine) -> str:
    return f"{line.solver.span.path}:{line.solver.span.line}"
