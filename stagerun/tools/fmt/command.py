"""`stagerun fmt`: the solver files of schedules in one style, in place."""

import difflib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from stagerun.base.errors import ExitCode, Problems, RecipeError, Span, StagerunError
from stagerun.base.text import count
from stagerun.command.ending import show, tell
from stagerun.command.options import argument, command, flag
from stagerun.language import Unreadable, files_in
from stagerun.language.parse import parse
from stagerun.language.resolve import SCHEDULE_FILE
from stagerun.language.tree import SCHEDULE, SOLVER
from stagerun.system.files import require_writable, write_whole, writing
from stagerun.tools.fmt.style import formatted


class Unformatted(StagerunError):
    """Files have another style. The exit code is that of a mistake: a script that checks should stop here."""

    exit_code = ExitCode.RECIPE


@command()
def fmt(
    folders: tuple[str, ...] = argument("DIR..."),
    check: bool = flag(
        "--check", "Write nothing. Names the files that have another style, and fails if there are any."
    ),
    diff: bool = flag("--diff", "Write nothing. Shows what would change."),
) -> None:
    """Writes schedule.prototxt and the stages' files in one style. Comments and line breaks stay, and so does the meaning.

    Two spaces per level, one between fields, `"` around texts, no separators. A message of several lines has its braces at the ends of
    lines. Neighbours with the same fields stand in columns, and comments behind lines begin in one. Where a file has a mistake, all are
    left as they are.
    """
    texts = _texts(folders)
    changed = {path: new for path, old in texts.items() if (new := formatted(old)) != old}
    for path, new in changed.items():
        if diff:
            show("".join(_difference(path, texts[path], new)).rstrip("\n"))
        elif check:
            tell(f"{path}: has another style")
        else:
            _write(Path(path), new)
            tell(f"{path}: written anew")
    files = f"{len(changed)} of {count(len(texts), 'file')}"
    if check and changed:
        raise Unformatted(f"{files}: another style", "`stagerun fmt DIR` writes them anew")
    tell(f"{files} {'would change' if check or diff else 'changed'}")


def _texts(folders: tuple[str, ...]) -> dict[str, str]:
    """By the path as the user wrote it. RecipeError with all that isn't in the language: what fields mean isn't looked at."""
    problems = Problems()
    texts: dict[str, str] = {}
    seen: set[str] = set()  # the same file may be named by several folders, and in several ways
    for folder in map(os.path.normpath, folders):
        for name, text in files_in(folder).items():
            path = os.path.join("" if folder == "." else folder, name)
            if (real := os.path.realpath(path)) in seen:
                continue
            seen.add(real)
            if isinstance(text, Unreadable):
                problems.add(Span(path, 1, 1), text.reason)
                continue
            parse(path, text, SCHEDULE if name == SCHEDULE_FILE else SOLVER, problems)
            texts[path] = text.decode(errors="replace") if isinstance(text, bytes) else text
    if problems:
        raise RecipeError(problems.all())
    return texts


def _difference(path: str, old: str, new: str) -> Iterator[str]:
    for line in difflib.unified_diff(old.splitlines(True), new.splitlines(True), path, path):
        yield line if line.endswith("\n") else f"{line}\n\\ no newline at the end\n"


def _write(path: Path, text: str) -> None:
    """Over the old file, or over what a link points to, with the mode that it has. PermissionDenied for a read-only one."""
    require_writable(path)
    with writing(path):
        real = path.resolve()
        mode = stat.S_IMODE(real.stat().st_mode)
        write_whole(real, text.encode())
        real.chmod(mode)
