"""The language's fields from protos/stagerun.proto. `scripts/dev proto` generates stagerun_pb2, enums_pb2 and comments.json."""

import json
from functools import cache
from pathlib import Path

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from stagerun.base.proto import stagerun_pb2

_MESSAGES = stagerun_pb2.DESCRIPTOR.message_types_by_name


@cache
def comments() -> dict[str, str]:
    """Return the comments by "Message.field", "Enum.VALUE" etc.: the manual."""
    by_name: dict[str, str] = json.loads(Path(__file__).with_name("comments.json").read_bytes())
    return by_name


def message_of(kind: type) -> Descriptor | None:
    """Return the message of a class of `recipe`; None if the language has none."""
    name = {"Stage": "StageEntry", "ParamRule": "ParamSpec"}.get(kind.__name__, kind.__name__)
    return _MESSAGES.get(name) or _MESSAGES.get(f"{name}Parameter")


def path_to(kind: type, attribute: str) -> tuple[FieldDescriptor, ...]:
    """Return the fields that lead to an attribute of a class of `recipe`: the field with its name, or with `_param` appended; else a field inside
    a message, `carry_data` for `data` in `carry`; () for an attribute without a field."""
    message = message_of(kind)
    fields = message.fields_by_name if message is not None else {}
    for name in (attribute, f"{attribute}_param", attribute.rstrip("_")):
        if name in fields:
            return (fields[name],)
    for outer in fields.values():
        if outer.message_type is not None and not outer.is_repeated:
            inner = outer.message_type.fields_by_name.get(attribute.removeprefix(f"{outer.name}_"))
            if inner is not None:
                return outer, inner
    return ()


@cache
def default(field: FieldDescriptor) -> bool | int | float | str | None:
    """Return the default that the .proto states: an enum's by name, None without a default."""
    if not field.has_default_value:
        return None
    if field.enum_type is not None:
        return str(field.enum_type.values_by_number[field.default_value].name)
    value: bool | int | float | str = field.default_value
    return value
