"""`stagerun` in a process of its own, without the seconds in which a fresh interpreter imports torch.

This file is a program, too: an interpreter that has imported everything and has computed nothing (a fork of torch's threads would hang). For each
request it forks a child, which is then `python -m stagerun ARGUMENTS`: own session, folder, environment and streams. One interpreter serves
all tests of a pytest process, and ends with it.
"""

import atexit
import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
FAULTS = ROOT / "tests" / "reliability" / "faults.py"


def run(
    arguments: list[str], *, cwd: str | os.PathLike[str] | None, env: Mapping[str, str], fault: str, timeout: float
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` of `python -m stagerun` with `capture_output`; TimeoutExpired after `timeout` seconds. With another PYTHONPATH than
    ours it is a fresh interpreter: plug-ins are looked for when modules are imported."""
    if env.get("PYTHONPATH") != os.environ.get("PYTHONPATH"):
        program = [str(FAULTS), fault] if fault else ["-m", "stagerun"]
        command = [sys.executable, *program, *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, timeout=timeout)
    asked = {"arguments": arguments, "cwd": os.fspath(cwd or Path.cwd()), "env": dict(env), "fault": fault}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        code = _interpreter().ask(asked, (out.fileno(), err.fileno()), timeout)
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read())
    return subprocess.CompletedProcess(["stagerun", *arguments], code, *texts)


class _Interpreter:
    def __init__(self) -> None:
        self._here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(there.fileno())],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            pass_fds=[there.fileno()],
            start_new_session=True,
        )
        there.close()
        atexit.register(self._end)

    def _end(self) -> None:
        self._here.close()
        self._process.wait(timeout=10)

    def ask(self, asked: dict[str, object], streams: tuple[int, int], timeout: float) -> int:
        with tempfile.TemporaryFile() as text:
            text.write(json.dumps(asked).encode())
            text.flush()
            socket.send_fds(self._here, [b"run"], [text.fileno(), *streams])
        self._here.settimeout(60)
        pid = int(self._here.recv(32))
        self._here.settimeout(timeout)
        try:
            return int(self._here.recv(32))
        except TimeoutError:
            os.killpg(pid, signal.SIGKILL)
            self._here.settimeout(60)
            self._here.recv(32)
            raise subprocess.TimeoutExpired(str(asked["arguments"]), timeout) from None


@functools.cache
def _interpreter() -> _Interpreter:
    return _Interpreter()


def _serve(here: socket.socket) -> dict[str, object]:
    """What a child is asked to do; the server itself never returns."""
    here.settimeout(None)  # a default time-out of the process that made it would have it answer at once
    while True:
        word, fds, _, _ = socket.recv_fds(here, 32, 3)
        if not word:  # pytest has ended
            os._exit(0)
        with open(fds[0], "rb") as text:
            text.seek(0)
            asked = json.load(text)
        pid = os.fork()
        if not pid:
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(fds[1], 1)
            os.dup2(fds[2], 2)
            os.closerange(3, 1024)
            return asked
        for fd in fds[1:]:
            os.close(fd)
        here.send(str(pid).encode())
        here.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


def _become(asked: dict) -> None:
    import runpy

    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    tempfile.tempdir = None
    sys.path[0] = asked["cwd"]
    if asked["fault"]:
        sys.argv = [str(FAULTS), asked["fault"], *asked["arguments"]]
        runpy.run_path(str(FAULTS), run_name="__main__")
    else:
        sys.argv = ["stagerun", *asked["arguments"]]
        runpy.run_module("stagerun", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    import gc
    import importlib
    import pkgutil

    import stagerun

    # Extras that few commands use, and what is no module of the command.
    without = (
        "gallery",
        "launch.torchx",
        "__main__",
        "models.torchvision",
        "tools.lsp",
    )
    for module in pkgutil.walk_packages(stagerun.__path__, "stagerun."):
        if not module.name.startswith(tuple(f"stagerun.{name}" for name in without)):
            with contextlib.suppress(ImportError):  # an extra that is not installed
                importlib.import_module(module.name)
    gc.freeze()
    _become(_serve(socket.socket(fileno=int(sys.argv[1]))))
