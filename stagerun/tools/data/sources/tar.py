"""The table of contents of a tar, made by going from header to header: POSIX ustar and pax, and GNU's long names.

Why not tarfile: it takes a damaged header in the middle for the end of the archive and says nothing, and on some of the
Pythons that we run on a header with a negative size keeps it busy for ever. Nothing is unpacked, so a name never becomes
a path: those with `..` or a leading `/` are refused all the same, since keys are made from them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stagerun.errors import DataError
from stagerun.tools.data.sources.files import LARGEST_FILE

BLOCK = 512
_LONGEST_NAME = 1 << 16
_FOLDER, _LONG_NAME, _LONG_LINK, _PAX, _GLOBAL = b"5", b"L", b"K", b"x", b"g"
_REGULAR = (b"0", b"\0", b"7")
_EMPTY = (b"1", b"2", b"3", b"4", b"5", b"6")  # links, devices, folders, pipes
_MOST_EMPTY = 1 << 24  # bytes behind the last member; tar fills up to 10 KiB unless told otherwise
_DAMAGED = "it is damaged or cut off; get it again"

Read = Callable[[int, int], bytes]  # (offset, length) -> exactly so many bytes; DataError at the end of the file


@dataclass(frozen=True, slots=True)
class Member:
    """A file in a tar. `at` is the offset of its first byte; a link or a device is no `regular` one, and has no bytes."""

    name: str
    at: int
    size: int
    regular: bool


def members(read: Read, start: int, end: int, place: str) -> Iterator[Member]:
    """The files of the tar in bytes start .. end of what `read` reads. DataError, with `place`, if it is damaged."""
    at, name, size = start, "", None
    while at + BLOCK <= end:
        header = read(at, BLOCK)
        if not header.strip(b"\0"):
            if end - at > _MOST_EMPTY:
                raise DataError(
                    f"{place}: nothing in the last {end - at} bytes", "was its download broken off? get it again"
                )
            return
        kind, stated = _check(header, f"{place} at byte {at}")
        # Links and folders have no bytes, whatever their size says.
        length = 0 if kind in _EMPTY else stated if size is None else size
        body = at + BLOCK
        if body + length > end:
            raise DataError(
                f"{place} at byte {at}: `{name or _name(header)}` has {length} bytes, but the archive ends at {end}",
                _DAMAGED,
            )
        at = body + (length + BLOCK - 1) // BLOCK * BLOCK
        if kind in (_LONG_NAME, _PAX):
            if length > _LONGEST_NAME:
                raise DataError(f"{place} at byte {body}: a name of {length} bytes", _DAMAGED)
            data = read(body, length)
            if kind == _LONG_NAME:
                name = _text(data.split(b"\0")[0])
            else:
                name, size = _pax(data, f"{place} at byte {body}", name)
            continue  # it is about the next header
        if kind not in (_FOLDER, _LONG_LINK, _GLOBAL):
            shown = name or _name(header)
            if not (kind == b"\0" and shown.endswith("/")):  # how folders were written before there was a type for them
                yield Member(_safe(shown, place), body, length, kind in _REGULAR)
        if kind not in (_LONG_LINK, _GLOBAL):
            name, size = "", None
    if at < end or at == start:  # a whole one may lack its two empty blocks, as GNU tar allows too
        raise DataError(f"{place}: the archive ends at {end}, within a header", _DAMAGED)


def _check(header: bytes, place: str) -> tuple[bytes, int]:
    """(type, size)."""
    try:
        # The sum counts its own 8 bytes as blanks.
        if int(header[148:156].strip(b" \0") or b"0", 8) != sum(header) - sum(header[148:156]) + 8 * 32:
            raise ValueError
        field = header[124:136]
        binary = field[0] & 0x80
        size = int.from_bytes(field, "big") - (0x80 << 88) if binary else int(field.strip(b" \0") or b"0", 8)
        if not 0 <= size < 1 << 62:
            raise ValueError
    except ValueError:
        raise DataError(f"{place}: not a tar header", _DAMAGED) from None
    return header[156:157], size


def _name(header: bytes) -> str:
    name = header[:100].split(b"\0")[0]
    if header[257:263] == b"ustar\0" and header[345] != 0:
        name = header[345:500].split(b"\0")[0] + b"/" + name
    return _text(name)


def _pax(data: bytes, place: str, name: str) -> tuple[str, int | None]:
    """Name and size out of `length key=value\\n` records."""
    size = None
    at = 0
    try:
        while at < len(data) and data[at]:
            space = data.index(b" ", at, at + 20)
            end = at + int(data[at:space])
            key, _, value = data[space + 1 : end - 1].partition(b"=")
            if end <= space or end > len(data):
                raise ValueError
            if key == b"path":
                name = _text(value)
            elif key == b"size":
                size = int(value)
                if size < 0:
                    raise ValueError
            elif key.startswith(b"GNU.sparse"):
                raise DataError(f"{place}: a sparse file", "make the tar without --sparse")
            at = end
    except ValueError:
        raise DataError(f"{place}: a malformed pax header", _DAMAGED) from None
    return name, size


def _text(name: bytes) -> str:
    return name.decode(errors="surrogateescape")


def _safe(name: str, place: str) -> str:
    """Without a leading `./`."""
    words = name.split("/")
    if name.startswith("/") or ".." in words or "\0" in name or not name:
        raise DataError(f"{place}: a member named `{name!r}`, outside of the archive's folder", "is it a data set?")
    return "/".join(word for word in words if word not in ("", "."))


def only_files(found: Iterator[Member], place: str) -> Iterator[Member]:
    """Those that hold bytes of their own. DataError for links: following them isn't safe, leaving them out isn't right."""
    for member in found:
        if not member.regular:
            raise DataError(
                f"{place}: `{member.name}` is a link or a device, not a file",
                "make the tar with the files themselves (tar --dereference --hard-dereference)",
            )
        if member.size > LARGEST_FILE and not member.name.endswith(".tar"):
            raise DataError(f"{place}: `{member.name}` has {member.size} bytes", "is it an image?")
        yield member
