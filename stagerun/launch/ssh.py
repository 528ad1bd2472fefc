"""How a command is started on another host, and why it did not start."""

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from stagerun.launch.bundle import BAD_STREAM, CANT_WRITE, Bundle
from stagerun.launch.hostfile import Host
from stagerun.system.host import host_name
from stagerun.system.process import program

CONNECT_S = 10
# What another's configuration may say of these is overruled but by `--ssh "ssh -o ..."`: of two the first counts.
_OPTIONS = {
    "BatchMode": "yes",
    "ConnectTimeout": str(CONNECT_S),
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "3",
    # A connection that is shared with others goes on when its host is back under another one's feet, or fails with it.
    "ControlMaster": "no",
    "ControlPath": "none",
    "ClearAllForwardings": "yes",
}
# Of the shell that is to become the agent, where it can't.
_NO_FOLDER, _NO_PYTHON = 200, 201
_SSH_FAILED = 255
# Variables by which the environment changes what a worker does; no secrets among them.
_PASSED = ("OMP_", "MKL_", "ONEDNN_", "DNNL_", "STAGERUN_", "NCCL_", "GLOO_", "TORCH_")
_PASSED_WHOLE = ("CUDA_VISIBLE_DEVICES", "KMP_AFFINITY", "KMP_BLOCKTIME")
_NOT_PASSED = ("STAGERUN_REPORT_DIR", "STAGERUN_LAUNCHER_PID", "TORCHELASTIC_RUN_ID")


@dataclass(frozen=True, slots=True)
class Way:
    """`python`: the interpreter on each host. `folder`: where it is started; with a `bundle` its folder, into which it is copied first."""

    ssh: tuple[str, ...] = ("ssh",)
    python: str = sys.executable
    folder: str = ""
    bundle: Bundle | None = None

    def start(self, host: Host, words: Sequence[str]) -> list[str]:
        """The command that runs a shell's words on a host: by ssh, if it isn't this one."""
        script = " ".join(words)
        if is_here(host):
            return ["/bin/sh", "-c", script]
        options = [word for name, value in _OPTIONS.items() for word in ("-o", f"{name}={value}")]
        return [
            *self.ssh,
            "-T",
            *options,
            host.name.replace("[", "").replace("]", ""),
            f"exec /bin/sh -c {shlex.quote(script)}",
        ]

    def agent(self, host: Host) -> list[str]:
        """The command that becomes a host's agent. It reads the bundle first."""
        python, module = shlex.quote(self.python), shlex.join(program("stagerun", any_version=True))
        words = [f"command -v {python} >/dev/null || exit {_NO_PYTHON};"]
        folder, path = shlex.quote(self.folder), ""
        if self.bundle is not None:
            words.append(f"{self.bundle.unpack(python)} || exit;")
            folder = self.bundle.place
            path = f"PYTHONPATH={folder}/{self.bundle.code}${{PYTHONPATH:+:$PYTHONPATH}} " if self.bundle.code else ""
        words += [f"cd {folder} 2>/dev/null || exit {_NO_FOLDER};", f"{path}exec {python} {module} agent"]
        return self.start(host, words)

    def to(self, host: Host) -> str:
        """How a person gets there."""
        return shlex.join([*self.ssh, host.name])

    def why(self, host: Host, code: int | None, said: Sequence[str]) -> tuple[str, str]:
        """Why a host has no agent, and a hint. `code`: the exit code of the command; None: it has not ended. `said`: the last
        lines of its stderr."""
        last = said[-1] if said else ""
        ssh = self.to(host)
        if code is None:
            return f"{host.name} does not answer", f"`{ssh} true` must come back, without a question"
        if code == _NO_FOLDER:
            return (
                f"{host.name} has no folder {self.folder}",
                f"mount it there, or let `--sync` copy the schedule; `{ssh} ls {shlex.quote(self.folder)}`",
            )
        if code == _NO_PYTHON:
            return (
                f"{host.name} has no {self.python}",
                f"install it there, or name another with --remote-python; `{ssh} ls {shlex.quote(self.python)}`",
            )
        if code in (BAD_STREAM, CANT_WRITE):
            return f"{host.name}: the schedule can't be copied there: {last}", "name another folder, `--sync FOLDER`"
        if "No module named stagerun" in last or "No module named 'stagerun'" in last:
            return (
                f"{host.name}: {self.python} has no stagerun",
                "install it there, or let `--sync --sync-code` copy it",
            )
        if code == _SSH_FAILED and not is_here(host):
            return (
                f"{host.name} can't be reached: {last or 'ssh does not say why'}",
                f"`{ssh} true` must work without a password or a question{_or_a_file(host)}",
            )
        return f"{host.name}: the agent ended with exit code {code}: {last or 'no more is known'}", ""


def _or_a_file(host: Host) -> str:
    """`--hosts hosts`, where the file isn't there, is a list of one host."""
    alone = host.span is not None and host.span.path == "--hosts" and "," not in host.source
    return f"; if a file was meant: this folder has no `{host.source}`" if alone else ""


def is_here(host: Host) -> bool:
    """Whether that is plainly this very host; then no ssh is needed."""
    own = host_name()
    return host.name in ("localhost", own, own.partition(".")[0])


def passed_on() -> dict[str, str]:
    """What the workers on other hosts get, too, of this process's environment."""
    return {
        name: value
        for name, value in os.environ.items()
        if (name.startswith(_PASSED) or name in _PASSED_WHOLE) and name not in _NOT_PASSED
    }
