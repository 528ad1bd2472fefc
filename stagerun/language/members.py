"""The members of an ensemble as written: `trunk`, `trunk@6000`, `trunk@6000..8000/500`. Pure."""

import re
from collections.abc import Sequence

from stagerun.language.lexer import shown

MOST = 1000  # snapshots that one range may name
_LARGEST = 10**18
_RANGE = re.compile(r"([0-9]+)(?:\.\.([0-9]+)/([0-9]+))?", re.ASCII)


class WrongMember(ValueError):
    """(message, hint)"""


def read(text: str) -> tuple[str, Sequence[int | None]]:
    """The name, and the iterations of it, None for its end. WrongMember where what is behind the `@` makes no sense."""
    name, mark, behind = text.partition("@")
    if not mark:
        return name, (None,)
    found = _RANGE.fullmatch(behind)
    if found is None or not name:
        one = f"{name or 'trunk'}@6000"
        hint = f"write `{one}` for one snapshot, `{one}..8000/500` for those after 6000, 6500, ... 8000 iterations"
        raise WrongMember(f"`{shown(text)}` is not a stage and iterations of it", hint)
    first, *rest = (int(number[:19]) for number in found.groups() if number)
    if not 0 < first < _LARGEST or max(rest, default=0) >= _LARGEST:
        message = f"`{shown(behind)}` behind the `@` is not a number of iterations, 1 or more"
        raise WrongMember(message, "leave out the `@` for the end")
    if not rest:
        return name, (first,)
    last, step = rest
    if last < first:
        raise WrongMember(f"`{behind}` ends before it begins", f"write `{name}@{last}..{first}/{step}`")
    if not step or (last - first) % step:
        hint = "write how far apart they are, as `/500`"
        if step:
            hint = f"write `{name}@{first}..{last - (last - first) % step}/{step}`, or another step"
        raise WrongMember(f"steps of {step} from {first} do not come to {last}", hint)
    count = (last - first) // step + 1
    if count > MOST:
        raise WrongMember(f"`{behind}` names {count} snapshots", f"{MOST} at most: write a longer step")
    return name, range(first, last + 1, step)
