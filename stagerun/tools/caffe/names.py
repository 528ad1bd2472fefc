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
    trunk = min(short.values(), key=len, default="")
    start = re.sub(r"[^_-]*$", "", posixpath.commonprefix(list(short.values()))) if len(short) > 1 else ""
    if len(short) > 1 and trunk and all(re.match(re.escape(trunk) + "([_-]|$)", name) for name in short.values()):
        start = trunk
    names = {file: name.removeprefix(start).lstrip("_-") or "main" for file, name in short.items()}
    taken: dict[str, str] = {}
    for file, name in (names if len(set(names.values())) == len(names) else stems).items():
        name = re.sub(r"[^A-Za-z0-9_-]", "_", name, flags=re.ASCII)[:40]  # what the name of a stage may have
        while name in {"", "schedule", *taken.values()} or name in SCHEDULE.fields_by_name:
            name += "_"
        taken[file] = name
    return taken


def names_in_order(order: Sequence[str], names: Mapping[str, str]) -> dict[str, str]:
    """The solver files that --order names, by stage, by file, or by file without its ending; and their stages' names. Where it names
    files only, stages are called by what is not common to those. UsageError for words that name none, several, or one twice."""
    files: list[str] = []
    for word in order:
        fitting = [file for file, name in names.items() if word in (name, file, file.removesuffix(".prototxt"))]
        if len(fitting) != 1 or fitting[0] in files:
            why = " twice" if len(fitting) == 1 else f", which is {'several' if fitting else 'no'} of the solver files"
            hint = f"the solver files are {listing(list(names))}, as stages {listing(list(names.values()))}"
            near = nearest(word, [*names.values(), *names])
            raise UsageError(f"--order names `{word}`{why}", (near if not fitting else None) or hint)
        files += fitting
    only_files = all(word in (file, file.removesuffix(".prototxt")) for word, file in zip(order, files, strict=True))
    named = {**names, **names_of(files)} if len(files) > 1 and only_files else names
    return {file: named[file] for file in files}
