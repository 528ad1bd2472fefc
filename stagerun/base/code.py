"""Names of Python functions in a schedule: `mynet.py:build`, in a file next to it, or `package.module:build`. Values."""

import re
from dataclasses import dataclass

_PART = re.compile(r"[\w-]+")
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_EXAMPLE = 'write `"mynet.py:build"` for a file next to the schedule, `"package.module:build"` for an installed package'


class WrongCode(ValueError):
    """The text does not name a function. A ValueError, since a snapshot's recipe may hold such a text."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


@dataclass(frozen=True, slots=True)
class Code:
    """A Python function. `file`: a path below the schedule's folder, '' for an installed package."""

    file: str
    module: str
    function: str

    @property
    def top(self) -> str:
        """Return `package` of `package.module:build`."""
        return self.module.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.file or self.module}:{self.function}"


@dataclass(frozen=True, slots=True)
class Sources:
    """The Python files of a schedule: (path below its folder, text). `folder`: as the user wrote it."""

    folder: str = ""
    files: tuple[tuple[str, str], ...] = ()


def names_code(text: str) -> bool:
    """Return whether a text is meant to name a Python function, right or wrong."""
    return ":" in text or text.endswith(".py")


def code_of(text: str) -> Code:
    """Parse the name of a Python function. WrongCode.

    >>> code_of("nets/mynet.py:build")
    Code(file='nets/mynet.py', module='nets.mynet', function='build')
    >>> code_of("package.module:build")
    Code(file='', module='package.module', function='build')
    """
    home, colon, function = text.rpartition(":")
    if not colon:
        raise WrongCode(f"`{text}` names a file without a function", f'write `"{text}:build"`, if it is called `build`')
    if not function.isidentifier():
        raise WrongCode(f"`{function}` can't be the name of a function", _EXAMPLE)
    if not home.endswith(".py"):
        if not _DOTTED.fullmatch(home):
            raise WrongCode(f"`{home}` is neither a Python file nor the name of a package", _EXAMPLE)
        return Code("", home, function)
    parts = home.removesuffix(".py").split("/")
    if home.startswith(("/", "~")) or ".." in parts:
        hint = "copy the file next to schedule.prototxt, or below it: snapshots keep it, and it travels with the folder"
        raise WrongCode(f"`{home}` is not below the schedule's folder", hint)
    if parts[0] == ".":
        raise WrongCode(f"`{home}` begins with `./`", f'write `"{home.lstrip("./")}:{function}"`')
    if not all(_PART.fullmatch(part) for part in parts):
        raise WrongCode(f"`{home}` can't be imported", "name files and folders with letters, digits, `_` and `-`")
    return Code(home, ".".join(parts), function)
