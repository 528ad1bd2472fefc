"""How a command is started on another host, and why it did not start."""

import os
import shlex
import shutil
import sys
from dataclasses import dataclass

from stagerun.base.errors import UsageError
from stagerun.launch.hostfile import Host
from stagerun.launch.options import HostOptions
from stagerun.system.host import host_name
from stagerun.system.process import program

# What another's configuration may say of these is overruled but by `--ssh "ssh -o ..."`: of two the first counts. A connection that is
# shared with others goes on when its host is back under another one's feet, or fails with it.
_OPTIONS = (
    *("-oBatchMode=yes", "-oConnectTimeout=10", "-oServerAliveInterval=5", "-oServerAliveCountMax=3"),
    *("-oControlMaster=no", "-oControlPath=none", "-oClearAllForwardings=yes"),
)
_RSYNC = ("rsync", "-aL", "--chmod=go-w", "--timeout=600", "--exclude=.*", "--exclude=__pycache__")
# Exit codes of the shell that starts `on_host`, where it can't.
_NO_FOLDER, _NO_PYTHON = 200, 201
_SSH_FAILED = 255
# Variables by which the environment changes what a worker does; no secrets among them.
_PASSED = ("OMP_", "MKL_", "ONEDNN_", "DNNL_", "STAGERUN_", "NCCL_", "GLOO_", "TORCH_")
_PASSED_WHOLE = ("CUDA_VISIBLE_DEVICES", "KMP_AFFINITY", "KMP_BLOCKTIME")
_NOT_PASSED = ("STAGERUN_REPORT_DIR", "STAGERUN_LAUNCHER_PID", "TORCHELASTIC_RUN_ID")


@dataclass(frozen=True, slots=True)
class Way:
    """How hosts are reached. `folder`: where the command is started on each; `~/` is its user's home there. `copied`: the schedule's folder,
    which is copied into it first; '' if it isn't."""

    ssh: tuple[str, ...]
    folder: str
    copied: str = ""

    @staticmethod
    def of(options: HostOptions, folder: str) -> "Way":
        """`folder`: the schedule's here. UsageError."""
        try:
            words = tuple(shlex.split("ssh" if options.ssh is None else options.ssh))
        except ValueError as error:
            raise UsageError(f"--ssh {options.ssh}: {error}") from None
        if not words or shutil.which(words[0]) is None:
            raise UsageError(f"command `{' '.join(words)}` is not found here", 'as in --ssh "ssh -F my_config"')
        if options.sync is None:
            # By the name that the user knows, which an automounter may have for it on all hosts.
            known = os.environ.get("PWD", "")
            return Way(words, known if os.path.isdir(known) and os.path.samefile(known, ".") else os.getcwd())
        if shutil.which("rsync") is None:
            raise UsageError("--sync needs rsync, which is not found here", "install it here and on the hosts")
        copied = os.path.abspath(folder)
        there = options.sync or f"~/stagerun/{os.path.basename(copied)}"
        if not there.startswith(("/", "~/")):
            raise UsageError(
                f"--sync {there} is not an absolute path", "hosts have no current folder: begin with `/`, or with `~/`"
            )
        return Way(words, there, copied)

    def command(self, host: Host) -> list[str]:
        """The command that starts `launch.on_host` on a host: by ssh, if it isn't this one."""
        python, module = shlex.quote(sys.executable), shlex.join(program("stagerun.launch.on_host", any_version=True))
        enter = f"cd {_quoted(self.folder)} 2>/dev/null || exit {_NO_FOLDER}"
        script = f"command -v {python} >/dev/null || exit {_NO_PYTHON}; {enter}; exec {python} {module}"
        if _is_here(host):
            return ["/bin/sh", "-c", script]
        name = host.name.replace("[", "").replace("]", "")
        return [*self.ssh, "-T", *_OPTIONS, name, f"exec /bin/sh -c {shlex.quote(script)}"]

    def copy(self, host: Host) -> list[str]:
        """One call of rsync, which copies the schedule into a folder that is the user's own."""
        folder = _quoted(self.folder)
        make = f"mkdir -p {folder} && test -O {folder} && rsync"
        if _is_here(host):
            return ["/bin/sh", "-c", f"{make} {shlex.join([*_RSYNC[1:], self.copied])} {folder}/"]
        place = self.folder.removeprefix("~/")  # relative to the home there
        remote = shlex.join([*self.ssh, *_OPTIONS])
        return [*_RSYNC, "-e", remote, f"--rsync-path={make}", self.copied, f"{host.name}:{place}/"]

    def why(self, host: Host, code: int | None, last: str) -> str:
        """Why a host did not start, with a hint. `code`: the exit code of the command; None: it has not ended. `last`: what it said last."""
        ssh = shlex.join([*self.ssh, host.name])
        text, hint = f"can't start: the command there ended with exit code {code}: {last or 'no more is known'}", ""
        if code is None:
            text, hint = "does not answer", f"`{ssh} true` must come back, without a question"
        elif code == _NO_FOLDER:
            text, hint = f"has no folder {self.folder}", "mount it there, or let `--sync` copy the schedule"
        elif code == _NO_PYTHON:
            text, hint = f"has no {sys.executable}", "install it there, at the same path"
        elif "No module named" in last and "stagerun" in last:
            text, hint = f"has no stagerun in {sys.executable}", "install it there"
        elif code == _SSH_FAILED and not _is_here(host):
            text = f"can't be reached: {last or 'ssh does not say why'}"
            hint = f"`{ssh} true` must work without a password or a question; a list of one name is a host, not a file"
        return f"{host.name} {text}" + (f"\n  hint: {hint}" if hint else "")


def _quoted(folder: str) -> str:
    """In a shell's words."""
    home, rest = folder.startswith("~/"), folder.removeprefix("~/")
    return f'"$HOME"/{shlex.quote(rest)}' if home else shlex.quote(folder)


def _is_here(host: Host) -> bool:
    """Whether that is plainly this very host; then no ssh is needed."""
    own = host_name()
    return host.name in ("localhost", own, own.partition(".")[0])


def passed_on() -> dict[str, str]:
    """What the workers on other hosts get, too, of this process's environment."""
    names = [name for name in os.environ if name.startswith(_PASSED) or name in _PASSED_WHOLE]
    return {name: os.environ[name] for name in names if name not in _NOT_PASSED}
