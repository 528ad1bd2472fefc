"""`--sync`: the schedule folder, and this package if wanted, as one stream that is sent ahead of all else over a host's connection, and
unpacked there before its agent starts."""

import base64
import hashlib
import io
import os
import shlex
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import stagerun
from stagerun.errors import UsageError
from stagerun.text import size

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
            f"--sync {folder} is no whole path", "hosts have no current folder: begin with `/`, or with `~/`"
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
                        raise UsageError(f"--sync: {path} is no file", "keep pipes, sockets and devices elsewhere")
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
