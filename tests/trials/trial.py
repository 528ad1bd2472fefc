"""One trial: lives of one trainer in one folder, and what they left."""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
DEFAULTS = {
    "epochs": 3, "images": 200, "batch": 20, "every": None, "keep": 3, "lr": 0.05, "schedule": "fixed", "shuffle": False,
    "dropout": 0.0, "augment": False, "stateful": False, "ema": False, "patience": None, "clip": None, "accumulate": 1,
    "processes": 1, "elastic": False, "width": 8, "norm": True, "wrong_labels": False, "best": False, "check_nan": False,
}  # fmt: skip
STEPS = 10  # updates of an epoch
HANGS_S = 240


class Invalid(Exception):
    """The trial shows nothing: its fault didn't happen, or an undisturbed run failed."""


@dataclass(frozen=True)
class Peer:
    """A trainer. `python`: an interpreter that has it."""

    name: str
    python: Path
    script: str
    settings: dict[str, str] = field(default_factory=dict)  # by situation: the documented setting that its row rests on
    lacks: dict[str, str] = field(default_factory=dict)  # by situation: what its documentation doesn't offer
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Life:
    code: int
    text: str
    rates: list[float]  # the learning rate of each update
    images: list[list[int]]  # the images of each batch, as checksums

    @property
    def last_line(self) -> str:
        lines = [line.strip() for line in self.text.splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line.split(":")[0] or "error:" in line]
        return (errors or lines or ["no output"])[-1][:110]


class Trial:
    def __init__(self, peer: Peer, folder: Path, **settings: Any) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.peer, self.folder, self.out = peer, folder, folder / "out"
        self.settings: dict[str, Any] = {**DEFAULTS, **settings}
        self.lives = 0

    def start(self, hooks: dict[str, Any] | None = None, **changes: Any) -> "Running":
        self.lives += 1
        settings = {**self.settings, **changes, "out": str(self.out)}
        hooks = {**(hooks or {}), "trace": str(self.folder / "trace"), "life": self.lives}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        env = {
            **os.environ, **self.peer.environment, "TRIAL": json.dumps(settings), "TRIAL_HOOKS": json.dumps(hooks),
            "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        return Running(self, env)

    def life(self, hooks: dict[str, Any] | None = None, **changes: Any) -> Life:
        return self.start(hooks, **changes).wait()

    def straight(self, **changes: Any) -> "Trial":
        """An undisturbed run with the same settings; its life is `only`."""
        other = Trial(self.peer, self.folder.with_name("straight"), **{**self.settings, **changes})
        other.only = other.life()
        if other.only.code:
            raise Invalid(f"an undisturbed run ended with {other.only.code}: {other.only.last_line}")
        other.final()  # what comes after in this folder may replace it
        return other

    only: Life

    @property
    def updates(self) -> int:
        return int(self.settings["epochs"] * self.settings["images"] // self.settings["batch"] // self.settings["accumulate"])

    def trace(self, life: int | None = None) -> list[dict[str, Any]]:
        path = self.folder / "trace"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [line for line in lines if life in (None, line["life"])]

    def _read_final(self) -> None:
        if self.peer.script in ("on_stagerun.py", "on_timm.py") and self.out.exists():
            environment = {**os.environ, "TRIAL": json.dumps({**self.settings, "out": str(self.out)})}
            subprocess.run([self.peer.python, HERE / self.peer.script, "final"], env=environment, capture_output=True)

    def final(self) -> dict[str, np.ndarray]:
        """The last weights; empty where there are none."""
        path = self.out.with_suffix(".npz")
        if not path.exists():
            self._read_final()
        return dict(np.load(path)) if path.exists() else {}

    def facts(self) -> dict[str, Any]:
        self.final()
        path = self.out.with_suffix(".json")
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def checkpoints(self) -> list[Path]:
        """Files of checkpoints, oldest first: everything in the folder but logs and small notes."""
        files = [p for p in self.out.rglob("*") if p.is_file() and p.stat().st_size > 2000]
        files = [p for p in files if p.suffix not in (".jsonl", ".csv", ".log", ".yaml", ".txt")]
        return sorted(files, key=lambda p: (p.stat().st_mtime, p.stat().st_size))

    def damage(self, part: float) -> Path:
        """Cut the largest of the files that were written last."""
        files = self.checkpoints()
        newest = files[-1].stat().st_mtime
        chosen = max((p for p in files if newest - p.stat().st_mtime < 0.02), key=lambda p: (p.stat().st_size, p.stat().st_mtime))
        content = chosen.read_bytes()
        chosen.unlink()  # another name of the same file keeps its content
        chosen.write_bytes(content[: int(len(content) * part)])
        return chosen


class Running:
    """A life that has begun."""

    def __init__(self, trial: Trial, env: dict[str, str]) -> None:
        self.trial, self.number, self.log = trial, trial.lives, trial.folder / f"life{trial.lives}.log"
        self.before = self._stagerun_rates()
        for suffix in (".npz", ".json"):
            trial.out.with_suffix(suffix).unlink(missing_ok=True)
        command = [trial.peer.python, HERE / trial.peer.script]
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                command, env=env, cwd=trial.folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )

    def _stagerun_rates(self) -> list[float]:
        log = self.trial.out / "log.jsonl"
        if self.trial.peer.script != "on_stagerun.py" or not log.exists():
            return []
        lines = [line for line in log.read_text(errors="replace").splitlines() if '"Iterated"' in line and line.endswith("}")]
        return [json.loads(line)["lr"] for line in lines]

    def updates(self) -> int:
        return len([line for line in self.trial.trace(self.number) if "ids" in line])

    def until(self, ready: Any) -> None:
        end = time.monotonic() + HANGS_S
        while not ready() and self.process.poll() is None and time.monotonic() < end:
            time.sleep(0.0005)

    def wait(self) -> Life:
        try:
            code = self.process.wait(HANGS_S)
        except subprocess.TimeoutExpired:
            code = 124
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # what it left, so that nothing of it meets the next life
        trace = self.trial.trace(self.number)
        rates = [line["lr"] for line in trace if "lr" in line] or self._stagerun_rates()[len(self.before) :]
        text = self.log.read_text(errors="replace")
        return Life(code, text, rates, [line["ids"] for line in trace if "ids" in line])
