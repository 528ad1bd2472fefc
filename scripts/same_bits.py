"""The bits of two commits, compared: see scripts/dev same-bits."""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tiny
from safetensors.numpy import load_file

ROOT = Path(__file__).parent.parent
# (determinism, workers, workers after a SIGTERM in the second stage)
CASES = [
    ("FIXED", 1, 0),
    ("FIXED", 2, 0),
    ("FIXED", 3, 0),
    ("FIXED", 2, 2),
    ("ELASTIC", 1, 0),
    ("ELASTIC", 2, 0),
    ("ELASTIC", 3, 1),
]
STAGES = """
stage { name: "init" }
stage { name: "cyc1" }
stage { name: "collapse" }
stage { name: "early" from: "init@4" }
ensemble { name: "mean" members: ["collapse", "early"] rule: MEAN_PROBABILITY }
ensemble { name: "weights" members: ["collapse", "early"] rule: WEIGHT_AVERAGE }
"""
SOLVERS = {
    "init": tiny.STAGES["init"].replace("max_iter: 10", "max_iter: 6") + " ema_decay: 0.5",
    "cyc1": tiny.STAGES["cyc2"] + " carry { momentum: KEEP } mixup_alpha: 0.2 label_smoothing: 0.1",
    "collapse": tiny.STAGES["collapse"].partition("transform_param")[0],
    "early": 'base_lr: 0.02 lr_policy: "poly" power: 2 max_iter: 3 type: "LARS"',
}


def make_schedule(folder: Path) -> Path:
    schedule = tiny.make_schedule(folder / "schedule", folder / "data")
    text = (schedule / "schedule.prototxt").read_text()
    (schedule / "schedule.prototxt").write_text(text[: text.index("stage {")] + STAGES)
    for name, solver in SOLVERS.items():
        (schedule / f"{name}.prototxt").write_text(solver + "\n")
    return schedule


def train(tree: Path, schedule: Path, out: Path, determinism: str, workers: int, after: int) -> None:
    """Train; with `after`, send a SIGTERM in the second stage and resume with so many workers."""
    if after:
        run = start(tree, schedule, out, determinism, workers)
        while run.poll() is None and not list((out / "snapshots").glob("cyc1-*")):
            time.sleep(0.02)
        run.send_signal(signal.SIGTERM)
        if finish(run) != 75:
            raise SystemExit(f"{tree}: the run was not stopped in its second stage; run it again")
    if finish(start(tree, schedule, out, determinism, after or workers)) != 0:
        raise SystemExit(f"{tree}: training failed; see above")


def start(tree: Path, schedule: Path, out: Path, determinism: str, workers: int) -> "subprocess.Popen[str]":
    command = ["-m", "stagerun", "run", str(schedule), "--out", str(out), "--nproc", str(workers), "--threads", "1"]
    command += ["--set", f"determinism={determinism}", "--set", "keep_snapshots=100"]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(run: "subprocess.Popen[str]") -> int:
    output, _ = run.communicate(timeout=600)
    if run.returncode not in (0, 75):
        print(output)
    return run.returncode


def values_of(out: Path) -> dict[str, Any]:
    """Return what must be the same, by snapshot and ensemble; attempts and times may differ."""
    values: dict[str, Any] = {}
    for folder in sorted((out / "snapshots").iterdir()):
        manifest, _ = json.JSONDecoder().raw_decode((folder / "MANIFEST.json").read_text())  # a digest follows
        state = json.loads((folder / "state.json").read_text())
        state.pop("train_seconds")
        name = folder.name.rpartition("-")[0]
        values[f"{name} identity"] = manifest["identity"]
        values[f"{name} state"] = state
        values[f"{name} recipe"] = (folder / "recipe.prototxt").read_text()
        for file in folder.glob("*.safetensors"):
            tensors = load_file(file)
            values |= {f"{name} {file.stem} {key}": (t.dtype.str, t.shape, t.tobytes()) for key, t in tensors.items()}
    for file in sorted((out / "results").rglob("*.json")):
        result = json.loads(file.read_text())
        values[f"result {file.name.rpartition('-')[0] or file.stem}"] = {
            key: value for key, value in result.items() if key.endswith(("top1", "top5", "loss"))
        }
    return values


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    return sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))


def snapshots(values: dict[str, Any]) -> set[str]:
    return {key.partition(" ")[0] for key in values if not key.startswith("result ")}


def without(values: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """Return the values without the snapshots of these names."""
    return {key: value for key, value in values.items() if key.partition(" ")[0] not in names}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compares the bits that this tree and another commit train to.")
    parser.add_argument("commit", help="what `git rev-parse` understands")
    commit = parser.parse_args().commit
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="same-bits-") as name:
        folder = Path(name)
        tiny.make_data(folder / "data")
        schedule = make_schedule(folder)
        other = folder / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(other), commit], cwd=ROOT, check=True)
        try:
            elastic = []
            planned: set[str] = set()  # snapshots of a run that is not stopped
            for determinism, workers, after in CASES:
                both = []
                for tree, side in ((ROOT, "ours"), (other, "theirs")):
                    out = folder / f"{determinism}-{workers}-{after}-{side}"
                    train(tree, schedule, out, determinism, workers, after)
                    both.append(values_of(out))
                elastic += [both[0]] if determinism == "ELASTIC" else []
                planned = planned or snapshots(both[0])
                # Where a stop is saved is a matter of time: a busy machine stops an iteration later.
                alone = (snapshots(both[0]) ^ snapshots(both[1])) - planned if after else set()
                compared = [without(values, alone) for values in both]
                different = compare(*compared)
                wrong += len(different)
                then = f", stopped, {after} workers" if after else ""
                line = f"{determinism}, {workers} workers{then}: {len(compared[0])} values, {len(different)} differ"
                if alone:
                    count = sum(map(len, both)) - sum(map(len, compared))
                    line += f"; {count} left out: one tree alone was stopped at {', '.join(sorted(alone))}"
                print(line, flush=True)
                for key in different[:10]:
                    print(f"  {key}")
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(other)], cwd=ROOT, check=True)
        shared = [{key: one[key] for key in one.keys() & elastic[0].keys()} for one in elastic]
        uneven = sum(len(compare(one, shared[0])) for one in shared[1:])
        print(f"ELASTIC, by number of workers: {uneven} differ")
    sys.exit(1 if wrong or uneven else 0)


if __name__ == "__main__":
    main()
