"""How a schedule names Python: `mynet.py:build`, a function of a file beside it, or `package.module:build`. Values."""

import re
from dataclasses import dataclass

_PART = re.compile(r"[\w-]+")
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_EXAMPLE = 'write `"mynet.py:build"` for a file beside the schedule, `"package.module:build"` for an installed package'


class WrongCode(ValueError):
    """A text that names no function; `hint` says what to write. A ValueError, since a snapshot's recipe may hold such a text."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


@dataclass(frozen=True, slots=True)
class Code:
    """`file` is a path below the schedule's folder, '' for an installed package."""

    file: str
    module: str
    function: str

    @property
    def top(self) -> str:
        """`package` of `package.module:build`."""
        return self.module.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.file or self.module}:{self.function}"


@dataclass(frozen=True, slots=True)
class Sources:
    """The Python files of a schedule: by path below its folder, as they were read. `folder` as the user wrote it."""

    folder: str = ""
    files: tuple[tuple[str, str], ...] = ()


def names_code(text: str) -> bool:
    """Whether a text is meant to name a function of Python, right or wrong."""
    return ":" in text or text.endswith(".py")


def code_of(text: str) -> Code:
    """
    >>> code_of("nets/mynet.py:build")
    Code(file='nets/mynet.py', module='nets.mynet', function='build')
    >>> code_of("package.module:build")
    Code(file='', module='package.module', function='build')

    WrongCode.
    """
    place, colon, function = text.rpartition(":")
    if not colon:
        raise WrongCode(
            f"`{text}` names a file and no function in it", f'write `"{text}:build"`, if it is called `build`'
        )
    if not function.isidentifier():
        raise WrongCode(f"`{function}` can't be the name of a function", _EXAMPLE)
    if not place.endswith(".py"):
        if not _DOTTED.fullmatch(place):
            raise WrongCode(f"`{place}` is neither a Python file nor the name of a package", _EXAMPLE)
        return Code("", place, function)
    parts = place.removesuffix(".py").split("/")
    if place.startswith(("/", "~")) or ".." in parts:
        hint = "copy the file beside schedule.prototxt, or below it: snapshots keep it, and it travels with the folder"
        raise WrongCode(f"`{place}` is not below the schedule's folder", hint)
    if parts[0] == ".":
        raise WrongCode(f"`{place}` begins with `./`", f'write `"{place.lstrip("./")}:{function}"`')
    if not all(_PART.fullmatch(part) for part in parts):
        raise WrongCode(f"`{place}` can't be imported", "name files and folders with letters, digits, `_` and `-`")
    return Code(place, ".".join(parts), function)
