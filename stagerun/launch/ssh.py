"""How a command is started on another host, what is copied there first (`--sync`), and why it did not start."""

import base64
import hashlib
import io
import os
import shlex
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import stagerun
from stagerun.base.errors import UsageError
from stagerun.base.text import size
from stagerun.launch.hostfile import Host
from stagerun.launch.sharing import BATCH_JOBS
from stagerun.system.host import host_name
from stagerun.system.process import program

MOST_BYTES = 64 << 20
CODE = ".stagerun-code"
BAD_STREAM, CANT_WRITE = 202, 203  # exit codes of what unpacks

# Runs in the other host's interpreter, which may be another one, before any package is there. It reads its own bytes of the stream and no
# more, writes each file aside and renames it, since hosts may share the folder, and deletes what an earlier copy of the same
# folder brought and this one doesn't. Who else could write there could run code as this user, so that is refused, as for scratch. The
# package goes into a folder that is new, or that an unpacking of the same files has made.
_UNPACK = (
    f"BAD_STREAM, CANT_WRITE, CODE = {BAD_STREAM}, {CANT_WRITE}, {CODE!r}"
    + """
import hashlib, io, json, os, stat, sys, tarfile
want, digest, folder = int(sys.argv[1]), sys.argv[2], os.path.expanduser(sys.argv[3])
data = bytearray()
while len(data) < want:
    piece = os.read(0, min(1 << 20, want - len(data)))
    if not piece:
        break
    data += piece
if hashlib.sha256(data).hexdigest() != digest:
    print("what arrived is not what was sent", file=sys.stderr)
    sys.exit(BAD_STREAM)
def require_private(folder):
    os.makedirs(folder, mode=0o700, exist_ok=True)
    for found in (os.lstat(folder), os.stat(folder)):
        mode = 0 if stat.S_ISLNK(found.st_mode) else stat.S_IMODE(found.st_mode)
        if found.st_uid != os.getuid() or mode & 0o022:
            why = "others may write to it (mode %04o); `chmod go-w` it if no one did" % mode if found.st_uid == os.getuid() else "belongs to another user"
            print("%s: %s" % (folder, why), file=sys.stderr)
            sys.exit(CANT_WRITE)
try:
    require_private(folder)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        names = tar.getnames()
        code = {name.partition("/")[0] for name in names if name.startswith(CODE)}
        for name in code:
            require_private(os.path.join(folder, name))
        for member in tar:
            path = os.path.join(folder, member.name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            aside = "%s.%s-%d" % (path, os.uname().nodename, os.getpid())
            with open(aside, "wb") as file:
                file.write(tar.extractfile(member).read())
            os.replace(aside, path)
    for tree in {name.partition("/")[0] for name in names} - code:
        record = os.path.join(folder, ".stagerun-sync." + tree)
        sent = [name for name in names if name.startswith(tree + "/")]
        try:
            with open(record) as file:
                before = json.load(file)
        except (OSError, ValueError):
            before = []
        top = os.path.realpath(os.path.join(folder, tree))
        for name in before if isinstance(before, list) else ():
            try:
                path = os.path.join(folder, name)
                if name not in sent and (os.path.realpath(os.path.dirname(path)) + "/").startswith(top + "/"):
                    os.unlink(path)
            except (OSError, TypeError, ValueError):
                pass
        with open(record, "w") as file:
            json.dump(sent, file)
except OSError as error:
    print("%s: %s" % (error.filename or folder, error.strerror), file=sys.stderr)
    sys.exit(CANT_WRITE)
"""
)


@dataclass(frozen=True, slots=True)
class Bundle:
    """`folder`: the working directory on each host; `~/` is its user's home there. `code`: where in it the package comes, or ''."""

    folder: str
    data: bytes
    code: str = ""

    @property
    def place(self) -> str:
        """The folder in a shell's words."""
        home, rest = self.folder.startswith("~/"), self.folder.removeprefix("~/")
        return f'"$HOME"/{shlex.quote(rest)}' if home else shlex.quote(self.folder)

    def unpack(self, python: str) -> str:
        digest = hashlib.sha256(self.data).hexdigest()
        # In one line: it passes through the user's login shell there, which may be a csh.
        code = f"import base64; exec(base64.b64decode(b'{base64.b64encode(_UNPACK.encode()).decode()}'))"
        return f"{python} -I -c {shlex.quote(code)} {len(self.data)} {digest} {shlex.quote(self.folder)}"


def bundle(folder: str, schedule: str, code: bool) -> tuple[Bundle, str]:
    """The bundle, and the schedule's folder within the working directory. UsageError for one that is too large or can't be read."""
    if not folder.startswith(("/", "~/")):
        raise UsageError(
            f"--sync {folder} is not an absolute path", "hosts have no current folder: begin with `/`, or with `~/`"
        )
    name = Path(schedule).resolve().name
    trees, place = {name: Path(schedule)}, ""
    if code:
        package = Path(stagerun.__file__).parent
        place = f"{CODE}-{hashlib.sha256(_packed({'': package})).hexdigest()[:16]}"
        trees[f"{place}/stagerun"] = package
    return Bundle(folder, _packed(trees), place), name


def _packed(trees: Mapping[str, Path]) -> bytes:
    """The same bytes for the same files."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, tree in trees.items():
            for path in _files(tree):
                try:
                    if not path.is_file() and path.exists():
                        raise UsageError(
                            f"--sync: {path} is not a regular file", "keep pipes, sockets and devices elsewhere"
                        )
                    with open(path, "rb") as file:
                        data = file.read(MOST_BYTES + 1)
                except OSError as error:
                    raise UsageError(f"--sync: {path} can't be read: {error.strerror}") from None
                if packed.tell() + len(data) > MOST_BYTES:
                    raise UsageError(
                        f"--sync: {tree} is larger than {size(MOST_BYTES)}", "keep images and output folders elsewhere"
                    )
                member = tarfile.TarInfo(f"{name}/{path.relative_to(tree)}")
                member.size, member.mode = len(data), 0o644
                tar.addfile(member, io.BytesIO(data))
    return packed.getvalue()


def _files(tree: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(tree):
        folders[:] = sorted(name for name in folders if name != "__pycache__" and not name.startswith("."))
        yield from (
            Path(folder, name) for name in sorted(files) if not name.endswith(".pyc") and not name.startswith(".")
        )


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
_PASSED_WHOLE = ("CUDA_VISIBLE_DEVICES", "KMP_AFFINITY", "KMP_BLOCKTIME", *BATCH_JOBS)
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
