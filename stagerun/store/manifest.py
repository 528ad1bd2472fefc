"""The manifest of a snapshot: a JSON object, then a line with the sha256 of all bytes before it. Pure.

`head -n -1 MANIFEST.json | sha256sum` gives the last line. A later format may change everything but that, and that
`format` is an integer; then an older stagerun can say what it lacks.
"""

import hashlib
import json
import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from stagerun.errors import ResumeRefused
from stagerun.snapshots import SnapshotRef
from stagerun.store.faults import Damaged
from stagerun.store.layout import FILE_NAME, MANIFEST, MAX_FILES, Place, snapshot_name

FORMAT = 1
# What it may be at most: some hundred settings and a handful of files make 10 kB. JSON of one megabyte is at most some ten in
# memory, whatever it says.
MAX_BYTES = 1_000_000
# Of sizes and numbers: what 64 bits hold, and no more digits than that.
MAX_INTEGER = 2**63 - 1

_SHA256 = re.compile(r"[0-9a-f]{64}")
# Control characters, those that steer a terminal among them, and halves of surrogate pairs, which UTF-8 has no bytes for.
_UNSHOWN = frozenset({"Cc", "Cs"})


@dataclass(frozen=True, slots=True)
class FileEntry:
    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """`content` names the files that make up `id`; the rest may say when and where, and train to the same bits. `id_stage` is the
    stage's name in `id` where the stage had another when it began; '' else. `serial`, `skipped` and `began_empty` as in SnapshotRef."""

    place: Place
    parent: str
    identity: Mapping[str, str]
    environment: Mapping[str, str]
    files: Mapping[str, FileEntry]
    content: tuple[str, ...]
    id_stage: str = ""
    serial: int = 0
    skipped: int = 0
    began_empty: bool = False

    @property
    def id(self) -> str:
        """sha256 over stage, iter and the digests of the content."""
        digests = [[name, self.files[name].sha256] for name in sorted(self.content)]
        stage = self.id_stage or self.place.stage
        return hashlib.sha256(json.dumps([stage, self.place.iter, digests]).encode()).hexdigest()

    def ref(self) -> SnapshotRef:
        return SnapshotRef(
            name=snapshot_name(*self.place),
            stage=self.place.stage,
            iter=self.place.iter,
            attempt=self.place.attempt,
            id=self.id,
            parent=self.parent,
            identity=self.identity,
            environment=self.environment,
            bytes=sum(entry.size for entry in self.files.values()),
            id_stage=self.id_stage,
            serial=self.serial,
            skipped=self.skipped,
            began_empty=self.began_empty,
        )


def check_names(files: Collection[str], content: Collection[str]) -> None:
    """ValueError for names that a manifest can't hold, or too many of them."""
    if len(files) > MAX_FILES:
        raise ValueError(f"{len(files)} files; at most {MAX_FILES} make a snapshot")
    for name in files:
        if not FILE_NAME.fullmatch(name) or name == MANIFEST:
            raise ValueError(f"not a name for a file of a snapshot: {name!r}")
    if not content or not set(content) <= set(files) or len(set(content)) != len(content):
        raise ValueError(f"content {sorted(content)} must be some of the files {sorted(files)}")


def encode(manifest: Manifest) -> bytes:
    """The bytes of MANIFEST.json: the same for the same manifest."""
    body = {
        "format": FORMAT,
        "stage": manifest.place.stage,
        "iter": manifest.place.iter,
        "attempt": manifest.place.attempt,
        "id": manifest.id,
        "parent": manifest.parent,
        "identity": dict(manifest.identity),
        "environment": dict(manifest.environment),
        "files": {name: {"size": e.size, "sha256": e.sha256} for name, e in manifest.files.items()},
        "content": list(manifest.content),
    }
    if manifest.id_stage:
        body["id_stage"] = manifest.id_stage
    if manifest.serial:
        body["serial"] = manifest.serial
    if manifest.skipped:
        body["skipped"] = manifest.skipped
    if manifest.began_empty:
        body["began_empty"] = True
    text = (json.dumps(body, indent=1, sort_keys=True) + "\n").encode()
    return text + hashlib.sha256(text).hexdigest().encode() + b"\n"


def parse(data: bytes, name: str) -> Manifest:
    """The manifest of the snapshot of that name.

    Damaged if a byte of it differs from what was written, or it belongs to another name. ResumeRefused for a format
    that this version doesn't know.
    """
    text = data[:-65]
    if data[-65:] != hashlib.sha256(text).hexdigest().encode() + b"\n":
        raise Damaged(name, f"{MANIFEST} is not as it was written")
    # From here on the bytes are somebody's intention, though not always ours: a folder may have been renamed or made by
    # hand. Deep nesting is a RecursionError, a number of thousands of digits a ValueError.
    try:
        body = _Fields(json.loads(text, object_pairs_hook=_once, parse_constant=_no_number))
        version = body.integer("format")
        if version > FORMAT:
            raise ResumeRefused(
                f"snapshot {name} has format {version}, this version of stagerun reads up to {FORMAT}",
                f"use a version of stagerun that reads format {version}, or choose another folder with --out",
            )
        if version < FORMAT:
            raise ValueError("format")
        manifest = _manifest(body)
        place = snapshot_name(*manifest.place)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(name, f"{MANIFEST} has no valid content: {error}") from error
    if place != name:
        raise Damaged(name, f"{MANIFEST} is that of {place}")
    return manifest


def _once(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    """A JSON object in which each name stands once: of two, readers of other programs would take the other."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name twice in one object")
    return found


def _no_number(word: str) -> object:
    raise ValueError(f"{word} is no number")


def _manifest(body: "_Fields") -> Manifest:
    files = {}
    if len(body.mapping("files")) > MAX_FILES:
        raise ValueError("files")
    for name, entry in body.mapping("files").items():
        fields = _Fields(entry)
        files[name] = FileEntry(fields.integer("size"), fields.text("sha256"))
        if not _SHA256.fullmatch(files[name].sha256):
            raise ValueError(f"sha256 of {name}")
    content = tuple(body.texts("content"))
    check_names(files, content)
    manifest = Manifest(
        place=Place(body.text("stage"), body.integer("iter"), body.integer("attempt")),
        parent=body.text("parent"),
        identity=body.text_map("identity"),
        environment=body.text_map("environment"),
        files=files,
        content=content,
        id_stage=body.text("id_stage") if "id_stage" in body.value else "",
        serial=body.integer("serial") if "serial" in body.value else 0,
        skipped=body.integer("skipped") if "skipped" in body.value else 0,
        began_empty=body.flag("began_empty") if "began_empty" in body.value else False,
    )
    if body.text("id") != manifest.id:
        raise ValueError("id")
    return manifest


class _Fields:
    """A JSON object, read with types. ValueError or KeyError with the name of the field."""

    def __init__(self, value: object) -> None:
        if not isinstance(value, dict):
            raise ValueError("not an object")
        self.value: dict[str, object] = value

    def integer(self, key: str) -> int:
        found = self.value[key]
        if type(found) is not int or not 0 <= found <= MAX_INTEGER:  # a bool is an int to isinstance
            raise ValueError(key)
        return found

    def flag(self, key: str) -> bool:
        found = self.value[key]
        if not isinstance(found, bool):
            raise ValueError(key)
        return found

    def text(self, key: str) -> str:
        found = self.value[key]
        if not isinstance(found, str) or not _shown(found):
            raise ValueError(ascii(key))
        return found

    def texts(self, key: str) -> list[str]:
        found = self.value[key]
        if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
            raise ValueError(key)
        return found

    def mapping(self, key: str) -> dict[str, object]:
        found = self.value[key]
        if not isinstance(found, dict):
            raise ValueError(key)
        return found

    def text_map(self, key: str) -> dict[str, str]:
        found = _Fields(self.mapping(key))
        if not all(map(_shown, found.value)):
            raise ValueError(key)
        return {name: found.text(name) for name in found.value}


def _shown(text: str) -> bool:
    return text.isprintable() or not any(unicodedata.category(c) in _UNSHOWN for c in text)
