"""One trial: lives of one trainer in one folder, and what they left."""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import zlib
from collections.abc import Callable
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
LOGS = (".jsonl", ".csv", ".log", ".yaml", ".txt")


class Invalid(Exception):
    """The trial shows nothing: its fault didn't happen, or an undisturbed run failed."""


@dataclass(frozen=True)
class Peer:
    """A trainer, an interpreter that has it, and by situation what its documentation doesn't offer."""

    name: str
    python: Path
    script: str
    lacks: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Life:
    code: int
    text: str
    rates: list[float]  # the learning rate of each update
    images: list[list[int]]  # the images of each batch, as checksums

    @property
    def error(self) -> str:
        lines = [line.strip() for line in self.text.splitlines() if line.strip()]
        return ([x for x in lines if "Error" in x.split(":")[0] or "error:" in x] or lines or ["no output"])[-1][:110]


class Trial:
    def __init__(self, peer: Peer, folder: Path, **settings: Any) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.peer, self.folder, self.out = peer, folder, folder / "out"
        self.settings: dict[str, Any] = {**DEFAULTS, **settings}
        self.lives = 0

    @property
    def updates(self) -> int:
        return int(self.settings["epochs"] * STEPS // self.settings["accumulate"])

    def start(self, hooks: dict[str, Any] | None = None, **changes: Any) -> None:
        self.lives += 1
        self.before = len(self._logged_rates())
        for suffix in (".npz", ".json"):
            self.out.with_suffix(suffix).unlink(missing_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        hooks = {**(hooks or {}), "trace": str(self.folder / "trace"), "life": self.lives}
        env |= {
            "TRIAL": self._text(**changes),
            "TRIAL_HOOKS": json.dumps(hooks),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        command = [self.peer.python, HERE / self.peer.script]
        with (self.folder / f"life{self.lives}.log").open("w") as out:
            self.process = subprocess.Popen(
                command, env=env, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )  # fmt: skip

    def until(self, ready: Callable[[], bool]) -> None:
        end = time.monotonic() + HANGS_S
        while not ready() and self.process.poll() is None and time.monotonic() < end:
            time.sleep(0.0005)

    def end(self, process: subprocess.Popen[bytes] | None = None, life: int = 0) -> Life:
        """Wait for the newest life, or another one."""
        process, life = process or self.process, life or self.lives
        code = 124
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(HANGS_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it left, so that nothing of it meets the next life
        trace = self.trace(life)
        rates = [line["lr"] for line in trace if "lr" in line] or self._logged_rates()[self.before :]
        text = (self.folder / f"life{life}.log").read_text(errors="replace")
        return Life(code, text, rates, [line["ids"] for line in trace if "ids" in line])

    def life(self, hooks: dict[str, Any] | None = None, **changes: Any) -> Life:
        self.start(hooks, **changes)
        return self.end()

    only: Life  # of an undisturbed run

    def straight(self, **changes: Any) -> "Trial":
        """An undisturbed run with the same settings."""
        settings = {**self.settings, **changes}
        folder = self.folder.parents[1] / f"straight-{zlib.crc32(json.dumps(settings).encode())}"
        if folder not in _STRAIGHT:
            other = Trial(self.peer, folder, **settings)
            other.only = other.life()
            if other.only.code:
                raise Invalid(f"an undisturbed run ended with {other.only.code}: {other.only.error}")
            _STRAIGHT[folder] = other
        return _STRAIGHT[folder]

    def _text(self, **changes: Any) -> str:
        return json.dumps({**self.settings, **changes, "out": str(self.out)})

    def _logged_rates(self) -> list[float]:
        log = self.out / "log.jsonl"  # only stagerun's
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        return [json.loads(line)["lr"] for line in lines if '"Iterated"' in line and line.endswith("}")]

    def trace(self, life: int) -> list[dict[str, Any]]:
        path = self.folder / "trace"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [line for line in lines if line["life"] == life]

    def final(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """The last weights, and other facts; empty where there are none."""
        path = self.out.with_suffix(".npz")
        if not path.exists() and self.peer.script in ("on_stagerun.py", "on_timm.py"):
            command = [self.peer.python, HERE / self.peer.script, "final"]
            subprocess.run(command, env={**os.environ, "TRIAL": self._text()}, capture_output=True)
        return (dict(np.load(path)), json.loads(path.with_suffix(".json").read_text())) if path.exists() else ({}, {})

    def files(self) -> dict[Path, os.stat_result]:
        """What is in the folder, apart from logs and signs of life, which change all the time."""
        found = {}
        for path in self.out.rglob("*"):
            with suppress(OSError):
                if path.is_file() and path.suffix not in LOGS and "lives" not in path.parts:
                    found[path] = path.stat()
        return found

    def damage(self, part: float) -> None:
        """Cut the largest of the files that were written last."""
        files = {path: stat for path, stat in self.files().items() if stat.st_size > 2000}
        newest = max(stat.st_mtime for stat in files.values())
        last = [(stat.st_size, stat.st_mtime, path) for path, stat in files.items() if newest - stat.st_mtime < 0.02]
        path = max(last)[2].resolve()  # not a link to it
        content = path.read_bytes()
        path.unlink()  # another name of the same file keeps its content
        path.write_bytes(content[: int(len(content) * part)])


_STRAIGHT: dict[Path, Trial] = {}  # several situations have the same undisturbed run
