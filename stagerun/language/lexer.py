"""Text -> tokens of protobuf's text format, each with its place; token -> value. Pure.

The tokens are those of google.protobuf.text_format, so that what this parser accepts means the same there. What is
refused here alone is said in `unescape` and in `parse`.
"""

import enum
import math
import re
from dataclasses import dataclass

from google.protobuf.descriptor import FieldDescriptor

from stagerun.base.errors import listing, nearest
from stagerun.language.proto import stagerun_pb2
from stagerun.language.tree import Scalar, retired_value


class Kind(enum.Enum):
    WORD = "word"
    NUMBER = "number"
    STRING = "string"
    MARK = "mark"  # a single character: { } < > [ ] : ; , and whatever has no meaning
    END = "end"


@dataclass(frozen=True, slots=True)
class Token:
    """`line` and `column` count from 1. A STRING has its quotes; without the closing one it ends at the line's end."""

    kind: Kind
    text: str
    line: int
    column: int


_SKIP = re.compile(r"(?:\s|#.*)+")
_TOKEN = re.compile(
    r"""(?P<WORD>[a-zA-Z_][0-9a-zA-Z_+-]*)
      | (?P<NUMBER>(?:[0-9+-]|\.[0-9])[0-9a-zA-Z_.+-]*)
      | (?P<STRING>"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?$) | '[^'\\]*(?:\\.[^'\\]*)*(?:'|\\?$))
      | (?P<MARK>.)""",
    re.VERBOSE,
)


def tokens(text: str) -> list[Token]:
    """All tokens of a text, and an END after the last one. Any text has tokens; `parse` says whether they make sense."""
    found = []
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        at = 0
        while True:
            if skip := _SKIP.match(line, at):
                at = skip.end()
            match = _TOKEN.match(line, at)
            if not match:
                break
            found.append(Token(Kind[str(match.lastgroup)], match.group(), number, at + 1))
            at = match.end()
    found.append(Token(Kind.END, "", len(lines), len(lines[-1]) + 1))
    return found


_ESCAPES = {"a": 7, "b": 8, "f": 12, "n": 10, "r": 13, "t": 9, "v": 11, "\\": 92, "'": 39, '"': 34, "?": 63}
_ESCAPE = re.compile(r"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)


def unescape(text: str) -> bytes:
    r"""The bytes that the inside of a string literal means. ValueError, with what is wrong, for an escape that has no
    meaning: Python's text_format keeps its backslash (and takes `\N{NAME}`), C++'s refuses it, and so does this.
    """

    def replace(match: re.Match[str]) -> str:
        octal, hexadecimal, short, long, other = match.groups()
        if other is not None:
            if other not in _ESCAPES:
                raise ValueError(f"`\\{other}` is not an escape sequence")
            code = _ESCAPES[other]
        elif short or long:
            code = int(short or long, 16)
            if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
                raise ValueError(f"`{match.group()}` is not a character")
            return chr(code).encode().decode("latin-1")
        else:
            code = int(octal, 8) if octal else int(hexadecimal, 16)
            if code > 255:
                raise ValueError(f"`{match.group()}` is more than a byte")
        return chr(code)

    # One character per byte, so that \303\251 and a plain é may stand side by side.
    try:
        raw = text.encode().decode("latin-1")
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair is not a character") from None
    return _ESCAPE.sub(replace, raw).encode("latin-1")


# -- one token -> the value of a field, as google.protobuf.text_format reads it, but finite

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
    """The value of a whole number, number, BOOL or ENUM field. WrongValue if the token doesn't have one."""
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
        return listing([v.name for v in field.enum_type.values if not retired_value(v)])
    return "`{ name: value ... }`" if field.GetOptions().Extensions[stagerun_pb2.arguments] else WORDS[field.type]


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
    value = field.enum_type.values_by_name.get(text)
    if value is None:
        try:
            number = int(text, 0)
        except ValueError:
            # A slip of the pen, TOPK for TOP_K: FP16 is no slip for FP64.
            known = [v.name for v in field.enum_type.values if not retired_value(v)]
            hint = nearest(text.upper(), known, cutoff=0.8) or f"known: {wanted(field)}"
            raise WrongValue(f"has no value `{shown(text)}`", hint) from None
        value = field.enum_type.values_by_number.get(number)
        if value is None:
            raise WrongValue(f"has no value number {shown(text)}", f"known: {wanted(field)}")
    if hint := retired_value(value):
        raise WrongValue(f"had the value `{value.name}`, which was retired", hint)
    return str(value.name)


def shown(text: str) -> str:
    """A piece of the file for use in a message: only what prints, and shortened."""
    cut = text if len(text) <= 40 else text[:37] + "..."
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in cut)
