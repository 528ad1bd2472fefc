"""One token -> the value of a field, as google.protobuf.text_format reads it, but finite. Pure."""

import math
import re

from google.protobuf.descriptor import FieldDescriptor

from stagerun.errors import listing, nearest
from stagerun.spec.lexer import Kind, Token, unescape
from stagerun.spec.tree import Scalar

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
# What whole numbers may be. stagerun's own are all INT64; Caffe's are of several types.
INTEGERS = {
    FieldDescriptor.TYPE_INT64: (INT64_MIN, INT64_MAX),
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
}
# A float of Caffe's is read as the number that is written, too.
NUMBERS = (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT)

_OCTAL = re.compile(r"(-?)0(\d+)$", re.ASCII)
_FLOAT_OCTAL = re.compile(r"-?0[0-9]+")
_NO_NUMBER = re.compile(r"[+-]?(?:inf|infinity|nan)f?$", re.IGNORECASE)

WORDS = {
    **dict.fromkeys(INTEGERS, "a whole number"),
    **dict.fromkeys(NUMBERS, "a number"),
    FieldDescriptor.TYPE_BOOL: "`true` or `false`",
    FieldDescriptor.TYPE_STRING: "a text in quotes",
}


class WrongValue(Exception):
    """A value that the field can't have: the message starts with a verb, `is a whole number, not "2"`."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def read(field: FieldDescriptor, token: Token) -> Scalar:
    """The value of a whole number, number, BOOL or ENUM field. WrongValue if the token is none."""
    if token.kind is Kind.STRING:
        inside = token.text.strip("\"'")
        raise WrongValue(
            f"is {wanted(field)}, not a text in quotes", f"write `{field.name}: {inside}`" if inside else ""
        )
    if field.enum_type is not None:
        return _enum(field, token.text)
    if field.type in INTEGERS:
        return _integer(token.text, *INTEGERS[field.type])
    if field.type in NUMBERS:
        return _number(token.text)
    return _boolean(token.text)


def wanted(field: FieldDescriptor) -> str:
    if field.enum_type is not None:
        return listing([v.name for v in field.enum_type.values])
    return WORDS[field.type]


def string(token: Token) -> bytes:
    """The bytes that one string literal means."""
    if len(token.text) < 2 or token.text[-1] != token.text[0]:
        raise WrongValue("has no closing quote", f"end the text with {token.text[0]} on the same line")
    try:
        value = unescape(token.text[1:-1])
    except ValueError as error:
        raise WrongValue(f"can't be read: {error}", "a backslash is written `\\\\`") from None
    if b"\0" in value:
        raise WrongValue("holds a NUL character", "take it out")
    return value


def utf8(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise WrongValue("is not UTF-8", "write the characters themselves rather than their bytes") from None


def _integer(text: str, low: int, high: int) -> int:
    bits = 64 if high == INT64_MAX else 32
    octal = _OCTAL.match(text)
    try:
        value = int(f"{octal.group(1)}0o{octal.group(2)}" if octal else text, 0)
    except ValueError:
        if len(text) > 4000 and text.strip("-").isdecimal():
            raise WrongValue(f"is too large for {bits} bits") from None
        hint = ""
        try:
            number = _number(text)
            hint = f"write {int(number)}" if number.is_integer() and abs(number) < 1e18 else ""
        except WrongValue:
            pass
        raise WrongValue(f"is a whole number, not `{shown(text)}`", hint) from None
    if low == 0 and value < 0:
        raise WrongValue(f"must not be negative, not `{shown(text)}`")
    if not low <= value <= high:
        raise WrongValue(f"is too {'large' if value > 0 else 'small'} for {bits} bits")
    return value


def _number(text: str) -> float:
    if _NO_NUMBER.match(text):
        raise WrongValue(f"must be finite, not `{shown(text)}`")
    if _FLOAT_OCTAL.match(text):
        raise WrongValue(f"is a number, not `{shown(text)}`", "take the leading 0 off")
    try:
        value = float(text)
    except ValueError:
        try:
            value = float(text.rstrip("fF"))  # 1.0f
        except ValueError:
            raise WrongValue(f"is a number, not `{shown(text)}`") from None
    if not math.isfinite(value):
        raise WrongValue(f"must be finite: `{shown(text)}` is too large for a double")
    return value


def _boolean(text: str) -> bool:
    if text in ("true", "t", "1", "True"):
        return True
    if text in ("false", "f", "0", "False"):
        return False
    raise WrongValue(f"is `true` or `false`, not `{shown(text)}`", nearest(text.lower(), ("true", "false")))


def _enum(field: FieldDescriptor, text: str) -> str:
    values = field.enum_type.values_by_name
    if text in values:
        return text
    try:
        number = int(text, 0)
    except ValueError:
        hint = f"did you mean `{text.upper()}`?" if text.upper() in values else f"known: {wanted(field)}"
        raise WrongValue(f"has no value `{shown(text)}`", hint) from None
    if number not in field.enum_type.values_by_number:
        raise WrongValue(f"has no value number {shown(text)}", f"known: {wanted(field)}")
    return str(field.enum_type.values_by_number[number].name)


def shown(text: str) -> str:
    """A piece of the file inside a message: what prints of it, and not without end."""
    cut = text if len(text) <= 40 else text[:37] + "..."
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in cut)
