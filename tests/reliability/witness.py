"""The second witness of `calls`: here it is the kernel that fails. Each trial commits a snapshot to a real folder that holds two, and drops
the oldest, in a process of its own under strace, which kills it at the n-th system call of some name (before the kernel sees it), or has that call,
or it and all after it, fail with ENOSPC or EIO. Lost: what was there cannot be read afterwards, or the next run's clearing away and
commit don't work.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from reliability.trial import Scenario, Trial

from stagerun import store
from stagerun.base.errors import StagerunError

# Those by which something on a disk is changed or looked at. Not every machine has all (aarch64 has no `mkdir`, `rename`, `open`).
CALLS = (
    "openat", "write", "pwrite64", "fsync", "fdatasync", "close", "mkdir", "mkdirat", "rename", "renameat", "renameat2",
    "unlink", "unlinkat", "rmdir", "getdents64", "read", "statfs", "fstatfs",
)  # fmt: skip
FAULTS = {
    "kill": "signal=KILL:when={n}",
    "ENOSPC": "error=ENOSPC:when={n}",
    "ENOSPC+": "error=ENOSPC:when={n}+",
    "EIO": "error=EIO:when={n}",
    "EIO+": "error=EIO:when={n}+",
}
FAILING = {
    "openat",
    "write",
    "fsync",
    "mkdir",
    "mkdirat",
    "rename",
    "renameat",
    "renameat2",
    "unlink",
    "unlinkat",
    "rmdir",
}
STORAGE, PATIENCE = 74, 60


def content(iter: int) -> dict[str, bytes]:
    return {"model.safetensors": b"%d " % iter * 100_000, "state.json": b"{%d}" % iter}


def commit(out: Path, iter: int, attempt: int = 1) -> None:
    store.commit(
        store.LocalDisk(),
        out,
        store.Metadata(place=store.Place("cyc1", iter, attempt), parent="", identity={}, environment={}),
        files=content(iter),
        content=("model.safetensors",),
    )


def work(out: Path) -> None:
    """What is done under strace. It stops itself first, to be traced from there on."""
    os.kill(os.getpid(), signal.SIGSTOP)
    try:
        commit(out, 3)
        store.drop(store.LocalDisk(), out, store.inventory(store.LocalDisk(), out).snapshots[0])
    except StagerunError:
        os._exit(STORAGE)
    os._exit(0)


def traced(out: Path, log: Path, *arguments: str) -> int:
    """How `work` ended under strace with these arguments: its exit code, or minus a signal."""
    script = f"import sys; sys.path[:0] = {sys.path!r}\nfrom reliability import witness\nwitness.work(witness.Path({str(out)!r}))"
    process = subprocess.Popen([sys.executable, "-c", script])
    try:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        command = ["strace", "-f", "-q", "-p", str(process.pid), "-o", str(log), *arguments]
        tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            wait_until_traced(process.pid, tracer)
            process.send_signal(signal.SIGCONT)
            code = process.wait(PATIENCE)
            tracer.wait(PATIENCE)
            return code
        finally:
            tracer.kill()
            tracer.communicate()
    finally:
        process.kill()
        process.wait()


def wait_until_traced(pid: int, tracer: "subprocess.Popen[str]") -> None:
    while tracer.poll() is None:
        if re.search(r"^TracerPid:\t[1-9]", Path(f"/proc/{pid}/status").read_text(), re.M):
            return
    raise RuntimeError(f"strace ended: {tracer.stderr.read() if tracer.stderr else ''}")


def needs() -> str:
    if shutil.which("strace") is None:
        return "strace"
    with tempfile.TemporaryDirectory() as folder:
        seen = subprocess.run(
            ["strace", "-o", f"{folder}/log", "-e", "trace=close", "-e", "inject=close:error=EIO:when=60000", "true"],
            capture_output=True,
        )
    return "" if seen.returncode == 0 else "the right to trace a process, and a strace that injects faults"


class Folders:
    def __init__(self, folder: Path) -> None:
        self.pristine, self.out, self.log = folder / "pristine", folder / "out", folder / "log"
        store.prepare(store.LocalDisk(), self.pristine)
        commit(self.pristine, 1)
        commit(self.pristine, 2)

    def fresh(self) -> None:
        shutil.rmtree(self.out, ignore_errors=True)
        shutil.copytree(self.pristine, self.out)

    def points(self) -> list[tuple[str, int, str]]:
        """(call, which of them, fault) for every call that the work makes when it is left alone."""
        self.fresh()
        names = [
            name
            for name in CALLS
            if subprocess.run(["strace", "-e", name, "true"], capture_output=True).returncode == 0
        ]
        code = traced(self.out, self.log, "-e", f"trace={','.join(names)}")
        assert code == 0, f"left alone it ended with {code}"
        made = Counter(re.findall(r"^\d+ +(\w+)\(", self.log.read_text(), re.M))
        return [
            (name, n, fault)
            for name, count in made.items()
            for n in range(1, count + 1)
            for fault in FAULTS
            if fault == "kill" or name in FAILING
        ]

    def trial(self, call: str, n: int, fault: str) -> Trial:
        self.fresh()
        injection = f"inject={call}:{FAULTS[fault].format(n=n)}"
        code = traced(self.out, self.log, "-e", f"trace={call}", "-e", injection)
        wrong = self.wrong(code, fault)
        log = self.log.read_text()
        if "(INJECTED)" not in log and "killed by SIGKILL" not in log:
            wrong = wrong or ("" if code == 0 else "not an end that it may have without a fault")
            return Trial(0, {"not reached": 1}, wrong=f"{fault} at {call} {n}: exit {code}: {wrong}" if wrong else "")
        words = Counter({"killed" if code < 0 else "ended with 74" if code else "went on": 1})
        if wrong:
            return Trial(1, words + Counter(["lost"]), wrong=f"{fault} at {call} {n}: exit {code}: {wrong}")
        return Trial(1, words)

    def wrong(self, code: int, fault: str) -> str:
        if code not in ((-signal.SIGKILL, 0) if fault == "kill" else (0, STORAGE)):
            return "not an end that it may have"
        try:
            iters = self.readable()
            if 2 not in iters or (code == 0 and 3 not in iters):
                return f"there is {iters}"
            store.sweep(store.LocalDisk(), self.out)
            commit(self.out, 4, attempt=2)
            left = self.readable()
        except StagerunError as error:
            return error.render()
        begun = [name for name in os.listdir(self.out / "snapshots") if name.startswith((".tmp-", ".trash-"))]
        return "" if left == [*iters, 4] and not begun else f"afterwards there is {left}, begun {begun}"

    def readable(self) -> list[int]:
        inventory = store.inventory(store.LocalDisk(), self.out)
        for ref in inventory.snapshots:
            if store.read(store.LocalDisk(), self.out, ref) != content(ref.iter):
                raise StagerunError(f"{ref.name} reads as something else")
        if inventory.damaged:
            raise StagerunError(f"{inventory.damaged} are damaged")
        return [ref.iter for ref in inventory.snapshots]


def trials(rng: random.Random, folder: Path) -> Iterator[Trial]:
    folders = Folders(folder)
    while True:
        points = folders.points()
        rng.shuffle(points)
        for point in points:
            yield folders.trial(*point)


SCENARIO = Scenario(
    name="witness",
    fault="the same, by strace in the kernel's place",
    aim="0 lost",
    wanted=100,
    trials=trials,
    needs=needs,
)
