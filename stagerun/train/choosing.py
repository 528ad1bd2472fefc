"""`method: AUTO` of `compress_param`: how a stage's gradients are sent, chosen once, before its first update, and kept from then on.

The choice is in OUT/choices, for a run that is killed before its first snapshot, and for stretches that are trained once more; and in
each snapshot. `train.trying` finds it.
"""

import time
from collections.abc import Generator, Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch

from stagerun.base.compression import Choice, applied
from stagerun.base.errors import ResumeRefused
from stagerun.base.events import CompressionChosen, Event, Note, Stopped
from stagerun.base.recipe import Compression, Method
from stagerun.base.text import duration
from stagerun.comm import runs_of
from stagerun.engine.compression import senders
from stagerun.engine.feed import DeviceBatch
from stagerun.engine.state import TrainState
from stagerun.engine.trials import Trial, random_state_kept
from stagerun.models import build
from stagerun.plan import State
from stagerun.plan.link import Speeds
from stagerun.plan.prediction import Link
from stagerun.plan.ways import DENSE
from stagerun.system.pulse import Section
from stagerun.train.agreement import everyone, rank0
from stagerun.train.choices import Chosen, grouped, identity_of, read_chosen, write_chosen
from stagerun.train.progress import progress_of
from stagerun.train.stage_start import arithmetic_of, parent_id
from stagerun.train.trying import Found, called, find
from stagerun.train.worker import StageRun

# Ways that are tried besides dense gradients: one, where each takes more bytes than this, since a sender's residual is as large as the
# network.
_MOST, _ROOM = 3, 2e9


def resolved(run: StageRun, state: TrainState) -> Generator[Event, None, Compression | None]:
    """How the stage compresses its gradients, with what AUTO chooses in its place. Collective. Method AUTO after a Stopped.

    ResumeRefused for a snapshot without a choice, or with one that `compress_param` doesn't allow.
    """
    how = run.stage.solver.compress
    if how is None or how.method is not Method.AUTO:
        return how
    why = "as this run has chosen it before"
    if not run.choice:
        run.choice, why = rank0(run.worker.comm, lambda: _known(run, state, how))
    if run.choice:
        if run.rollbacks is None:
            yield CompressionChosen(stage=run.stage.name, methods=_groups(state, run.choice), why=why)
        return applied(how, run.choice)
    if run.worker.comm.size == 1:
        run.choice = {"*": DENSE}
        chosen = _record(run, Speeds(Link(0.0), Link(0.0)), {}, {})
        yield from _publish(run, state, chosen, "one worker sends nothing")
        return applied(how, run.choice)
    if run.is_piece:
        text = f"what stage `{run.stage.name}` chose is not in the output folder any more: it is chosen anew, and the bits may be others"
        yield Note(text=text, warning=True)
    done = yield from _choose(run, state, how)
    return applied(how, run.choice) if done else how


def _known(run: StageRun, state: TrainState, how: Compression) -> tuple[dict[str, str], str]:
    """Rank 0's: what the snapshot or the output folder has, empty if there is nothing yet; and where it is from."""
    names = {"*", *(p.name for p in state.solver.parameters)}
    if run.planned.state is State.RESUME:
        choice = progress_of(run.step.files).choice if run.step.files is not None else {}
        try:
            applied(how, choice)
        except ValueError:
            choice = {}
        if not choice or not choice.keys() <= names:
            raise ResumeRefused(
                f"the snapshot of stage `{run.stage.name}` does not say what `method: AUTO` chose for this network",
                "take `--redo` for the stage, or another --out",
            )
        return choice, "as the snapshot has it"
    assert run.worker.keeper is not None
    chosen = read_chosen(run.worker.keeper.out, run.stage)
    # What is trained once more must have its bits. Where nothing is trained yet, other workers may choose otherwise.
    same = chosen is not None and (run.is_piece or (chosen.workers == run.worker.comm.size and not run.planned.again))
    if chosen is None or not same or chosen.parent != parent_id(run.planned) or not chosen.choice.keys() <= names:
        return {}, ""
    try:
        applied(how, chosen.choice)
    except ValueError:
        return {}, ""
    return chosen.choice, "as chosen before, in OUT/choices"


def _choose(run: StageRun, state: TrainState, how: Compression) -> Generator[Event, None, bool]:
    """Measures, tries, publishes. Collective; False after a Stopped."""
    comm, name, began = run.worker.comm, run.stage.name, time.monotonic()

    def stop() -> bool:
        comm.pulse.enter(Section.START)  # it goes on
        return run.worker.stop() or run.worker.stopping.asked

    with random_state_kept(run.worker.device):
        trial = everyone(comm, lambda: _trial(run, state))
        found = yield from _noted(name, find(comm, trial, how, stop, _room(run, state)))
    if found is None:
        yield Stopped(stage=name, iter=state.iter, reason="asked to stop while it chose how gradients are sent")
        return False
    run.choice = dict(found.choice)
    chosen = _record(run, found.speeds, found.seconds, found.rates)
    yield from _publish(
        run, state, chosen, f"{found.why}; it took {duration(time.monotonic() - began, '.1f')} to choose"
    )
    return True


def _noted(name: str, looking: Generator[str, None, Found | None]) -> Generator[Event, None, Found | None]:
    while True:
        try:
            text = next(looking)
        except StopIteration as end:
            return cast(Found | None, end.value)
        yield Note(text=f"{name}: {text}")


def _room(run: StageRun, state: TrainState) -> int:
    """How many ways besides dense gradients fit into memory: each sender of this rank has a gradient and a residual."""
    runs = senders(run.worker.schedule.determinism, run.stage.solver.logical_workers, run.worker.comm.size)
    size = sum(p.tensor.nbytes for p in state.solver.parameters)
    return _MOST if 2 * len(runs[0]) * size < _ROOM else 1


def _trial(run: StageRun, state: TrainState) -> Trial:
    solver = run.stage.solver
    own = runs_of(solver.logical_workers, run.worker.comm.size)[run.worker.comm.rank]
    start = run.planned.position + run.planned.skipped
    first = start + state.iter * solver.batch_size + own.start * solver.device_batch_size
    with run.worker.images.loader(run.stage, start).stream([(first, solver.device_batch_size)]) as batches:
        batch = next(run.worker.images.labelled(iter(batches), run.stage, run.stage.data.train))

        def placed(values: Any) -> Any:
            if values is None or isinstance(values, torch.Tensor):
                return values
            return torch.as_tensor(np.array(values)).to(run.worker.device)

        kept = DeviceBatch(
            images=placed(batch.images),
            labels=placed(batch.labels),
            positions=np.array(batch.positions),
            lighting=placed(batch.lighting),
            cutout=placed(batch.cutout),
            crop=placed(batch.crop),
        )
    arithmetic = arithmetic_of(
        run.stage.model, solver, run.worker.device, teacher=run.worker.schedule.teacher_model(run.stage)
    )
    model = build(run.stage.model)
    return Trial(model, state, solver, run.worker.schedule.determinism, arithmetic, kept, own)


def _record(run: StageRun, speeds: Speeds, seconds: Mapping[str, float], rates: Mapping[str, list[float]]) -> Chosen:
    return Chosen(
        stage=run.stage.name,
        identity=identity_of(run.stage),
        parent=parent_id(run.planned),
        workers=run.worker.comm.size,
        choice=dict(run.choice),
        seconds=dict(seconds),
        rates=dict(rates),
        bandwidth=speeds.messages.bandwidth,
        latency=speeds.messages.latency,
    )


def _publish(run: StageRun, state: TrainState, chosen: Chosen, why: str) -> Iterator[Event]:
    """Has it on disk before the first update. Collective."""

    def write() -> None:
        assert run.worker.keeper is not None
        run.worker.keeper.require_held()
        write_chosen(run.worker.keeper.disk, run.worker.keeper.out, chosen)

    rank0(run.worker.comm, write)
    yield CompressionChosen(
        stage=run.stage.name,
        methods=_groups(state, chosen.choice),
        why=why,
        tried=tuple((called(name), taken) for name, taken in chosen.seconds.items()),
        bandwidth=chosen.bandwidth,
        latency=chosen.latency,
    )


def _groups(state: TrainState, choice: Choice) -> tuple[tuple[str, int, int, str], ...]:
    return tuple(grouped({p.name: p.tensor.numel() for p in state.solver.parameters}, choice))
