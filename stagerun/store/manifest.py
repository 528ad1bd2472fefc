"""The manifest of a snapshot: a JSON object, then a line with the sha256 of all bytes before it. Pure.

`head -n -1 MANIFEST.json | sha256sum` gives the last line. A later format may change everything but that, and that
`format` is an integer; then an older stagerun can say what it lacks.
"""

import hashlib
import json
import re
import unicodedata
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache

from stagerun.base.errors import ResumeRefused
from stagerun.base.snapshots import SnapshotRef
from stagerun.store.errors import Damaged
from stagerun.store.layout import FILE_NAME, MANIFEST, MAX_FILES, Place, snapshot_name
from stagerun.system.typed import MAX_INTEGER, json_object, read_as

FORMAT = 1
# What it may be at most: some hundred settings and a handful of files make 10 kB. JSON of one megabyte is at most some ten in
# memory, whatever it says.
MAX_BYTES = 1_000_000

_SHA256 = re.compile(r"[0-9a-f]{64}")
# Control characters, those that steer a terminal among them, and halves of surrogate pairs, which UTF-8 has no bytes for.
_UNSHOWN = frozenset({"Cc", "Cs"})


@dataclass(frozen=True, slots=True)
class FileEntry:
    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """What is known about a snapshot besides its files. `id_stage` is the stage's name in its id where the stage had another when it began;
    '' else. The others as in SnapshotRef."""

    place: Place
    parent: str
    identity: Mapping[str, str]
    environment: Mapping[str, str]
    id_stage: str = ""
    serial: int = 0
    skipped: int = 0
    began_empty: bool = False
    ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(Metadata):
    """`content` names the files that make up `id`; the rest may say when and where, and train to the same bits."""

    files: Mapping[str, FileEntry]
    content: tuple[str, ...]

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
            ended=self.ended,
        )


def manifest_of(metadata: Metadata, files: Mapping[str, FileEntry], content: Collection[str]) -> Manifest:
    known = {field.name: getattr(metadata, field.name) for field in fields(metadata)}
    if metadata.id_stage == metadata.place.stage:
        known["id_stage"] = ""
    maps = {name: dict(known[name]) for name in ("identity", "environment")}
    return Manifest(**known | maps, files=files, content=tuple(sorted(content)))


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
    if manifest.ended:
        body["ended"] = True
    text = (json.dumps(body, indent=1, sort_keys=True) + "\n").encode()
    return text + hashlib.sha256(text).hexdigest().encode() + b"\n"


@lru_cache(maxsize=1024)  # a run looks at each of its snapshots before each of its stages
def parse(data: bytes, name: str) -> Manifest:
    """The manifest of the snapshot of that name.

    Damaged if a byte of it differs from what was written, or it belongs to another name. ResumeRefused for a format
    that this version doesn't know.
    """
    text = data[:-65]
    if data[-65:] != hashlib.sha256(text).hexdigest().encode() + b"\n":
        raise Damaged(name, f"{MANIFEST} is not as it was written")
    # From here on the bytes are someone's intention, though not always ours: a folder may have been renamed or made by
    # hand.
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
        place = snapshot_name(*manifest.place)
    except ValueError as error:
        raise Damaged(name, f"{MANIFEST} has no valid content: {error}") from error
    if place != name:
        raise Damaged(name, f"{MANIFEST} is that of {place}")
    return manifest


def _manifest(body: Mapping[str, object]) -> Manifest:
    place = [body.get(name) for name in Place._fields]
    manifest = read_as(Manifest, {**body, "place": place})
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
