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
        stage = name or "trunk"
        hint = f"write `{stage}@6000` for one snapshot, `{stage}@6000..8000/500` for those after 6000, 6500, ... 8000 iterations"
        raise WrongMember(f"`{shown(text)}` is not a stage and iterations of it", hint)
    first, last, step = (int(number[:19]) if number else None for number in found.groups())
    assert first is not None
    if not 0 < first < _LARGEST or (last or 0) >= _LARGEST or (step or 0) >= _LARGEST:
        raise WrongMember(
            f"`{shown(behind)}` behind the `@` is not a number of iterations, 1 or more",
            "leave out the `@` for the end",
        )
    if last is None or step is None:
        return name, (first,)
    if last < first:
        raise WrongMember(f"`{behind}` ends before it begins", f"write `{name}@{last}..{first}/{step}`")
    if not step or (last - first) % step:
        near = first + (last - first) // step * step if step else last
        hint = (
            f"write `{name}@{first}..{near}/{step}`, or another step"
            if step
            else "write how far apart they are, as `/500`"
        )
        raise WrongMember(f"steps of {step} from {first} do not come to {last}", hint)
    if (last - first) // step >= MOST:
        raise WrongMember(
            f"`{behind}` names {(last - first) // step + 1} snapshots", f"{MOST} at most: write a longer step"
        )
    return name, range(first, last + 1, step)
