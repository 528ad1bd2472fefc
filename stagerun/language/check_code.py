"""Errors in what a schedule says of Python: files and functions that are not there, and arguments of a network. Pure."""

from collections.abc import Iterable
from contextlib import suppress

from stagerun.base.errors import Problems
from stagerun.language import arguments
from stagerun.language.code import LocalFiles
from stagerun.language.networks import TIMM, TIMMS_WEIGHTS, Network, code_in
from stagerun.language.tree import Entry
from stagerun.language.view import Doubtful, View


def require_code(entries: Iterable[Entry], local: LocalFiles) -> list[str]:
    """The files that these entries need. What is wrong with them, or in them, is a problem."""
    needed: dict[str, None] = {}
    for entry in entries:
        code = code_in(str(entry.values[0].value))
        if code is not None:
            needed |= dict.fromkeys(local.require(code, entry.place))
    return list(needed)


def check_args(name: str, network: Network, model: View, problems: Problems) -> None:
    """`args` are of networks from outside, and don't say what has a field of its own."""
    with suppress(Doubtful):
        text = model.text("args")
        if text is None:
            return
        place = model.place("args")
        if not network.foreign:
            hint = "remove it: it is for a network from a file, from a package or of timm"
            problems.add(place, f"`args` means nothing for `{name}`", hint)
            return
        for word in arguments.read(text):
            if word in ("num_classes", "channels") or (name.startswith(TIMM) and word == "in_chans"):
                field = "channels" if word == "in_chans" else word
                problems.add(
                    place, f"`{word}` in `args`", f"write `{field}: ...` beside `args`: images are checked against it"
                )
            elif name.startswith(TIMM) and word in TIMMS_WEIGHTS:
                problems.add(place, f"`{word}` in `args`: a network starts with fresh weights", "remove it")
