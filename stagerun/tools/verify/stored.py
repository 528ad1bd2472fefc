"""The schedule of a run as its snapshots have it."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from stagerun import store
from stagerun.base.errors import StagerunError, UsageError, listing
from stagerun.base.recipe import Schedule
from stagerun.data.weights import looked_at
from stagerun.language import load
from stagerun.language.consent import asked, trusted
from stagerun.language.resolve import SCHEDULE_FILE
from stagerun.language.stored import read_foreign
from stagerun.logs.log_file import LOG, read_last_life
from stagerun.plan.counting import under
from stagerun.store.layout import snapshots_folder
from stagerun.tools.status.output import DISK, newest_recipe, newest_snapshot, recipe_text
from stagerun.train.progress import RECIPE


def read(folder: str, overrides: Sequence[str], trust_code: bool) -> Schedule:
    """Return the schedule of DIR, or of an output folder."""
    if (Path(folder) / SCHEDULE_FILE).exists():
        return load(folder, overrides)
    return stored_schedule(Path(folder), trust_code)


def stored_schedule(out: Path, trust_code: bool) -> Schedule:
    """Return the schedule in the newest snapshot, each stage as its own newest snapshot has it. UsageError if no snapshot can be read, and
    where it names Python and that is not trusted."""
    inventory = under(store.inventory(DISK, out, looking=True), read_last_life(out / LOG).names)
    schedule, newest = newest_recipe(out, inventory), newest_snapshot(inventory)
    if schedule is None or newest is None:
        raise UsageError(
            f"{out} has no snapshot that says what was trained", f"give the schedule's folder, and `--out {out}`"
        )
    refs = {ref.stage: ref for ref in inventory.snapshots}
    recipe_in = lru_cache(read_foreign)  # most snapshots have the same text
    stages = []
    for stage in schedule.stages:
        ref = refs.get(stage.name)
        if ref is None:
            stages.append(replace(stage, identity={}))
            continue
        with suppress(StagerunError, ValueError):  # the check of that snapshot says why
            trained = {one.name: one for one in recipe_in(recipe_text(out, ref)).stages}.get(
                ref.trained_as or ref.stage
            )
            # Where its parent was renamed or replaced, only today's schedule has what the stage starts from.
            if trained is not None and (trained.parent, trained.average) == (stage.parent, stage.average):
                stage = replace(trained, name=stage.name, enabled=stage.enabled, group=stage.group)
        stages.append(replace(stage, identity=dict(ref.identity)))
    if code := list(dict.fromkeys(name for stage in stages for name in asked(stage))):
        from stagerun.tools.weights.stored import sources_in  # and with it torch

        if not trust_code:
            raise UsageError(
                f"the schedule in snapshot {newest.name} runs Python that it names: {listing(code, 'and')}",
                "read it; --trust-code runs the snapshot's copy, and with the schedule's folder DIR its own files are taken",
            )
        sources = sources_in(DISK, snapshots_folder(out) / newest.name)
        stages = [trusted(stage, sources) for stage in stages]
        files = [(RECIPE, ""), *sources.files]
        schedule = replace(schedule, files=tuple((f"{out}/{path}", text) for path, text in files))
    # Scratch is a folder that is written to.
    found = replace(schedule, stages=tuple(stages)).with_data(lambda data: replace(data, scratch=None))
    return looked_at(found, out)
