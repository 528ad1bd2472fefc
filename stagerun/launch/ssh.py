"""How a command is started on another host, and why it did not start."""

import os
import posixpath
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from stagerun.base.errors import StagerunError, UsageError
from stagerun.base.recipe import Schedule, Weights
from stagerun.base.weights import Kind, place_of
from stagerun.data.weights import find
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
_RSYNC = ("rsync", "-aRL", "--chmod=go-w", "--timeout=600", "--exclude=.*", "--exclude=__pycache__")
# Exit codes of the shell that starts `on_host`, where it can't.
_NO_FOLDER, _NO_PYTHON = 200, 201
_SSH_FAILED = 255
# Variables by which the environment changes what a worker does; no secrets among them.
_PASSED = ("OMP_", "MKL_", "ONEDNN_", "DNNL_", "STAGERUN_", "NCCL_", "GLOO_", "TORCH_")
_PASSED_WHOLE = ("CUDA_VISIBLE_DEVICES", "KMP_AFFINITY", "KMP_BLOCKTIME")
_NOT_PASSED = ("STAGERUN_REPORT_DIR", "STAGERUN_LAUNCHER_PID", "TORCHELASTIC_RUN_ID")


@dataclass(frozen=True, slots=True)
class Way:
    """How hosts are reached. `folder`: where the command is started on each; `~/` is its user's home there. `sources`: what is copied into it
    first, with the part after `/./` as its path there."""

    ssh: tuple[str, ...]
    folder: str
    sources: tuple[str, ...] = ()

    @staticmethod
    def of(options: HostOptions, folder: str, schedule: Schedule) -> "Way":
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
        there = options.sync or f"~/stagerun/{os.path.basename(os.path.abspath(folder))}"
        return Way(words, there, _sources(there, folder, schedule))

    def command(self, host: Host) -> list[str]:
        """The command that starts `launch.on_host` on a host: by ssh, if it isn't this one."""
        python, module = shlex.quote(sys.executable), shlex.join(program("stagerun.launch.on_host", any_version=True))
        enter = f"cd {_quoted(self.folder)} 2>/dev/null || exit {_NO_FOLDER}"
        script = f"command -v {python} >/dev/null || exit {_NO_PYTHON}; {enter}; exec {python} {module}"
        if is_here(host):
            return ["/bin/sh", "-c", script]
        name = host.name.replace("[", "").replace("]", "")
        return [*self.ssh, "-T", *_OPTIONS, name, f"exec /bin/sh -c {shlex.quote(script)}"]

    def copy(self, host: Host) -> list[str]:
        """One call of rsync, which copies the schedule into a folder that is the user's own."""
        if is_here(host):
            place = os.path.expanduser(self.folder)
            os.makedirs(place, exist_ok=True)
            return [*_RSYNC, *self.sources, f"{place}/"]
        folder = _quoted(self.folder)
        make = f"mkdir -p {folder} && test -O {folder} && rsync"
        place = self.folder.removeprefix("~/")  # relative to the home there
        remote = shlex.join([*self.ssh, *_OPTIONS])
        return [*_RSYNC, "-e", remote, f"--rsync-path={make}", *self.sources, f"{host.name}:{place}/"]

    def why(self, host: Host, code: int | None, last: str) -> str:
        """Why a host did not start, with a hint. `code`: the exit code of the command; None: it has not ended. `last`: what it said last."""
        ssh, hint = shlex.join([*self.ssh, host.name]), ""
        if code is None:
            text, hint = "does not answer", f"`{ssh} true` must come back, without a question"
        elif code == _NO_FOLDER:
            text = f"has no folder {self.folder}"
            hint = f"mount it there, or let `--sync` copy the schedule; `{ssh} ls {shlex.quote(self.folder)}`"
        elif code == _NO_PYTHON:
            text = f"has no {sys.executable}"
            hint = f"install it there, at the same path; `{ssh} ls {shlex.quote(sys.executable)}`"
        elif "No module named" in last and "stagerun" in last:
            text, hint = f"has no stagerun in {sys.executable}", "install it there"
        elif code == _SSH_FAILED and not is_here(host):
            text = f"can't be reached: {last or 'ssh does not say why'}"
            hint = f"`{ssh} true` must work without a password or a question; a list of one name is a host, not a file"
        else:
            text = f"can't start: the command there ended with exit code {code}: {last or 'no more is known'}"
        return f"{host.name} {text}" + (f"\n  hint: {hint}" if hint else "")


def _quoted(folder: str) -> str:
    """In a shell's words."""
    home, rest = folder.startswith("~/"), folder.removeprefix("~/")
    return f'"$HOME"/{shlex.quote(rest)}' if home else shlex.quote(folder)


def _sources(folder: str, schedule_folder: str, schedule: Schedule) -> tuple[str, ...]:
    """The schedule's folder, and the files that it names by a relative path. UsageError for a file that would lie outside `folder`."""
    if not folder.startswith(("/", "~/")):
        raise UsageError(
            f"--sync {folder} is not an absolute path", "hosts have no current folder: begin with `/`, or with `~/`"
        )
    top = Path(os.path.abspath(schedule_folder))
    members = [top.name]
    for file, path in _named_files(schedule).items():
        member = os.path.relpath(path, top.parent)
        if member.startswith("../"):
            raise UsageError(
                f"--sync: `{file}` would lie outside {folder} on the hosts",
                "keep it in the schedule's folder or beside that; with an absolute path each host reads its own",
            )
        if os.path.exists(path):  # the stages that need it may be done
            members.append(member)
    return tuple(f"{top.parent}/./{member}" for member in members)


def _named_files(schedule: Schedule) -> dict[str, str]:
    """The files of labels, weights, nets and mean images that a schedule names, by what it says: their paths. A file with an absolute path
    is each host's own, as images are, and so are snapshots and what a cache holds. All others that it can name lie in its folder."""
    found: dict[str | None, str | None] = {
        s.labels: s.labels_path for stage in schedule.stages for s in (stage.data.train, *stage.data.val)
    }
    for weights in (stage.solver.start for stage in schedule.stages if stage.solver.start is not None):
        if weights.state or place_of(weights.file).kind is Kind.FILE:
            found[weights.file] = weights.path
        if weights.state:
            found.update(_beside(weights))
    folder = posixpath.dirname(schedule.files[0][0]) if schedule.files else ""
    for stage in schedule.stages:
        if stage.model.net is not None:
            found[stage.model.name] = posixpath.join(folder, stage.model.name)
        found.update((t.mean_file, t.mean_path) for t in (stage.solver.transform, stage.solver.test_transform))
    return {file: path for file, path in found.items() if file and path and not posixpath.isabs(file)}


def _beside(weights: Weights) -> dict[str, str]:
    """The .caffemodel of a .solverstate, beside it, where each host looks for it, whatever path the state has. Nothing where
    they are not here: the stage that needs them may be done."""
    try:
        path = find(weights).path
    except StagerunError:
        return {}
    return {posixpath.join(posixpath.dirname(weights.file), path.name): str(path)}


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
