"""The names of the stages, and --order, which says them. Pure."""

import posixpath
import re
from collections.abc import Mapping, Sequence

from stagerun.base.errors import UsageError, listing, nearest
from stagerun.language.tree import SCHEDULE


def names_of(files: Sequence[str]) -> dict[str, str]:
    """A short name of each solver file: what their names have in common at the start is left out, up to a `_` or `-`, and
    the word `solver`. solver_custom_lr_init.prototxt and solver_custom_lr_cyc1.prototxt are `init` and `cyc1`; one that
    has no name left is `main`, as solver.prototxt is beside solver_collapse.prototxt.
    """
    stems = {file: file.removesuffix(".prototxt") for file in files}
    short = {f: re.sub(r"(^|[_-])solver(?=[_-]|$)", "", stem).lstrip("_-") for f, stem in stems.items()}
    trunk, start = min(short.values(), key=len, default=""), ""
    if trunk and len(short) > 1:  # where one is `solver.prototxt` the others keep their names
        whole = all(re.match(re.escape(trunk) + "([_-]|$)", name) for name in short.values())
        start = trunk if whole else re.sub(r"[^_-]*$", "", posixpath.commonprefix(list(short.values())))
    names = {file: _legal(name.removeprefix(start).lstrip("_-")) or "main" for file, name in short.items()}
    if len(set(names.values())) < len(names):
        names = {file: _legal(stem) or f"stage{number}" for number, (file, stem) in enumerate(stems.items(), 1)}
    taken: dict[str, str] = {}
    for file, name in names.items():
        while name in taken.values() or name == "schedule" or name in SCHEDULE.fields_by_name:
            name += "_"
        taken[file] = name
    return taken


def _legal(name: str) -> str:
    """Characters and length that a stage's name may have."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name, flags=re.ASCII)[:40]


def names_in_order(order: Sequence[str], names: Mapping[str, str]) -> dict[str, str]:
    """The solver files that --order names, by stage, by file, or by file without its ending; and their stages' names. Where it names
    files only, stages are called by what is not common to those. UsageError for words that name none, several, or one twice."""
    files: list[str] = []
    for word in order:
        fitting = [file for file, name in names.items() if word in (name, file, file.removesuffix(".prototxt"))]
        if not word:
            raise UsageError(
                "`--order` leaves a name out", "write names with a comma between two: `init,cyc1,collapse`"
            )
        if len(fitting) != 1:
            listed = f"the solver files are {listing(list(names))}, as stages {listing(list(names.values()))}"
            message = f"--order names `{word}`, which is {'several' if fitting else 'no'} of the solver files"
            raise UsageError(message, nearest(word, [*names.values(), *names]) or listed)
        if fitting[0] in files:
            raise UsageError(f"--order names `{word}` twice", "each solver is one stage")
        files += fitting
    only_files = all(word in (file, file.removesuffix(".prototxt")) for word, file in zip(order, files, strict=True))
    named = {**names, **names_of(files)} if len(files) > 1 and only_files else names
    return {file: named[file] for file in files}
