"""Loads hostile snapshots in every way that stagerun has, under an audit hook, in a process of its own:

    python -m reliability.loading FOLDER SEED COUNT [ATTACK]

FOLDER is that of a `flips.Half`. Prints a JSON object. What the hook may see: files below FOLDER read, files below FOLDER/work and its
temporary folder written, modules of this installation imported, nothing else. See PEP 578 and `sys.addaudithook`.
"""

import contextlib
import json
import os
import random
import resource
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from click.testing import CliRunner
from reliability import forging

import stagerun
from stagerun.base import recipe
from stagerun.base.errors import StagerunError
from stagerun.cli import main as command
from stagerun.comm import SoloComm
from stagerun.language import load
from stagerun.system.world import World
from stagerun.train.keeper import Keeper
from stagerun.train.stage_start import restored
from stagerun.train.stored import most_bytes, require_buildable
from stagerun.train.worker import StageRun, Step, Worker

NEVER = {
    "pickle.find_class", "os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty",
    "os.startfile", "ctypes.dlopen", "socket.connect", "socket.bind", "webbrowser.open", "code.__new__", "builtins.input",
    "shutil.move", "shutil.unpack_archive", "sys.setprofile", "sys.settrace", "urllib.Request", "ftplib.connect",
}  # fmt: skip
CHANGES = {
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.link",
    "os.symlink",
    "os.chmod",
    "os.chown",
    "os.truncate",
}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
INSTALLED = tuple(
    os.path.realpath(path) + os.sep
    for path in (sys.prefix, sys.base_prefix, Path(stagerun.__file__).parent, Path(__file__).parents[1])
)
MOST_MEMORY = 600_000_000  # more than before, at any time


class Watch:
    """The hook. It notes while `on`; `strict` from when all modules are imported."""

    def __init__(self, work: Path, outside: Path) -> None:
        self.writable = (str(work) + os.sep, os.path.realpath(os.environ["TMPDIR"]) + os.sep)
        self.outside = str(outside) + os.sep
        self.on = self.strict = False
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        self.on = False  # what is looked up here is not watched
        try:
            if event in NEVER:
                self.seen.append(f"{event} {arguments!r}"[:300])
            elif event == "exec":
                self._code(event, getattr(arguments[0], "co_filename", "?"))
            elif event == "compile":
                self._code(event, arguments[1])
            elif event == "open":
                self._open(*arguments)
            elif event in CHANGES:
                self._change(event, arguments)
        finally:
            self.on = True

    def _code(self, event: str, file: object) -> None:
        name = os.fsdecode(file) if isinstance(file, (str, bytes)) else str(file)
        if self.strict and not os.path.realpath(name).startswith(INSTALLED) and not name.startswith("<frozen"):
            self.seen.append(f"{event} of {name}")

    def _open(self, path: object, mode: object, flags: object) -> None:
        if not isinstance(path, (str, bytes)):
            return  # a descriptor
        name = os.fsdecode(path)
        real = _itself(name) if isinstance(flags, int) and flags & os.O_NOFOLLOW else os.path.realpath(name)
        writing = bool(isinstance(flags, int) and flags & WRITES) or any(c in str(mode or "") for c in "wax+")
        if os.sep not in name and not writing:
            return  # in a folder that is open, and that was looked at
        if (real + os.sep).startswith(self.outside) or real == "/dev/zero":
            self.seen.append(f"open {name}")
        if writing and not (real + os.sep).startswith(self.writable) and real != os.devnull:
            self.seen.append(f"open {name} for writing")

    def _change(self, event: str, arguments: tuple[Any, ...]) -> None:
        for path in arguments[:2]:
            named = isinstance(path, (str, bytes))
            if named and not (_itself(os.fsdecode(path)) + os.sep).startswith(self.writable):
                self.seen.append(f"{event} of {path!r}")


def _itself(path: str) -> str:
    """Where a thing really is, be it a link: not what it is a link to."""
    name = os.path.abspath(path)
    return os.path.join(os.path.realpath(os.path.dirname(name)), os.path.basename(name))


def memory() -> int:
    """The most that this process ever had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def ways(schedule: str, out: Path, snapshot: Path) -> dict[str, Callable[[], int]]:
    """By name, what loads the snapshot; each gives an exit code."""

    def told(*words: object) -> Callable[[], int]:
        def do() -> int:
            result = CliRunner().invoke(command, [str(word) for word in words], prog_name="stagerun")
            if result.exit_code == 70 or "Traceback" in result.output:
                raise AssertionError(f"{words}: {result.output[-2000:]}")
            return result.exit_code

        return do

    def resume() -> int:
        """As rank 0 does before it trains."""
        keeper = Keeper(load(schedule), out)
        most = most_bytes(keeper.schedule.model)
        try:
            while True:
                planned = keeper.plan().next
                assert planned is not None
                files = keeper.read(planned.start, most) if planned.start is not None else None
                if planned.start is None or files is not None:
                    break
            cpu, images = torch.device("cpu"), cast(Any, None)
            worker = Worker(keeper.schedule, str(out), SoloComm(), World(), cpu, keeper, lambda: False, images)
            restored(StageRun(worker, Step(planned, number=1, iterations_left=0, files=files)))
        except StagerunError as error:
            return int(error.exit_code)
        return 0

    return {
        "status": told("status", out),
        "status with the schedule": told("status", schedule, "--out", out),
        "report": told("report", out),
        "plan": told("plan", schedule, "--out", out),
        "diff": told("diff", schedule, out),
        "diff of the snapshot": told("diff", schedule, snapshot),
        "snapshots": told("status", "--snapshots", out),
        "export": told("export", snapshot, "--safetensors", "--force", "--output", out.parent / "exported"),
        "eval": told("eval", snapshot, "--threads", 1),
        "resume": resume,
    }


BY_PATH = ("diff of the snapshot", "export", "eval")


def verify(out: Path) -> int:
    return CliRunner().invoke(command, ["status", "--snapshots", str(out), "--verify"], prog_name="stagerun").exit_code


@contextlib.contextmanager
def fresh(base: Path) -> Iterator[tuple[Path, Path]]:
    """(output folder, folder of what is not to be read), as they were."""
    work, outside = base / "work", base / "outside"
    for folder in (work, outside):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    shutil.copytree(base / "out", work / "out", symlinks=True)
    yield work / "out", outside


def load_all(base: Path, watch: Watch, name: str, rng: random.Random, signed: bool, found: dict[str, Any]) -> None:
    """One hostile snapshot, in every way."""
    with fresh(base) as (out, outside):
        (snapshot,) = (out / "snapshots").glob("cyc1-00000004-*")
        state = rng.getstate()
        forging.forge(name, snapshot, outside, rng, signed)
        todo = ways(str(base / "schedule"), out, snapshot)
        if name != "a file of 100 GB":  # that much is read, in little memory, and takes a minute
            todo = {"verify": lambda: verify(out), **todo}
        if snapshot.is_symlink():  # whoever names it by its path means where that leads
            todo = {way: do for way, do in todo.items() if way not in BY_PATH}
        before, codes = memory(), {}
        for way, do in todo.items():
            begun = time.monotonic()
            watch.on = True
            try:
                codes[way] = do()
            except BaseException as error:
                found["wrong"].append(
                    f"{name} ({'signed' if signed else 'not signed'}), {way}: {error!r} {state[1][:3]}"
                )
            finally:
                watch.on = False
            found["seconds"] = max(found["seconds"], time.monotonic() - begun)
        found["memory"] = max(found["memory"], memory() - before)
        if memory() - before > MOST_MEMORY:
            found["wrong"].append(f"{name}: {(memory() - before) / 1e6:.0f} MB more memory")
        found["codes"].update(f"{way}: {code}" for way, code in codes.items())
        if not set(codes.values()) <= {0, 64, 65, 78}:
            found["wrong"].append(f"{name}: exit codes {codes}")
        if os.path.exists(forging.MARK) or (out / forging.MARK).exists():
            found["wrong"].append(f"{name}: code was executed")


def main(folder: str, seed: str, count: str, attack: str = "") -> None:
    base, rng = Path(folder), random.Random(int(seed))
    (base / "elsewhere").mkdir(exist_ok=True)
    os.chdir(base / "elsewhere")
    watch = Watch(base / "work", base / "outside")
    found: dict[str, Any] = {"wrong": [], "codes": Counter(), "memory": 0, "seconds": 0.0, "tried": Counter()}
    nothing: dict[str, Any] = {"wrong": [], "codes": Counter(), "memory": 0, "seconds": 0.0}
    # Every way once, with a good snapshot and with a bad one, so that all that is imported is.
    forging.ATTACKS["nothing"] = lambda forged: None
    for name in ("nothing", "strange values in the manifest", "a state that is none"):
        load_all(base, watch, name, random.Random(1), True, nothing)
    # A recipe may name a network of torchvision's.
    with contextlib.suppress(StagerunError):
        require_buildable("", recipe.Model(name="regnet_x_400mf", num_classes=2))
    found["wrong"] += nothing["wrong"]
    good = nothing["codes"]
    watch.strict = True
    names = [name for name in forging.ATTACKS if name != "nothing"]
    for number in range(int(count)):
        name = attack or (names[number] if int(count) == len(names) else rng.choice(names))
        load_all(base, watch, name, rng, rng.random() < 0.8, found)
        found["tried"][name] += 1
    print(json.dumps({**found, "events": watch.seen, "good": good}))


if __name__ == "__main__":
    main(*sys.argv[1:])
