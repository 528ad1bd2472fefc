"""A schedule of two stages and five iterations, of which the second starts where the first ends, and what must hold after each
life of a run of it. Every iteration is a snapshot, and one per stage is kept, so that most of a life is spent in the store."""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import tiny

from stagerun import store

STAGES = {
    "init": ('base_lr: 0.1 lr_policy: "poly" power: 1 max_iter: 3', 3),
    "collapse": ('base_lr: 0.02 lr_policy: "poly" power: 2 max_iter: 2', 2),
}
ORDER = list(STAGES)
Place = tuple[int, int]  # number of the stage, iterations done: the order in which they are trained


def make_schedule(folder: Path) -> Path:
    """The solver files, in `folder`, and the images that they name."""
    tiny.make_data(folder / "data")
    text = tiny.SCHEDULE.format(data=folder / "data", train=tiny.TRAIN_IMAGES, val=tiny.VAL_IMAGES)
    text = text[: text.index("stage {")]
    for old, new in (
        ('name: "tiny"', 'name: "brief"\nkeep_snapshots: 1'),
        ("batch_size: 32", "batch_size: 8"),
        ("device_batch_size: 4", "device_batch_size: 2"),
        ("snapshot: 3", "snapshot: 1"),
        ("display: 5", "display: 1"),
    ):
        assert old in text
        text = text.replace(old, new)
    schedule = folder / "schedule"
    schedule.mkdir()
    (schedule / "schedule.prototxt").write_text(text + "".join(f'stage {{ name: "{name}" }}\n' for name in STAGES))
    for name, (solver, _) in STAGES.items():
        (schedule / f"{name}.prototxt").write_text(solver + "\n")
    return schedule


def complete(out: Path) -> dict[str, Place]:
    """The snapshots of which every byte is as it was written, by name."""
    disk = store.LocalDisk()
    found = {}
    for ref in store.inventory(disk, out).snapshots:
        store.read(disk, out, ref)  # raises where it is not
        found[ref.name] = (ORDER.index(ref.stage), ref.iter)
    return found


def events(out: Path) -> list[dict]:
    """What log.jsonl says; a line that a kill cut short is left out."""
    found = []
    with suppress(FileNotFoundError):
        for line in (out / "log.jsonl").read_text(errors="replace").splitlines():
            with suppress(ValueError):
                found.append(json.loads(line))
    return found


def lost(out: Path) -> str:
    """Says which snapshot is gone that was reported as written while no later one is there, or was set aside: no file was damaged
    here, and a disk that does not answer is no reason. '' if there is none."""
    if aside := store.aside(store.LocalDisk(), out):
        return f"{', '.join(aside)} was set aside, and nothing had damaged it"
    written = {e["name"]: (ORDER.index(e["stage"]), e["iter"]) for e in events(out) if e["event"] == "SnapshotWritten"}
    there = complete(out)
    if written and max(written.values()) > max(there.values(), default=(-1, 0)):
        return f"{max(written, key=lambda name: written[name])} was written and is gone; there are {sorted(there) or 'none'}"
    return ""


def expected_start(out: Path) -> tuple[str, int] | None:
    """Stage and iteration at which the next life must begin to train, by what is on disk; None if all is trained."""
    stage, iter = max(complete(out).values(), default=(0, 0))
    if iter == STAGES[ORDER[stage]][1]:
        stage, iter = stage + 1, 0
    return (ORDER[stage], iter) if stage < len(ORDER) else None


def begun(out: Path) -> tuple[int, tuple[str, int] | None]:
    """How many lives have begun in log.jsonl, and the stage and iteration at which the last began to train."""
    lives, start = 0, None
    for e in events(out):
        if e["event"] == "RunStarted":
            lives, start = lives + 1, None
        elif e["event"] == "StageStarted":
            start = start or (e["stage"], e["iter"])
    return lives, start


def bug(texts: Sequence[str], codes: Sequence[int]) -> str:
    """Says what no user may ever see; '' if there is nothing of it."""
    if not any("Traceback" in text or "this is a bug" in text for text in texts) and 70 not in codes:
        return ""
    report = re.search(r"report it with (\S+)", " ".join(texts))
    where = Path(report[1]).read_text() if report and Path(report[1]).exists() else ""
    return f"a bug of stagerun, exit {list(codes)}: {' / '.join(text[-300:] for text in texts if text)} {where[-600:]}"
