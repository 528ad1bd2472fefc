"""Starting `stagerun run` as a user does, killing parts of it, and looking at what is left."""

import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

MARK = "STAGERUN_TEST_RUN"


@dataclass
class Run:
    """One `stagerun run` in a process of its own. All processes it starts are found by a mark in their environment."""

    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def start(self) -> "Run":
        env = {**os.environ, "OMP_NUM_THREADS": "1", **self.environment, MARK: self.mark}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "stagerun", *self.arguments],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        return self

    def pids(self) -> list[int]:
        """Every living process of this run."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    marked = f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes()
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                except OSError:
                    continue
                if marked and state != "Z":
                    found.append(int(entry.name))
        return sorted(found)

    def workers(self) -> list[int]:
        """The launcher's children, or the process itself where it is the only worker."""
        own = self.process.pid
        return [pid for pid in self.pids() if pid != own] or [own]

    def wait(self, timeout: float = 300) -> tuple[int, str]:
        out, _ = self.process.communicate(timeout=timeout)
        return self.process.returncode, out

    def gone(self, within: float = 5.0) -> bool:
        """Whether no process of this run is left."""
        end = time.monotonic() + within
        while self.pids():
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        return True


def kill(run: Run, what: str, rng: random.Random) -> None:
    """SIGKILL to `one` worker, `all` processes, or the `launcher`."""
    targets = {"one": [rng.choice(run.workers())], "all": run.pids(), "launcher": [run.process.pid]}[what]
    for pid in targets:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def content(out: Path) -> dict[str, str]:
    """Digest of the tensors (weights, momentum, averaged weights) of every stage's last snapshot, by stage and iteration."""
    found = {}
    for folder in sorted((out / "snapshots").iterdir()):
        if not folder.name.startswith("."):
            digest = hashlib.sha256()
            for file in sorted(folder.glob("*.safetensors")):
                digest.update(file.name.encode() + file.read_bytes())
            stage, iter, _ = folder.name.rsplit("-", 2)
            found.setdefault(f"{stage}-{iter}", digest.hexdigest())
            assert found[f"{stage}-{iter}"] == digest.hexdigest(), f"two attempts at {stage}-{iter} differ"
    return found


def ends(out: Path) -> dict[str, str]:
    """`content` of the last snapshot of each stage."""
    last: dict[str, str] = {}
    for name, digest in sorted(content(out).items()):
        last[name.rsplit("-", 1)[0]] = digest
    return last
