"""The manifest of a snapshot: a JSON object, then a line with the sha256 of all bytes before it. Pure.

`head -n -1 MANIFEST.json | sha256sum` gives the last line. A later format may change everything but that, and that
`format` is an integer; then an older stagerun can say what it lacks.
"""

import hashlib
import json
import re
import unicodedata
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any

from stagerun.base.errors import ResumeRefused
from stagerun.base.snapshots import SnapshotRef
from stagerun.store.errors import Damaged
from stagerun.store.layout import FILE_NAME, MANIFEST, MAX_FILES, Place, snapshot_name
from stagerun.system.typed import MAX_INTEGER, json_object, read_as

FORMAT = 1
MAX_BYTES = (
    1_000_000  # some hundred settings and a handful of files make 10 kB; a megabyte of JSON takes at most ten in memory
)

_SHA256 = re.compile(r"[0-9a-f]{64}")
# Control characters, which may steer a terminal, and halves of surrogate pairs, which UTF-8 has no bytes for.
_UNSHOWN = frozenset({"Cc", "Cs"})


@dataclass(frozen=True, slots=True)
class FileEntry:
    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """The facts about a snapshot besides its files. `id_stage`: the stage's name in its id, if the stage was renamed since; else ''. The
    others as in SnapshotRef."""

    place: Place
    parent: str
    identity: Mapping[str, str]
    environment: Mapping[str, str]
    id_stage: str = ""
    serial: int = 0
    skipped: int = 0
    began_empty: bool = False
    ended: bool = False
    best: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(Metadata):
    """`content` names the files that make up `id`; the others may say when and where, and train to the same bits."""

    files: Mapping[str, FileEntry]
    content: tuple[str, ...]

    @property
    def id(self) -> str:
        """Return the sha256 over stage, iter and the digests of the content."""
        digests = [[name, self.files[name].sha256] for name in sorted(self.content)]
        stage = self.id_stage or self.place.stage
        return hashlib.sha256(json.dumps([stage, self.place.iter, digests]).encode()).hexdigest()

    def ref(self) -> SnapshotRef:
        facts = _facts(self)
        del facts["place"]
        size = sum(entry.size for entry in self.files.values())
        return SnapshotRef(name=snapshot_name(*self.place), **self.place._asdict(), id=self.id, bytes=size, **facts)


def _facts(metadata: Metadata) -> dict[str, Any]:
    return {field.name: getattr(metadata, field.name) for field in fields(Metadata)}


def manifest_of(metadata: Metadata, files: Mapping[str, FileEntry], content: Collection[str]) -> Manifest:
    facts = _facts(metadata)
    if metadata.id_stage == metadata.place.stage:
        facts["id_stage"] = ""
    maps = {name: dict(facts[name]) for name in ("identity", "environment")}
    return Manifest(**facts | maps, files=files, content=tuple(sorted(content)))


def check_names(files: Collection[str], content: Collection[str]) -> None:
    """Raise ValueError for names that a manifest can't hold, or too many of them."""
    if len(files) > MAX_FILES:
        raise ValueError(f"{len(files)} files; at most {MAX_FILES} make a snapshot")
    for name in files:
        if not FILE_NAME.fullmatch(name) or name == MANIFEST:
            raise ValueError(f"not a name for a file of a snapshot: {name!r}")
    if not content or not set(content) <= set(files) or len(set(content)) != len(content):
        raise ValueError(f"content {sorted(content)} must be some of the files {sorted(files)}")


def encode(manifest: Manifest) -> bytes:
    """Return the bytes of MANIFEST.json: the same for the same manifest."""
    facts = asdict(manifest)
    place = facts.pop("place")
    # Left out where empty, as before they existed.
    for name in ("id_stage", "serial", "skipped", "began_empty", "ended", "best"):
        if not facts[name]:
            del facts[name]
    body = {"format": FORMAT, "id": manifest.id, **place._asdict(), **facts}
    text = (json.dumps(body, indent=1, sort_keys=True) + "\n").encode()
    return text + hashlib.sha256(text).hexdigest().encode() + b"\n"


@lru_cache(maxsize=1024)  # a run looks at each of its snapshots before each of its stages
def parse(data: bytes, name: str) -> Manifest:
    """Return the manifest of the snapshot of that name.

    Damaged if a byte of it differs from what was written, or it belongs to another name. ResumeRefused for a format
    that this version can't read."""
    text = data[:-65]
    if data[-65:] != hashlib.sha256(text).hexdigest().encode() + b"\n":
        raise Damaged(name, f"{MANIFEST} is not as it was written")
    # The bytes are as written, though not always by us: a folder may have been renamed or made by hand.
    try:
        body = json_object(text, once=True)
        version = body.get("format")
        if type(version) is not int or not FORMAT <= version <= MAX_INTEGER:  # a bool is an int to isinstance
            raise ValueError("format")
        if version > FORMAT:
            raise ResumeRefused(
                f"snapshot {name} has format {version}, this version of stagerun reads up to {FORMAT}",
                f"use a version of stagerun that reads format {version}, or choose another folder with --out",
            )
        manifest = _manifest(body)
        stored_name = snapshot_name(*manifest.place)
    except ValueError as error:
        raise Damaged(name, f"{MANIFEST} has no valid content: {error}") from error
    if stored_name != name:
        raise Damaged(name, f"{MANIFEST} belongs to {stored_name}")
    return manifest


def _manifest(body: Mapping[str, object]) -> Manifest:
    manifest = read_as(Manifest, {**body, "place": [body.get(name) for name in Place._fields]})
    maps = (manifest.identity, manifest.environment)
    texts = [manifest.parent, manifest.id_stage, *(text for m in maps for pair in m.items() for text in pair)]
    for text in texts:
        if not text.isprintable() and any(unicodedata.category(c) in _UNSHOWN for c in text):
            raise ValueError(f"{text[:40]!a} can't be shown")
    check_names(manifest.files, manifest.content)
    for name, entry in manifest.files.items():
        if not _SHA256.fullmatch(entry.sha256):
            raise ValueError(f"sha256 of {name}")
    if body.get("id") != manifest.id:
        raise ValueError("id")
    return manifest
