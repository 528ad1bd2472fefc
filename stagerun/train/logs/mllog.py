"""OUT/mllog.txt: MLPerf's `:::MLLOG` lines, for its compliance checker and the tools that read such logs.

The whole schedule is one run, from run_start before the first stage to run_stop after the last, over all process lives; its
clock is the wall's, the time between two lives included. What a kill undid and was trained again is taken out. Each stage states
its settings, and again what a later life changes in them. An epoch that a stage ends in the middle of is stopped there, and the
next stage starts it again. Only evaluations on all images are in it.

Besides MLPerf's own fields each line's metadata says which stage and iteration it belongs to. What stagerun doesn't know is
not made up: who submits what, on which system, whether caches were cleared. A submission must add that. A log that was asked
for only later begins there.
"""

import inspect
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagerun.base.events import (
    Event,
    Iterated,
    RunFinished,
    RunStarted,
    StageFinished,
    StageStarted,
    Tested,
    TestedBeside,
)
from stagerun.base.recipe import DecayFrom, Schedule, Solver
from stagerun.train.logs.course import Leg
from stagerun.train.logs.whole_file import WholeFile

# -- what MLPerf calls the settings of a stage

# MLPerf's names of some settings depend on the solver type.
BASE_LR, DECAY = "opt_base_learning_rate", "opt_weight_decay"
NAMES: dict[str, dict[str, str]] = {
    "SGD": {BASE_LR: "sgd_opt_base_learning_rate", DECAY: "sgd_opt_weight_decay", "momentum": "sgd_opt_momentum"},
    "LARS": {
        BASE_LR: "lars_opt_base_learning_rate",
        DECAY: "lars_opt_weight_decay",
        "momentum": "lars_opt_momentum",
        "delta": "lars_epsilon",
    },
    "Adam": {"momentum": "opt_adam_beta_1", "momentum2": "opt_adam_beta_2", "delta": "opt_adam_epsilon"},
    "AdamW": {
        DECAY: "opt_adamw_weight_decay",
        "momentum": "opt_adamw_beta_1",
        "momentum2": "opt_adamw_beta_2",
        "delta": "opt_adamw_epsilon",
    },
    "LAMB": {
        DECAY: "opt_lamb_weight_decay_rate",
        "momentum": "opt_lamb_beta_1",
        "momentum2": "opt_lamb_beta_2",
        "delta": "opt_lamb_epsilon",
    },
    "AdaGrad": {"delta": "opt_adagrad_epsilon"},
}
# The field that says over how many iterations a policy falls to zero.
POLY_STEPS = {"poly": "max_iter", "poly_cyc": "lr_iter"}


def _decay_steps(solver: Solver) -> int:
    steps: int = getattr(solver, POLY_STEPS[solver.lr_policy])
    within = solver.lr_policy == "poly" and solver.decay_from is DecayFrom.WARMUP_END
    return steps - solver.warmup_iter if within else steps


def settings(solver: Solver, epoch_images: int, workers: int) -> dict[str, Any]:
    """A stage's settings under MLPerf's keys; what MLPerf has no word for is left out."""
    names = NAMES.get(solver.type, {})
    found: dict[str, Any] = {
        "seed": solver.random_seed,
        "global_batch_size": solver.batch_size,
        # For the worker that has most to do.
        "gradient_accumulation_steps": -(-solver.logical_workers // workers),
        "opt_name": solver.type.lower(),
        names.get(BASE_LR, BASE_LR): solver.base_lr,
        names.get(DECAY, DECAY): solver.weight_decay,
        "opt_learning_rate_warmup_epochs": solver.warmup_iter * solver.batch_size / epoch_images,
    }
    for field in ("momentum", "momentum2", "delta"):
        if field in names:
            found[names[field]] = getattr(solver, field)
    if solver.lr_policy in POLY_STEPS:
        prefix = names.get(BASE_LR, BASE_LR).removesuffix("base_learning_rate")
        found[prefix + "learning_rate_decay_poly_power"] = solver.power
        found[prefix + "learning_rate_decay_steps"] = _decay_steps(solver)
    if solver.clip_gradients is not None:
        found["opt_gradient_clip_norm"] = solver.clip_gradients
    return found


# -- the log

TOKEN = ":::MLLOG "
START, END, POINT = "INTERVAL_START", "INTERVAL_END", "POINT_IN_TIME"
EVALUATION = ("eval_start", "eval_accuracy", "eval_stop")


@dataclass(frozen=True, slots=True)
class Entry:
    """One line. `stage` is '' and `iter` 0 for what belongs to the run as a whole."""

    text: str
    key: str
    value: Any
    stage: str
    iter: int
    weights: str  # of an evaluation: '' for the trained ones, 'averaged'
    val: str = ""  # of one on another than the first validation set


def parse_entry(text: str) -> Entry | None:
    """None for a line that is not one of ours."""
    if not text.startswith(TOKEN):
        return None
    try:
        record = json.loads(text.removeprefix(TOKEN))
        metadata = record["metadata"]
        stage, iter, weights = metadata.get("stage", ""), metadata.get("iter", 0), metadata.get("weights", "")
        known = type(iter) is int and isinstance(stage, str)
        val = str(metadata.get("val", ""))
        return Entry(text, record["key"], record["value"], stage, iter, weights, val) if known else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


class MLLog:
    """A sink, for rank 0."""

    def __init__(self, path: Path, schedule: Schedule, legs: Mapping[str, Leg], warn: Callable[[str], None]) -> None:
        self.schedule, self.legs = schedule, legs
        self.file = WholeFile(path, warn)
        found = [parse_entry(line) for line in self.file.lines]
        self.entries = [entry for entry in found if entry is not None]
        self.file.left_out(len(found) - len(self.entries))
        self.opened = time.time()
        self.workers = 1
        self.epoch: int | None = None  # the one that has been started, counted from 1
        self.began = False  # whether this life has done anything that belongs into the log

    def __enter__(self) -> "MLLog":
        return self

    def __exit__(self, *_: object) -> None:
        if self.began and not self._has("run_stop"):
            self._stop("aborted")  # the next life takes it out again

    def __call__(self, event: Event) -> None:
        match event:
            case RunStarted():
                self.workers = event.workers
            case StageStarted():
                self._begin()
                self._stage_started(event)
            case Iterated():
                self._iterated(event)
            case Tested() | TestedBeside() if self._has("run_start") and self._on_all(event):
                self._begin()
                self._tested(event)
            case StageFinished():
                self._write()
            case RunFinished() if self.began:
                self._stop("aborted" if event.not_chosen else "success")  # what is left may still come

    def _on_all(self, event: Tested | TestedBeside) -> bool:
        return any(
            val.name == event.val and event.images == val.images for val in self.schedule.stage(event.stage).data.val
        )

    # -- lines

    def _add(self, kind: str, key: str, value: Any = None, at: float | None = None, **metadata: Any) -> None:
        frame = inspect.currentframe()
        line = frame.f_back.f_lineno if frame and frame.f_back else 0
        record = {
            "namespace": "",
            "time_ms": int(1000 * (time.time() if at is None else at)),
            "event_type": kind,
            "key": key,
            "value": value,
            "metadata": {"file": "stagerun/train/logs/mllog.py", "lineno": line, **metadata},
        }
        entry = parse_entry(TOKEN + json.dumps(record))
        assert entry is not None
        self.entries.append(entry)

    def _has(self, key: str) -> bool:
        return any(entry.key == key for entry in self.entries)

    def _write(self) -> None:
        if not self._has("run_start"):
            return  # a life that only evaluates what was trained before the log was asked for
        self.file.write([entry.text for entry in self.entries])

    def _where(self, stage: str, iter: int) -> dict[str, Any]:
        leg = self.legs[stage]
        return {"samples_count": leg.images(iter), "stage": stage, "iter": iter}

    # -- events

    def _begin(self) -> None:
        """The run goes on: it hasn't stopped after all."""
        if not self.began:
            self.began = True
            self.entries = [entry for entry in self.entries if entry.key != "run_stop"]

    def _stop(self, status: str) -> None:
        self._add(END, "run_stop", status=status)
        self._write()

    def _stage_started(self, event: StageStarted) -> None:
        stage = event.stage
        solver, data = self.schedule.stage(stage).solver, self.schedule.stage(stage).data
        current = settings(solver, data.train.images, self.workers)
        self.entries = [entry for entry in self.entries if self._stands(entry, event, current)]
        self.epoch = self._open_epoch(stage)
        first = not self._has("run_start")
        if first:
            self._add(START, "init_start", at=self.opened)
            self._add(POINT, "train_samples", data.train.images)
            if data.val:
                self._add(POINT, "eval_samples", data.val[0].images)
        for key, value in current.items():
            before = [entry.value for entry in self.entries if (entry.key, entry.stage) == (key, stage)]
            if before[-1:] != [value]:
                self._add(POINT, key, value, stage=stage, iter=event.iter)
        if first:
            self._add(END, "init_stop")
            self._add(START, "run_start")
        self._write()

    def _stands(self, entry: Entry, event: StageStarted, current: Mapping[str, Any]) -> bool:
        """Whether a line of an earlier life is still true where a stage with these settings starts or goes on."""
        if entry.stage != event.stage:
            return not entry.stage or entry.stage in self.legs
        if event.iter == event.begins:
            return entry.iter == event.begins and entry.key in current and entry.value == current[entry.key]
        return entry.iter <= event.iter

    def _open_epoch(self, stage: str) -> int | None:
        """The epoch that the stage has started and not stopped, by its lines."""
        last = next(
            (e for e in reversed(self.entries) if e.stage == stage and e.key in ("epoch_start", "epoch_stop")), None
        )
        if last is None or last.key == "epoch_stop":
            return None
        return int(json.loads(last.text.removeprefix(TOKEN))["metadata"]["epoch_num"])

    def _iterated(self, event: Iterated) -> None:
        leg, stage, now = self.legs[event.stage], event.stage, time.time()
        before, after = leg.images(event.iter - 1), leg.images(event.iter)
        changed = self.epoch is None
        if self.epoch is None:
            self.epoch = before // leg.epoch_images + 1
            where = self._where(stage, event.iter - 1)
            self._add(START, "epoch_start", at=now - event.seconds, epoch_num=self.epoch, **where)
        where = self._where(stage, event.iter)
        while self.epoch is not None and (after >= self.epoch * leg.epoch_images or event.iter == leg.iterations):
            changed = True
            self._add(END, "epoch_stop", at=now, epoch_num=self.epoch, **where)
            more = after > self.epoch * leg.epoch_images and event.iter != leg.iterations
            self.epoch = self.epoch + 1 if more else None
            if self.epoch is not None:  # the batch reaches into the next one
                self._add(START, "epoch_start", at=now, epoch_num=self.epoch, **where)
        if changed:
            self._write()

    def _tested(self, event: Tested | TestedBeside) -> None:
        weights, val = "averaged" if event.ema else "", event.val if isinstance(event, TestedBeside) else ""
        self.entries = [
            entry
            for entry in self.entries
            if entry.key not in EVALUATION
            or (entry.stage, entry.iter, entry.weights, entry.val) != (event.stage, event.iter, weights, val)
        ]
        images, whole = self.legs[event.stage].images(event.iter), self.legs[event.stage].epoch_images
        where = self._where(event.stage, event.iter) | ({"weights": weights} if weights else {})
        where |= {"val": val} if val else {}
        where["epoch_num"] = images // whole if images % whole == 0 else round(images / whole, 6)
        self._add(START, "eval_start", at=time.time() - event.seconds, **where)
        self._add(POINT, "eval_accuracy", event.top1, **where)
        self._add(END, "eval_stop", **where)
        self._write()
