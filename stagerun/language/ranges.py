"""Checks of single values: the bounds of stagerun.proto, choices, names, and members of ensembles. Pure."""

import operator
import re
from collections.abc import Sequence
from dataclasses import replace

from google.protobuf.descriptor import FieldDescriptor

from stagerun.base.code import WrongCode, code_of
from stagerun.base.errors import Problems, listing, nearest
from stagerun.base.proto import stagerun_pb2
from stagerun.language.consent import NEEDED, Consent
from stagerun.language.lexer import shown
from stagerun.language.networks import FILLER_FIELDS, NETWORKS, code_in, is_foreign
from stagerun.language.tree import SCHEDULE, SOURCE, Block, Entry, Scalar, Value
from stagerun.schedule import POLICIES, SOLVER_TYPES
from stagerun.schedule.policies import DECAYS

# The options of the .proto that bound a number; their names are the words of the message.
_BOUNDS = (
    (stagerun_pb2.at_least, operator.ge),
    (stagerun_pb2.above, operator.gt),
    (stagerun_pb2.at_most, operator.le),
    (stagerun_pb2.below, operator.lt),
)


def bounds_missed(field: FieldDescriptor, value: float) -> str:
    """Return the bounds that a number misses, `at least 0 and below 1`; '' if it is within."""
    options = field.GetOptions()
    stated = [(bound.name, options.Extensions[bound], holds) for bound, holds in _BOUNDS if options.HasExtension(bound)]
    if all(holds(value, bound) for _, bound, holds in stated):
        return ""
    parts = (f"{name.replace('_', ' ')} {int(bound) if bound.is_integer() else bound}" for name, bound, _ in stated)
    return " and ".join(parts)


CHOICES: dict[str, tuple[str, ...]] = {
    "Model.name": tuple(NETWORKS),
    "Solver.lr_policy": tuple(POLICIES),
    "Solver.type": tuple(SOLVER_TYPES),
    "Solver.regularization_type": ("L2", "L1"),
    "FillerParameter.type": tuple(FILLER_FIELDS),
    "OuterParameter.type": ("Nesterov", "SGD"),
    "Ensemble.shape": tuple(DECAYS),
}

# Retired texts, and what to write instead.
RETIRED = {
    "Solver.lr_policy": {
        "one_cycle": 'write `lr_policy: "cosine"` with `warmup_iter` and `decay_from: WARMUP_END`',
        "triangular": 'write `lr_policy: "piecewise_linear"` with a `knot` at each corner',
    }
}

# Texts that name something.
_NAMES = {
    "Schedule.name": "be the name of a schedule",
    "StageEntry.name": "be the name of a stage",
    "Sweep.name": "end the name of a stage",
    "Ensemble.name": "be the name of an ensemble",
    "Source.name": "be the name of a validation set",
}
LONGEST_NAME = 100


def is_name(name: str, with_dots: bool = False) -> bool:
    signs = r"(?!\.\.?$)[A-Za-z0-9_.-]+" if with_dots else "[A-Za-z0-9_-]+"
    return re.fullmatch(signs, name, re.ASCII) is not None


def sound(block: Block, problems: Problems) -> Block:
    """Return the block without entries whose value is out of range; report these and mark them doubtful."""
    entries: dict[str, Entry] = {}
    doubtful = set(block.doubtful)
    for name, entry in block.entries.items():
        values: list[Value] = []
        for value in entry.values:
            if isinstance(value.value, Block):
                values.append(replace(value, value=sound(value.value, problems)))
                continue
            key = f"{block.kind.name}.{entry.field.name}"
            message, hint = wrong(key, entry.field, value.value, shown(value.text))
            if message:
                problems.add(value.span, message, hint)
            else:
                values.append(value)
        if len(values) == len(entry.values):
            entries[name] = replace(entry, values=tuple(values))
        else:
            doubtful.add(name)
    return replace(block, entries=entries, doubtful=frozenset(doubtful))


def wrong(key: str, field: FieldDescriptor, value: Scalar, written: str) -> tuple[str, str]:
    """Return the mistake in one value and a hint; ('', '') if it is right."""
    if isinstance(value, str):
        if NEEDED.get(key) is Consent.CODE and (key != "Model.name" or is_foreign(value)):
            try:
                code_in(value) if key == "Model.name" else code_of(value)
            except WrongCode as wrong:
                return wrong.message, wrong.hint
            return "", ""
        return _wrong_text(key, field, value)
    options = field.GetOptions()
    if missed := bounds_missed(field, value):
        return f"`{field.name}` must be {missed}, not {written}", options.Extensions[stagerun_pb2.hint]
    if value == 0 and options.HasExtension(stagerun_pb2.not_zero):
        return f"`{field.name}` must not be 0", options.Extensions[stagerun_pb2.not_zero]
    if key == "Model.channels" and value not in (1, 3):
        return f"`channels` must be 1 or 3, not {written}", "1 is grey, 3 is colour"
    return "", ""


def _wrong_text(key: str, field: FieldDescriptor, value: str) -> tuple[str, str]:
    name, options = field.name, field.GetOptions()
    if hint := RETIRED.get(key, {}).get(value):
        return f"`{name}: {shown(value)}` was retired", hint
    if key in CHOICES and value not in CHOICES[key]:
        choices = "`stagerun help Model.name` lists them" if key == "Model.name" else f"values: {listing(CHOICES[key])}"
        if value == "?":
            return f"`{name}` is still a question", choices
        return f"`{name}` has no value `{shown(value)}`", nearest(value, CHOICES[key]) or choices
    if key in _NAMES:
        return _wrong_name(key, value)
    if options.HasExtension(stagerun_pb2.not_empty) and not value:
        return f"`{name}` is empty", options.Extensions[stagerun_pb2.not_empty]
    return "", ""


def _wrong_name(key: str, value: str) -> tuple[str, str]:
    with_dots, too_long = key == "Schedule.name", len(value) > LONGEST_NAME
    hint = f"letters, digits, {'`_`, `-` and `.`' if with_dots else '`_` and `-`'} can be in it"
    wrong = not is_name(value, with_dots)
    if key == "Ensemble.name":
        wrong, hint = wrong or too_long, f"{hint}, {LONGEST_NAME} at most"
    if wrong or (key == "Source.name" and value in SOURCE.fields_by_name):
        return f"`{shown(value)}` can't {_NAMES[key]}", hint
    return wrong_stage(value) if key == "StageEntry.name" else ("", "")


def wrong_stage(name: str) -> tuple[str, str]:
    """Return the mistake in a stage's name that is well formed, and a hint; ('', '') if it is right."""
    if len(name) > LONGEST_NAME:
        hint = f"{LONGEST_NAME} at most: it becomes part of file names"
        return f"the name of stage `{shown(name)}` has {len(name)} characters", hint
    if name in SCHEDULE.fields_by_name:
        return f"a stage can't be named `{name}`", f"`--set {name}...` means the field of Schedule"
    return "", ""


# -- members of an ensemble as written: `trunk`, `trunk@6000`, `trunk@6000..8000/500`

MOST_SNAPSHOTS = 1000  # snapshots that one range may name
_LARGEST = 10**18
_RANGE = re.compile(r"([0-9]+)(?:\.\.([0-9]+)/([0-9]+))?", re.ASCII)


class WrongMember(ValueError):
    """(message, hint)"""


def read_member(text: str) -> tuple[str, Sequence[int | None]]:
    """Return the name and its iterations, None for the end. WrongMember if the text after the `@` makes no sense."""
    name, mark, behind = text.partition("@")
    if not mark:
        return name, (None,)
    match = _RANGE.fullmatch(behind)
    if match is None or not name:
        one = f"{name or 'trunk'}@6000"
        hint = f"write `{one}` for one snapshot, `{one}..8000/500` for snapshots after 6000, 6500, ... 8000 iterations"
        raise WrongMember(f"`{shown(text)}` is not a stage with iterations", hint)
    first, *rest = (int(number[:19]) for number in match.groups() if number)
    if not 0 < first < _LARGEST or max(rest, default=0) >= _LARGEST:
        message = f"`{shown(behind)}` after the `@` is not a number of iterations, 1 or more"
        raise WrongMember(message, "leave out the `@` for the end")
    if not rest:
        return name, (first,)
    last, step = rest
    if last < first:
        raise WrongMember(f"`{behind}` ends before it begins", f"write `{name}@{last}..{first}/{step}`")
    if not step or (last - first) % step:
        hint = "write the step between them, as `/500`"
        if step:
            hint = f"write `{name}@{first}..{last - (last - first) % step}/{step}`, or another step"
        raise WrongMember(f"steps of {step} from {first} don't reach {last}", hint)
    count = (last - first) // step + 1
    if count > MOST_SNAPSHOTS:
        raise WrongMember(f"`{behind}` names {count} snapshots", f"{MOST_SNAPSHOTS} at most: write a longer step")
    return name, range(first, last + 1, step)
