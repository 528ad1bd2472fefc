"""`stagerun topology`: a machine, what each worker would get of it, and whether `run` would bind it there."""

import json
import os
from pathlib import Path

from stagerun.errors import StorageError, UsageError
from stagerun.text import count
from stagerun.topology.described import as_json, describe, parse, picture
from stagerun.topology.machine import Machine, read
from stagerun.topology.placing import Plan, make_plan
from stagerun.topology.sharing import choose, default_workers
from stagerun.world import default_threads


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
        found = as_json(machine, plan)
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
