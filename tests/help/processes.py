"""Starting `stagerun run` as a user does, killing parts of it, and looking at what is left."""

import contextlib
import hashlib
import ipaddress
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MARK = "STAGERUN_TEST_RUN"


@dataclass
class Run:
    """One `stagerun run` in a process of its own. All processes it starts are found by a mark in their environment."""

    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def start(self, within: Sequence[str] = ()) -> "Run":
        """`within`: words before the command, which becomes the process that they start."""
        env = {**os.environ, "OMP_NUM_THREADS": "1", **self.environment, MARK: self.mark}
        self.process = subprocess.Popen(
            [*within, sys.executable, "-m", "stagerun", *self.arguments],
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

    def ranks(self) -> dict[int, int]:
        """The living workers' process numbers, by rank: the launcher's children, or the process itself where it is the only
        worker. None before they are started."""
        own = self.process.pid
        found = {}
        for pid in self.pids():
            try:
                environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            rank = next((int(e.removeprefix(b"RANK=")) for e in environ if e.startswith(b"RANK=")), None)
            if rank is not None and parent == own and not is_monitor(pid):
                found[rank] = pid
        return found or ({0: own} if "--nproc 1 " in " ".join(self.arguments) + " " else {})

    def wait(self, timeout: float = 300) -> tuple[int, str]:
        out, _ = self.process.communicate(timeout=timeout)
        return self.process.returncode, out

    def gone(self, within: float = 60.0) -> bool:
        """Whether no process of this run is left."""
        end = time.monotonic() + within
        while self.pids():
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        return True


class Spoken:
    """A command whose lines are read as they come, each with its time. `run`: what has started it, with a `process`."""

    def __init__(self, run: Any) -> None:
        self.run, self.lines = run, list[tuple[float, str]]()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for text in self.run.process.stdout:
            self.lines.append((time.monotonic(), text))

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.lines)

    def told(self, *words: str) -> tuple[float, str] | None:
        """The first line with any of them, and when it came."""
        return next(((at, line) for at, line in self.lines if any(one in line for one in words)), None)

    def ended(self, timeout: float = 60) -> int:
        code = self.run.process.wait(timeout)
        self._reader.join(timeout)
        self.run.process.stdout.close()
        return int(code)


def free_port() -> int:
    """For a meeting on this host. Below those that the kernel gives to whoever asks for none: meanwhile no one gets it by chance."""
    least = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(10_000, max(least, 20_000))
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def is_monitor(pid: int) -> bool:
    """Whether it only watches a worker, and dies with it."""
    with contextlib.suppress(OSError):
        return b"stagerun.launch.monitor" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def listening(pids: Iterable[int]) -> set[tuple[str, int]]:
    """The addresses and ports at which these processes listen, each in its own network."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            held = set()
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    held.add(os.readlink(f"/proc/{pid}/fd/{name}"))
            for table in ("tcp", "tcp6"):
                for row in map(str.split, Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]):
                    if row[3] == "0A" and f"socket:[{row[9]}]" in held:
                        digits, _, port = row[1].partition(":")
                        words = bytes.fromhex(digits)
                        address = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
                        found.add((str(ipaddress.ip_address(address)), int(port, 16)))
    return found


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
    return {name.rsplit("-", 1)[0]: digest for name, digest in sorted(content(out).items())}


def kill_all(pids: list[int]) -> bool:
    """SIGKILL. Whether any of them was still there."""
    killed = False
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed = True
    return killed


def events(out: Path, name: str) -> list[dict[str, Any]]:
    """Those of the log that have this name, but for a line that is being written."""
    log = out / "log.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    return [json.loads(line) for line in lines if f'"event": "{name}"' in line and line.endswith("}")]


def until(run: Run, found: Callable[[], object], timeout: float = 300) -> None:
    end = time.monotonic() + timeout
    while not found():
        assert run.process.poll() is None, run.wait()
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)
