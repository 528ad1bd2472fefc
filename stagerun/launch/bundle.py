"""What `--sync` copies to a host before the command is started there: the schedule's folder, the files that it names, and the package."""

import base64
import hashlib
import io
import os
import posixpath
import shlex
import tarfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import stagerun
from stagerun.base.errors import StagerunError, UsageError
from stagerun.base.recipe import Schedule, Weights
from stagerun.base.text import size
from stagerun.base.weights import Kind, place_of
from stagerun.store.given import find

MOST_BYTES = 64 << 20
MOST_NAMED_BYTES = 2 << 30  # of the files that the schedule names: weights, for one
CODE = ".stagerun-code"
BAD_STREAM, CANT_WRITE = 202, 203  # exit codes of what unpacks

# Runs in the other host's interpreter, which may be another one, before any package is there. It reads its own bytes of the stream and no
# more, writes each file aside and renames it, since hosts may share the folder, and deletes what an earlier copy of the same
# folder brought and this one doesn't. Who else could write there could run code as this user, so that is refused, as for scratch. The
# package goes into a folder that is new, or that an unpacking of the same files has made.
_UNPACK = (
    f"BAD_STREAM, CANT_WRITE, CODE = {BAD_STREAM}, {CANT_WRITE}, {CODE!r}"
    + """
import hashlib, io, json, os, shutil, stat, sys, tarfile
want, digest, folder = int(sys.argv[1]), sys.argv[2], os.path.expanduser(sys.argv[3])
data, seen = io.BytesIO(), hashlib.sha256()
while data.tell() < want:
    piece = os.read(0, min(1 << 20, want - data.tell()))
    if not piece:
        break
    data.write(piece)
    seen.update(piece)
if seen.hexdigest() != digest:
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
    data.seek(0)
    with tarfile.open(fileobj=data) as tar:
        names = tar.getnames()
        code = {name.partition("/")[0] for name in names if name.startswith(CODE)}
        for name in code:
            require_private(os.path.join(folder, name))
        for member in tar:
            path = os.path.join(folder, member.name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            aside = "%s.%s-%d" % (path, os.uname().nodename, os.getpid())
            with open(aside, "wb") as file:
                shutil.copyfileobj(tar.extractfile(member), file)
            os.replace(aside, path)
    for tree in {names[0].partition("/")[0]} - code:
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


def named_files(schedule: Schedule) -> dict[str, str]:
    """The files of labels, weights, nets and mean images that a schedule names, by what it says: their paths. A file with an absolute path
    is each host's own, as images are, and so are snapshots and what a cache holds. All others that it can name lie in its folder."""
    found: dict[str | None, str | None] = {
        s.labels: s.labels_path for stage in schedule.stages for s in (stage.data.train, *stage.data.val)
    }
    for weights in (one.weights for stage in schedule.stages for one in stage.solver.given):
        if weights.state or place_of(weights.file).kind is Kind.FILE:
            found[weights.file] = weights.path
        if weights.state:
            found.update(_beside(weights))
    folder = posixpath.dirname(schedule.files[0][0]) if schedule.files else ""
    for stage in schedule.stages:
        loss, transforms = stage.solver.loss, (stage.solver.transform, stage.solver.test_transform)
        models = (stage.model, loss.teacher_model if loss is not None else None)
        found.update((m.name, posixpath.join(folder, m.name)) for m in models if m is not None and m.net is not None)
        found.update((t.mean_file, t.mean_path) for t in transforms)
    return {file: path for file, path in found.items() if file and path and not posixpath.isabs(file)}


def _beside(weights: Weights) -> dict[str, str]:
    """The .caffemodel of a .solverstate, beside it, where each host looks for it, whatever path the state has. Nothing where
    they are not here: the stage that needs them may be done."""
    try:
        path = find(weights).path
    except StagerunError:
        return {}
    return {posixpath.join(posixpath.dirname(weights.file), path.name): str(path)}


def bundle(folder: str, schedule: str, code: bool, named: Mapping[str, str] | None = None) -> tuple[Bundle, str]:
    """The bundle, and the schedule's folder within the working directory. `named`: as of `named_files`. UsageError for a bundle that is too
    large or can't be read, and for a file that would lie outside `folder`."""
    if not folder.startswith(("/", "~/")):
        raise UsageError(
            f"--sync {folder} is not an absolute path", "hosts have no current folder: begin with `/`, or with `~/`"
        )
    name, place = Path(schedule).resolve().name, ""
    files, large = _below(name, Path(schedule)), set[str]()
    for file, path in (named or {}).items():
        member = posixpath.normpath(f"{name}/{file}")
        if member.startswith("../"):
            raise UsageError(
                f"--sync: `{file}` would lie outside {folder} on the hosts",
                "keep it in the schedule's folder or beside that; with an absolute path each host reads its own",
            )
        if os.path.exists(path):  # the stages that need it may be done
            files[member] = Path(path)
            large.add(member)
    if code:
        package = Path(stagerun.__file__).parent
        place = f"{CODE}-{hashlib.sha256(_packed(_below('', package))).hexdigest()[:16]}"
        files |= _below(f"{place}/stagerun", package)
    return Bundle(folder, _packed(files, large), place), name


def _packed(files: Mapping[str, Path], large: Collection[str] = ()) -> bytes:
    """The same bytes for the same files. `large`: those that may be so."""
    packed, room = io.BytesIO(), {False: MOST_BYTES, True: MOST_NAMED_BYTES}
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, path in files.items():
            try:
                if not path.is_file() and path.exists():
                    raise UsageError(
                        f"--sync: {path} is not a regular file", "keep pipes, sockets and devices elsewhere"
                    )
                with open(path, "rb") as file:
                    member = tarfile.TarInfo(name)
                    member.size, member.mode = os.fstat(file.fileno()).st_size, 0o644
                    room[name in large] -= member.size
                    if room[name in large] < 0:
                        raise _too_large(path, name in large)
                    tar.addfile(member, file)
            except OSError as error:
                raise UsageError(f"--sync: {path} can't be read: {error.strerror or error}") from None
    return packed.getvalue()


def _too_large(path: Path, named: bool) -> UsageError:
    what = "the files that the schedule names come to more than" if named else f"with {path} the folder is larger than"
    hint = "give them absolute paths, the same on all hosts" if named else "keep images and output folders elsewhere"
    return UsageError(f"--sync: {what} {size(MOST_NAMED_BYTES if named else MOST_BYTES)}", hint)


def _below(name: str, tree: Path) -> dict[str, Path]:
    """The files of a folder by their names in the bundle, where the folder is `name`."""
    return {f"{name}/{path.relative_to(tree)}": path for path in _files(tree)}


def _files(tree: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(tree):
        folders[:] = sorted(name for name in folders if name != "__pycache__" and not name.startswith("."))
        yield from (
            Path(folder, name) for name in sorted(files) if not name.endswith(".pyc") and not name.startswith(".")
        )
