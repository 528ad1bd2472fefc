"""`method: AUTO` of `compress_param`: how a stage's gradients are sent, chosen once, before its first update, and kept from then on.

The choice is in OUT/choices, for a run that is killed before its first snapshot, and for stretches that are trained once more; and in
each snapshot.
"""

import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from stagerun.base.errors import ResumeRefused
from stagerun.base.events import CompressionChosen, Event, Note, Stopped
from stagerun.base.recipe import Compression, Solver
from stagerun.base.text import duration, listed
from stagerun.comm import Reducer
from stagerun.engine.state import TrainState
from stagerun.system.pulse import Section
from stagerun.train.agreement import everyone, rank0
from stagerun.train.context import StageRun
from stagerun.train.progress import progress_of
from stagerun.wire.choices import DENSE, Chosen, grouped, identity_of, read_chosen, write_chosen
from stagerun.wire.race import Trial, race
from stagerun.wire.values import applied

# Dense gradients stay unless a method takes so much less: what a few steps show is not surer.
CLEARLY = 0.97


def resolved(
    run: StageRun, state: TrainState, make: Callable[[TrainState, Solver], Reducer]
) -> Generator[Event, None, Compression | None]:
    """How the stage compresses its gradients, with what AUTO chooses in its place. Collective. None after a Stopped. `make` gives the reducer of
    training, for a trial's state and settings.

    ResumeRefused for a snapshot without a choice, or with one that `compress_param` doesn't allow.
    """
    how, comm = run.stage.solver.compress, run.worker.comm
    assert how is not None
    why = "as this run has chosen it before"
    if not run.choice:
        run.choice, why = rank0(comm, lambda: _known(run, state, how))
    if run.choice:
        if run.rollbacks is None:
            yield _event(run, state, why)
        return applied(how, run.choice)
    seconds: dict[str, float] = {}
    if comm.size == 1:
        run.choice, why = {"*": DENSE}, "one worker sends nothing"
    else:
        if run.is_piece:
            text = f"what stage `{run.stage.name}` chose is not in the output folder any more: it is chosen anew, and the bits may be others"
            yield Note(text=text, warning=True)
        names, began = [DENSE, *(method.value for method in how.allow)], time.monotonic()
        text = f"timing steps with {listed([called(each) for each in names])} gradients, in turn"
        yield Note(text=f"{run.stage.name}: {text}")
        device = run.worker.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            trial = everyone(comm, lambda: Trial(run, state))
            at_once = replace(how, start_iter=0)
            ways = {name: replace(trial.solver, compress=applied(at_once, {"*": name})) for name in names}
            reducers = {name: make(trial.state, solver) for name, solver in ways.items()}
            taken = race(run, trial, reducers)
        comm.pulse.enter(Section.START)  # it goes on
        if not taken:
            reason = "asked to stop while it chose how gradients are sent"
            yield Stopped(stage=run.stage.name, iter=state.iter, reason=reason)
            return None
        best, why = decided(taken)
        run.choice = {"*": best}
        seconds = {each: statistics.median(times) for each, times in taken.items()}
        why = f"{why}; it took {duration(time.monotonic() - began, '.1f')} to choose"
    _write(run, seconds)
    yield _event(run, state, why, seconds)
    return applied(how, run.choice)


def _known(run: StageRun, state: TrainState, how: Compression) -> tuple[dict[str, str], str]:
    """Rank 0's: what the snapshot or the output folder has, empty if there is nothing yet; and where it is from."""
    names = {"*", *(p.name for p in state.solver.parameters)}

    def fits(choice: Mapping[str, str]) -> bool:
        with suppress(ValueError):
            applied(how, choice)
            return choice.keys() <= names
        return False

    if run.resumes:
        choice = progress_of(run.files).choice if run.files is not None else {}
        if not fits(choice):
            raise ResumeRefused(
                f"the snapshot of stage `{run.stage.name}` does not say what `method: AUTO` chose for this network",
                "take `--redo` for the stage, or another --out",
            )
        return choice, "as the snapshot has it"
    assert run.worker.keeper is not None
    chosen = read_chosen(run.worker.keeper.out, run.stage)
    # What is trained once more must have its bits. Where nothing is trained yet, other workers may choose otherwise.
    same = chosen is not None and (run.is_piece or (chosen.workers == run.worker.comm.size and not run.planned.again))
    if chosen is None or not same or chosen.parent != run.parent_id or not fits(chosen.choice):
        return {}, ""
    return chosen.choice, "as chosen before, in OUT/choices"


def decided(taken: Mapping[str, Sequence[float]]) -> tuple[str, str]:
    """Return the method to take, and why in words. `taken`: seconds of steps in turn, so that those of one turn make pairs."""
    middle = {name: statistics.median(times) for name, times in taken.items()}
    best = min(middle, key=lambda name: middle[name])
    if best == DENSE or DENSE not in taken:
        return best, "the fastest of those that were timed"
    ratios = sorted(a / b for a, b in zip(taken[best], taken[DENSE], strict=False))
    ratio, high = statistics.median(ratios), ratios[(3 * len(ratios)) // 4]
    if ratio > CLEARLY or high >= 1:
        return DENSE, f"nothing is clearly faster: {best} takes {ratio:.2f} times as long"
    return best, f"it takes {ratio:.2f} times as long as dense"


def called(method: str) -> str:
    return "dense" if method == DENSE else method


def _write(run: StageRun, seconds: Mapping[str, float]) -> None:
    """Put the choice on disk, before the first update. Collective."""
    chosen = Chosen(
        stage=run.stage.name,
        identity=identity_of(run.stage),
        parent=run.parent_id,
        workers=run.worker.comm.size,
        choice=dict(run.choice),
        seconds=dict(seconds),
    )

    def write() -> None:
        assert run.worker.keeper is not None
        run.worker.keeper.require_held()
        write_chosen(run.worker.keeper.disk, run.worker.keeper.out, chosen)

    rank0(run.worker.comm, write)


def _event(run: StageRun, state: TrainState, why: str, seconds: Mapping[str, float] | None = None) -> CompressionChosen:
    methods = grouped({p.name: p.tensor.numel() for p in state.solver.parameters}, run.choice)
    tried = tuple((called(name), taken) for name, taken in (seconds or {}).items())
    return CompressionChosen(stage=run.stage.name, methods=tuple(methods), why=why, tried=tried)
