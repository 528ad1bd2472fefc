"""Hostile snapshots, most of them with manifests that fit, loaded in every way that stagerun has, in processes with an audit hook:
nothing is unpickled, executed or started, no file outside is read or changed, no memory exhausted, and no command ends in a bug.

The snapshots are those of `reliability.forging`. For one such process: python -m reliability.hostile FOLDER SEED COUNT, where FOLDER is
that of a `flips.Half`. See PEP 578 and `sys.addaudithook`.
"""

import contextlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from contract import stagerun
from facade import Context, Keeper, StageRun, StagerunError, World, most_bytes, restored
from reliability import forging
from reliability.flips import Half
from reliability.fuzz import ENVIRONMENT
from reliability.trial import Trial

from stagerun.comm import SoloComm
from stagerun.language import load as load_schedule

PER_TRIAL = 12
NEVER = {
    "pickle.find_class", "os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty",
    "ctypes.dlopen", "socket.connect", "socket.bind", "code.__new__", "shutil.unpack_archive", "urllib.Request",
}  # fmt: skip
CHANGES = {
    f"os.{name}" for name in ("rename", "remove", "mkdir", "rmdir", "link", "symlink", "chmod", "chown", "truncate")
}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
MOST_MEMORY = 600_000_000  # more than before, at any time
# Words of a command that loads the snapshot; those that name it by its path mean where a link in its place leads.
WAYS = (
    ["status", "{out}"], ["status", "{dir}", "--out", "{out}"], ["report", "{out}"], ["plan", "{dir}", "--out", "{out}"],
    ["diff", "{dir}", "{out}"], ["status", "--snapshots", "{out}"], ["status", "--snapshots", "{out}", "--verify"],
    ["diff", "{dir}", "{snapshot}"], ["eval", "{snapshot}", "--threads", "1"],
    ["export", "{snapshot}", "--force", "{out}/exported.safetensors"],
)  # fmt: skip


class Watch:
    """The hook. It notes what must not be while `on`: files are written below `work` and the temporary folder alone."""

    def __init__(self, work: Path, outside: Path) -> None:
        self.writable = (f"{work}{os.sep}", os.path.realpath(os.environ["TMPDIR"]) + os.sep)
        self.outside, self.on, self.seen = f"{outside}{os.sep}", False, list[str]()
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        self.on = False  # what is looked up here is not watched
        try:
            if event in NEVER:
                self.seen.append(f"{event} {arguments!r}"[:300])
            elif event == "open" and isinstance(arguments[0], str | bytes):
                self._open(os.fsdecode(arguments[0]), arguments[1], arguments[2])
            elif event in CHANGES:
                self.seen += [f"{event} of {path!r}" for path in arguments[:2] if self._foreign(path)]
        finally:
            self.on = True

    def _open(self, name: str, mode: object, flags: object) -> None:
        flags = flags if isinstance(flags, int) else 0
        real = _itself(name) if flags & os.O_NOFOLLOW else os.path.realpath(name)
        writing = bool(flags & WRITES) or any(c in str(mode or "") for c in "wax+")
        if os.sep not in name and not writing:
            return  # in a folder that is open, and that was looked at
        if (real + os.sep).startswith(self.outside) or real == "/dev/zero":
            self.seen.append(f"open {name}")
        if writing and not (real + os.sep).startswith(self.writable) and real != os.devnull:
            self.seen.append(f"open {name} for writing")

    def _foreign(self, path: object) -> bool:
        return isinstance(path, str | bytes) and not (_itself(os.fsdecode(path)) + os.sep).startswith(self.writable)


def _itself(path: str) -> str:
    """Where a thing really is, be it a link: not what it is a link to."""
    name = os.path.abspath(path)
    return os.path.join(os.path.realpath(os.path.dirname(name)), os.path.basename(name))


def memory() -> int:
    """The most that this process ever had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resumed(schedule: Path, out: Path) -> None:
    """As rank 0 does before it trains. What a snapshot holds may be refused."""
    keeper = Keeper(load_schedule(str(schedule)), out)
    most = most_bytes(keeper.schedule.model)
    with contextlib.suppress(StagerunError):
        while True:
            planned = keeper.plan().next
            assert planned is not None
            files = keeper.read(planned.start, most) if planned.start is not None else None
            if planned.start is None or files is not None:
                break
        context = Context(keeper.schedule, str(out), SoloComm(), World(), torch.device("cpu"), keeper, lambda: False)
        restored(StageRun(context, planned, files=files))


def tried(base: Path, watch: Watch, name: str, rng: random.Random, signed: bool = True) -> list[str]:
    """What is wrong with how one hostile snapshot is loaded, in every way."""
    work, outside = base / "work", base / "outside"
    for folder in (work, outside):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    out, before, wrong = work / "out", memory(), list[str]()
    shutil.copytree(base / "out", out, symlinks=True)
    (snapshot,) = (out / "snapshots").glob("cyc1-00000004-*")
    forging.forge(name, snapshot, outside, rng, signed)
    watch.on = True
    resumed(base / "schedule", out)
    watch.on = False
    for words in WAYS:
        # Of 100 GB all is read, in little memory, and takes a minute.
        if (snapshot.is_symlink() and "{snapshot}" in words) or (name == "a file of 100 GB" and "--verify" in words):
            continue
        places, elsewhere = {"out": out, "dir": base / "schedule", "snapshot": snapshot}, base / "elsewhere"
        watch.on = True
        result = stagerun([word.format(**places) for word in words], elsewhere)
        watch.on = False
        if result.exit_code not in (0, 64, 65, 78) or "Traceback" in result.output:
            wrong.append(f"{name}, {words[0]}: {result.exit_code}: {result.output[-2000:]}")
    if memory() - before > MOST_MEMORY:
        wrong.append(f"{name}: {(memory() - before) / 1e6:.0f} MB more memory")
    if os.path.exists(forging.MARK) or (out / forging.MARK).exists():
        wrong.append(f"{name}: code was executed")
    return wrong


def child(base: Path, rng: random.Random, count: int) -> None:
    """Prints what is wrong, and the events; each kind of snapshot once where there are as many tries as kinds."""
    (base / "elsewhere").mkdir(exist_ok=True)
    os.chdir(base / "elsewhere")  # where a pickle would leave its mark
    watch, names = Watch(base / "work", base / "outside"), list(forging.ATTACKS)
    # Every way once, with a good snapshot and with a bad one, so that all that is imported is.
    forging.ATTACKS["nothing"] = lambda forged: None
    first = ("nothing", "a state that is none")
    wrong, told = [text for name in first for text in tried(base, watch, name, random.Random(1))], list[str]()
    watch.seen.clear()
    before = memory()
    for number in range(count):
        name = names[number] if count == len(names) else rng.choice(names)
        wrong += tried(base, watch, name, rng, rng.random() < 0.8)
        told.append(name)
    print(json.dumps({"wrong": wrong, "events": watch.seen, "tried": told, "memory": memory() - before}))


def load(folder: Path, seed: int, count: int) -> dict[str, Any]:
    """What a process of its own found."""
    # None of the environment of a run may reach the commands, and no second thread may write where the hook looks. TORCHINDUCTOR: torch makes
    # it where a network is compiled; and once it has looked for it, it names it in the environment of what it starts.
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    environment = ENVIRONMENT | {"TMPDIR": f"{temporary}", "TORCHINDUCTOR_CACHE_DIR": f"{temporary}/torchinductor"}
    words = [sys.executable, "-m", "reliability.hostile", str(folder), str(seed), str(count)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=1200)
    if done.returncode != 0:
        wrong = [f"ended with {done.returncode}: {done.stderr[-1500:]}"]
        return {"wrong": wrong, "events": [], "tried": [], "memory": 0}
    return json.loads(done.stdout.splitlines()[-1])


def trials(rng: random.Random, folder: Path) -> Iterator[Trial]:
    Half(folder)
    while True:
        seed = rng.randrange(2**31)
        found = load(folder, seed, PER_TRIAL)
        wrong = "; ".join([*found["wrong"][:3], *found["events"][:3]])
        counts = {
            "snapshots loaded, each in every way that there is for it": PER_TRIAL,
            "events of unpickling, executing, starting, or outside": len(found["events"]),
        }
        largest = {"MB of memory more than before": round(found["memory"] / 1e6, 1)}
        again = f"python -m reliability.hostile {folder} {seed} {PER_TRIAL}: {wrong}" if wrong else ""
        yield Trial(PER_TRIAL, counts, largest, again)


if __name__ == "__main__":
    child(Path(sys.argv[1]), random.Random(int(sys.argv[2])), int(sys.argv[3]))
