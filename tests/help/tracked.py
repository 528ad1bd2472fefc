"""What trackers show of a run, read back from their stores on this disk, and what they should."""

import importlib.util
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

Shown = dict[str, list[tuple[int, float]]]  # by metric: iteration along the path, value


def environment(base: Path) -> dict[str, str]:
    """In which no tracker needs a network, or writes outside `base`."""
    kept = {"WANDB_MODE": "offline", "WANDB_CACHE_DIR": "cache", "WANDB_CONFIG_DIR": "config", "TRACKIO_DIR": "trackio"}
    folders = {name: word if name == "WANDB_MODE" else str(base / word) for name, word in kept.items()}
    return {**folders, "MLFLOW_TRACKING_URI": "", "HF_HUB_OFFLINE": "1", "MLFLOW_DISABLE_TELEMETRY": "true"}


def installed() -> list[str]:
    return [name for name in READ if importlib.util.find_spec(name)]


def logged(out: Path, before: dict[str, int]) -> Shown:
    """The iterations in log.jsonl, without those that a later start of the stage has undone. `before`: iterations above each stage."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for line in (out / "log.jsonl").read_text().splitlines():
        if not line.endswith("}"):
            continue
        event = json.loads(line)
        lines = found.setdefault(event.get("stage", ""), {})
        if event["event"] == "StageStarted":
            found[event["stage"]] = {iter: one for iter, one in lines.items() if iter <= event["iter"]}
        elif event["event"] == "Iterated":
            assert event["iter"] not in lines
            lines[event["iter"]] = event
    return {
        f"{stage}/{name}": [(before[stage] + iter, one[name]) for iter, one in lines.items()]
        for stage, lines in found.items()
        for name in ("loss", "lr", "momentum")
        if lines
    }


def of_wandb(base: Path, out: Path, run: str) -> Shown:
    from stagerun.train.logs.trackers.wandb import history

    shown: Shown = {}
    for path in sorted(out.glob(f"wandb/offline-run-*-{run}/*.wandb")):
        for row in history(path):
            words = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in row.item}
            for name, value in words.items():
                shown.setdefault(name, []).append((words["iteration"], value))
    return shown


def of_mlflow(base: Path, out: Path, run: str) -> Shown:
    shown: Shown = {}
    with sqlite3.connect(out / "mlflow.db") as store:
        rows = store.execute(
            "select m.key, m.step, m.value from metrics m join tags t on t.run_uuid = m.run_uuid"
            " where t.key = 'stagerun.id' and t.value = ? order by m.step",
            (run,),
        )
        for name, step, value in rows:
            shown.setdefault(name, []).append((step, value))
    return shown


def of_trackio(base: Path, out: Path, run: str) -> Shown:
    shown: Shown = {}
    (path,) = (base / "trackio").glob("*.db")
    with sqlite3.connect(path) as store:
        for (text,) in store.execute("select metrics from metrics where run_name like ? order by step", (f"%-{run}",)):
            row = json.loads(text)
            for name, value in row.items():
                shown.setdefault(name, []).append((row["iteration"], value))
    return shown


READ: dict[str, Callable[[Path, Path, str], Shown]] = {"wandb": of_wandb, "mlflow": of_mlflow, "trackio": of_trackio}


def require_each_once(base: Path, out: Path, tracker: str, before: dict[str, int]) -> int:
    """That a tracker's newest run shows each iteration of the log that stands, once and with its values. How many there are."""
    note = json.loads((out / "trackers" / f"{tracker}.json").read_text())
    run = note["run"] + (f"-{note['number']}" if note["number"] > 1 else "")
    shown, expected = READ[tracker](base, out, run), logged(out, before)
    for name, points in expected.items():
        assert shown.get(name) == points, f"{tracker} shows {name} otherwise"
    stages = {name.partition("/")[0] for name in expected}
    assert not [name for name in shown if name.endswith("/loss") and name.partition("/")[0] not in stages]
    return sum(len(points) for name, points in expected.items() if name.endswith("/loss"))
