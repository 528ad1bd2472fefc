"""Identities of snapshots that another version of stagerun made, in the words of this one. Pure."""

from collections.abc import Iterator, Mapping

from google.protobuf.descriptor import Descriptor

from stagerun.spec import tree, values
from stagerun.spec.build import NONE, OPTIONAL, SKIPPED, default_text
from stagerun.spec.tree import SCHEDULE, SOLVER, is_message

# Defaults that the .proto does not state, and that follow from no other field.
_CONSTANT = {"warmup_iter": "0", "mean_value": "[0.0]", "std_value": "[1.0]"}


def completed(identity: Mapping[str, str]) -> dict[str, str]:
    """The identity (`recipe.Stage.identity`) with the fields that it lacks at their defaults, and without those that count no
    more: the version that wrote it did not know the ones, and an upgrade is no difference.

    A name that this version doesn't know stays. A default that follows from other fields is stated as `none`: fields of that
    kind are as old as snapshots are.
    """
    policy = identity.get("solver.lr_policy", "").strip('"')
    found = {key: value for key, value in identity.items() if values.identity(key, policy) or not values.known(key)}
    defaults = {key: text for key, text in _defaults(SCHEDULE, "", identity) if values.is_read(key, policy)}
    return found | {key: text for key, text in defaults.items() if key not in identity}


def _defaults(kind: Descriptor, prefix: str, said: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(key, text) of each field below a message that training depends on; of a message that may be absent its fields where one
    of them is said, `none` for itself else."""
    for field in kind.fields:
        key = prefix + field.name
        if kind is SCHEDULE and field.name == "solver":
            yield from _defaults(SOLVER, "solver.", said)
        elif field.name in SKIPPED or not tree.identity(field):
            continue
        elif not is_message(field) or field.is_repeated:
            yield key, _CONSTANT.get(field.name) or default_text(field)
        elif field.name not in OPTIONAL or any(name.startswith(f"{key}.") for name in said):
            yield from _defaults(field.message_type, f"{key}.", said)
        else:
            yield key, NONE
