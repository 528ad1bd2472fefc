"""The schedule of a run whose folder of solver files is not there: as its newest snapshot has it."""

from dataclasses import replace
from pathlib import Path

from stagerun import store
from stagerun.base.errors import ResumeRefused, UsageError
from stagerun.base.recipe import Schedule
from stagerun.language.networks import from_outside
from stagerun.language.stored import read_foreign
from stagerun.store.given import looked_at
from stagerun.train.output import DISK, newest_snapshot
from stagerun.train.progress import CODE, MOST_CODE, MOST_RECIPE, RECIPE


def stored_schedule(out: Path, trust_code: bool) -> Schedule:
    """Each stage has the identity that its newest snapshot says. UsageError without a snapshot, and where Python of its own is not trusted;
    ResumeRefused for a recipe that can't be read."""
    found = store.inventory(DISK, out, looking=True)
    newest = newest_snapshot(out, found)
    if newest is None:
        raise UsageError(
            f"{out} has no snapshot that says what was trained", f"give the schedule's folder, and `--out {out}`"
        )
    try:
        schedule = read_foreign(store.read_file(DISK, out, newest.name, RECIPE, MOST_RECIPE).decode())
    except (store.Damaged, ValueError) as error:
        hint = f"give the schedule's folder, and `--out {out}`"
        raise ResumeRefused(f"the recipe in snapshot {newest.name} can't be read: {error}", hint) from error
    identities = {ref.stage: dict(ref.identity) for ref in found.snapshots}
    stages = tuple(replace(stage, identity=identities.get(stage.name, {})) for stage in schedule.stages)
    schedule = replace(schedule, stages=stages)
    if any(from_outside(stage.model) or stage.solver.transform.python for stage in schedule.stages):
        schedule = _with_code(schedule, out, newest.name, trust_code)
    return looked_at(schedule, out)


def _with_code(schedule: Schedule, out: Path, snapshot: str, trusted: bool) -> Schedule:
    from stagerun.train.stored import sources_of  # and with it torch

    if not trusted:
        raise UsageError(
            f"the schedule in snapshot {snapshot} runs Python that it names",
            "read it; --trust-code runs the snapshot's copy, and with the schedule's folder DIR its own files are taken",
        )
    texts = (
        store.read_file(DISK, out, snapshot, CODE, MOST_CODE)
        if CODE in store.inspect(DISK, out, snapshot).files
        else b"{}"
    )
    sources = sources_of(texts, out)
    stages = (
        replace(stage, model=replace(stage.model, sources=sources)) if from_outside(stage.model) else stage
        for stage in schedule.stages
    )
    files = [(RECIPE, ""), *sources.files]
    return replace(schedule, stages=tuple(stages), files=tuple((f"{out}/{path}", text) for path, text in files))
