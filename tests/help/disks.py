"""Disks for the tests of the store: one that fails or stops at any call, one in memory whose power can be cut."""

import errno
import hashlib
import os
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from stagerun import store
from stagerun.store import Disk


def commit(
    disk: Disk,
    out: Path,
    stage: str,
    iter: int,
    attempt: int = 1,
    files: Mapping[str, bytes] | None = None,
    require_held: Callable[[], None] = lambda: None,
    content: Collection[str] = (),
    **about: Any,
) -> store.SnapshotRef:
    """A snapshot as a run commits it. Its id is of `content`, or else of what ends in .safetensors, or of all."""
    files = {"w": b"w"} if files is None else files
    content = content or [name for name in files if name.endswith(".safetensors")] or list(files)
    about = {"parent": "", "identity": {}, "environment": {}, **about}
    metadata = store.Metadata(place=store.Place(stage, iter, attempt), **about)
    return store.commit(disk, out, metadata, files=files, content=content, require_held=require_held)


class Killed(BaseException):
    """The process ends here: no handler of an Exception runs."""


Hook = Callable[[int, str], None]


def nothing(call: int, name: str) -> None:
    """The hook that lets everything pass."""


class HookedDisk:
    """Calls `before(n, name)` before the n-th call, n from 1, and `after(n, name)` after it. They may raise or kill.

    When `before` raises at a write, half of the data is written all the same: a torn write.
    """

    def __init__(self, disk: Disk, before: Hook = nothing, after: Hook = nothing) -> None:
        self.disk, self.before, self.after = disk, before, after
        self.calls: list[str] = []
        self._one = threading.Lock()

    def __getattr__(self, name: str) -> Callable[..., object]:
        return lambda *args: self.call(name, getattr(self.disk, name), *args)

    def call(self, name: str, do: Callable[..., object], *args: object) -> object:
        with self._one:
            self.calls.append(name)
            number = len(self.calls)
        try:
            self.before(number, name)
        except BaseException:
            if name == "write":
                data = args[0]
                assert isinstance(data, memoryview)
                do(data[: len(data) // 2])
            if name == "close":
                do()
            raise
        result = do(*args)
        self.after(number, name)
        return HookedFile(self, result) if name == "create" else result


class HookedFile:
    def __init__(self, disk: HookedDisk, file: object) -> None:
        self.disk, self.file = disk, file

    def __getattr__(self, name: str) -> Callable[..., object]:
        return lambda *args: self.disk.call(name, getattr(self.file, name), *args)


def failing(at: int, code: int) -> Hook:
    """The call number `at` fails."""

    def hook(call: int, name: str) -> None:
        if call == at:
            raise OSError(code, os.strerror(code))

    return hook


def killed(at: int) -> Hook:
    """The process ends before call number `at`, or, if that writes, in the middle of it."""

    def hook(call: int, name: str) -> None:
        if call == at:
            raise Killed

    return hook


class Node:
    """A file: `data`, and `synced`, the data that a power cut can't take; None before the first sync."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.synced: bytes | None = None


class Folder:
    """`names` as a process sees them; `synced` are those that a power cut can't take, `pending` the changes since."""

    def __init__(self) -> None:
        self.names: dict[str, Node | Folder] = {}
        self.synced: dict[str, Node | Folder] = {}
        self.pending: list[Callable[[dict[str, Node | Folder]], None]] = []

    def change(self, do: Callable[[dict[str, "Node | Folder"]], None]) -> None:
        do(self.names)
        self.pending.append(do)


class ModelFile:
    def __init__(self, node: Node, honest: bool) -> None:
        self.node, self.honest = node, honest

    def write(self, data: memoryview) -> None:
        self.node.data += data

    def sync(self) -> None:
        if self.honest:
            self.node.synced = bytes(self.node.data)

    def close(self) -> None:
        pass


class ModelDisk:
    """A disk in memory that remembers what was synced. `honest` is False for one whose syncs do nothing."""

    def __init__(self, root: Folder | None = None, honest: bool = True) -> None:
        self.root = root or Folder()
        self.honest = honest

    def find(self, path: Path) -> Node | Folder:
        node: Node | Folder = self.root
        for name in path.parts[1:]:
            if not isinstance(node, Folder):
                raise NotADirectoryError(errno.ENOTDIR, "Not a directory")
            if name not in node.names:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory")
            node = node.names[name]
        return node

    def folder(self, path: Path) -> Folder:
        node = self.find(path)
        if not isinstance(node, Folder):
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory")
        return node

    def file(self, path: Path) -> Node:
        node = self.find(path)
        if isinstance(node, Folder):
            raise OSError(errno.EINVAL, "not a regular file")
        return node

    def _add(self, path: Path, node: Node | Folder) -> None:
        folder = self.folder(path.parent)
        if path.name in folder.names:
            raise FileExistsError(errno.EEXIST, "File exists")
        folder.change(lambda names: names.update({path.name: node}))

    def mkdir(self, path: Path) -> None:
        self._add(path, Folder())

    def create(self, path: Path) -> ModelFile:
        node = Node()
        self._add(path, node)
        return ModelFile(node, self.honest)

    def sync_folder(self, path: Path) -> None:
        folder = self.folder(path)
        if self.honest:
            folder.synced, folder.pending = dict(folder.names), []

    def rename(self, source: Path, target: Path) -> None:
        assert source.parent == target.parent
        folder = self.folder(source.parent)
        if source.name not in folder.names:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        there = folder.names.get(target.name)
        if isinstance(there, Folder) and there.names:
            raise OSError(errno.ENOTEMPTY, "Directory not empty")

        def change(names: dict[str, Node | Folder]) -> None:
            names[target.name] = names.pop(source.name)

        folder.change(change)

    def link(self, source: Path, target: Path) -> None:
        self._add(target, self.file(source))

    def names(self, path: Path) -> list[str]:
        return list(self.folder(path).names)

    def size(self, path: Path) -> int:
        return len(self.file(path).data)

    def read(self, path: Path, limit: int) -> bytes:
        data = bytes(self.file(path).data)
        if len(data) > limit:
            raise OSError(errno.EFBIG, "File too large")
        return data

    def digest(self, path: Path, limit: int) -> tuple[int, str]:
        data = self.read(path, limit)
        return len(data), hashlib.sha256(data).hexdigest()

    def unlink(self, path: Path) -> None:
        if isinstance(self.find(path), Folder):
            raise IsADirectoryError(errno.EISDIR, "Is a directory")
        self.folder(path.parent).change(lambda names: names.pop(path.name) and None)

    def rmdir(self, path: Path) -> None:
        if self.folder(path).names:
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        self.folder(path.parent).change(lambda names: names.pop(path.name) and None)

    def free(self, path: Path) -> int:
        return 1_000_000

    def after_power_cut(self, kept: Callable[[Folder], int], data: str | Callable[[bytes], bytes]) -> "ModelDisk":
        """What is found when the power is back, as a new disk with honest syncs.

        Of each folder's changes that were not synced the first `kept(folder)` are there. A file that was not synced is
        `kept`, `lost` (empty), `half` there, or `zeros`; or `data` says of each file what is there.
        """
        left = data if callable(data) else lambda written: _unsynced(written, data)
        return ModelDisk(_restart(self.root, kept, left))


def _restart(folder: Folder, kept: Callable[[Folder], int], left: Callable[[bytes], bytes]) -> Folder:
    names = dict(folder.synced)
    for change in folder.pending[: kept(folder)]:
        change(names)
    again = Folder()
    for name, node in names.items():
        if isinstance(node, Folder):
            again.names[name] = _restart(node, kept, left)
        else:
            again.names[name] = found = Node()
            found.data += node.synced if node.synced is not None else left(bytes(node.data))
            found.synced = bytes(found.data)  # the next power cut finds it on the disk
    again.synced = dict(again.names)
    return again


def _unsynced(data: bytes, how: str) -> bytes:
    return {"kept": data, "lost": b"", "half": data[: len(data) // 2], "zeros": bytes(len(data))}[how]
