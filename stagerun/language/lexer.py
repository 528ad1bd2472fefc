"""Tokens of protobuf's text format with their positions; a cursor over them; the value of a token. Pure.

The tokens match google.protobuf.text_format, so that accepted text means the same in both. `unescape` and `parse` list what only this
parser refuses.
"""

import enum
import math
import re
from dataclasses import dataclass

from google.protobuf.descriptor import FieldDescriptor

from stagerun.base.errors import Problems, Span, listing, nearest
from stagerun.language.tree import Scalar, retired_value, takes_arguments

# A MARK is a single character: { } < > [ ] : ; , or one without a meaning.
Kind = enum.Enum("Kind", "WORD NUMBER STRING MARK END")


@dataclass(frozen=True, slots=True)
class Token:
    """A token. `line` and `column` count from 1. A STRING includes its quotes; without the closing one it ends at the line's end."""

    kind: Kind
    text: str
    line: int
    column: int


_TOKEN = re.compile(
    r"""(?:\s|\#.*)+
      | (?P<WORD>[a-zA-Z_][0-9a-zA-Z_+-]*)
      | (?P<NUMBER>(?:[0-9+-]|\.[0-9])[0-9a-zA-Z_.+-]*)
      | (?P<STRING>"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?$) | '[^'\\]*(?:\\.[^'\\]*)*(?:'|\\?$))
      | (?P<MARK>.)""",
    re.VERBOSE,
)


def tokens(text: str) -> list[Token]:
    """Return all tokens of a text, and an END after the last one. Any text has tokens; `parse` checks whether they make sense."""
    lines = text.split("\n")
    all_tokens = [
        Token(Kind[str(match.lastgroup)], match.group(), number, match.start() + 1)
        for number, line in enumerate(lines, 1)
        for match in _TOKEN.finditer(line)
        if match.lastgroup is not None
    ]
    return [*all_tokens, Token(Kind.END, "", len(lines), len(lines[-1]) + 1)]


# -- a position in the tokens of a file, and recovery after a mistake

MOST_MISTAKES = 100  # of one file; after that the file is probably something else
CLOSING = {"{": "}", "<": ">", "[": "]"}


class TooManyMistakes(Exception):
    """Stops the reading of a file."""


class Cursor:
    """A position in a file's tokens: `token` is the next one. Marks are compared by text, which no other token has."""

    def __init__(self, path: str, tokens: list[Token], problems: Problems) -> None:
        self.path = path
        self.tokens = tokens
        self.at = 0
        self.problems = problems

    @property
    def token(self) -> Token:
        return self.tokens[self.at]

    @property
    def at_end(self) -> bool:
        return self.token.kind is Kind.END

    def take(self) -> Token:
        token = self.token
        if not self.at_end:
            self.at += 1
        return token

    def took(self, *marks: str) -> bool:
        """Skip the next token if it is one of these marks; return whether it was."""
        if not self.looking_at(*marks):
            return False
        self.at += 1
        return True

    def looking_at(self, *marks: str) -> bool:
        return self.token.text in marks

    def span(self, token: Token) -> Span:
        return Span(self.path, token.line, token.column, max(1, len(token.text)))

    def fail(self, token: Token, message: str, hint: str = "") -> None:
        self.problems.add(self.span(token), message, hint)
        if self.problems.count(self.path) > MOST_MISTAKES:
            raise TooManyMistakes

    def instead(self) -> str:
        return ", but the file ends" if self.at_end else f", not `{shown(self.token.text)}`"

    def starts_field(self, *marks: str) -> bool:
        """Return whether a name comes next, followed by a mark that may follow a name."""
        return self.token.kind is Kind.WORD and self.tokens[self.at + 1].text in (":", "{", "<", *marks)

    def starts_line(self) -> bool:
        return self.at > 0 and self.tokens[self.at - 1].line != self.token.line

    def skip(self, closing: str = "") -> None:
        """Skip to the next name before a colon or brace, the next word that starts a line, the next closing brace, or the end; or past
        `closing`."""
        while not (self.at_end or self.looking_at("}", ">") or self.starts_field("=")):
            if self.took(closing) or (self.token.kind is Kind.WORD and self.starts_line()):
                return
            self.skip_one()

    def skip_one(self) -> None:
        """Skip a token, or a bracket and everything up to its closing bracket."""
        opening, depth = self.take(), 1
        if opening.text not in CLOSING:
            return
        while depth and not self.at_end:
            if opening.text == "[" and depth == 1 and self.starts_line() and self.starts_field("="):
                return  # a list that is not closed must not swallow the file
            if self.looking_at(*CLOSING):
                depth += 1
            elif self.looking_at(*CLOSING.values()):
                depth -= 1
            self.take()
        if depth:
            self.fail(opening, f"`{opening.text}` is never closed", f"add the missing `{CLOSING[opening.text]}`")


# -- string literals

_ESCAPES = dict(zip("abfnrtv\\'\"?", "\a\b\f\n\r\t\v\\'\"?", strict=True))
_ESCAPE = re.compile(r"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)


def unescape(text: str) -> bytes:
    r"""Return the bytes of the inside of a string literal. ValueError for an escape without a meaning: Python's text_format keeps its
    backslash (and accepts `\N{NAME}`), C++'s refuses it, and so does this.
    """

    def replace(match: re.Match[str]) -> str:
        octal, hexadecimal, short, long, other = match.groups()
        if other is not None:
            if other not in _ESCAPES:
                raise ValueError(f"`\\{other}` is not an escape sequence")
            return _ESCAPES[other]
        code = int(octal, 8) if octal else int(hexadecimal or short or long, 16)
        if short or long:
            if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
                raise ValueError(f"`{match.group()}` is not a character")
            return chr(code).encode().decode("latin-1")
        if code > 255:
            raise ValueError(f"`{match.group()}` is more than a byte")
        return chr(code)

    # One character per byte, so that \303\251 and a plain é can be mixed.
    return _ESCAPE.sub(replace, text.encode().decode("latin-1")).encode("latin-1")


# -- one token -> the value of a field, as google.protobuf.text_format reads it, but finite

INT64_MAX = 2**63 - 1
# The least and the largest whole number, and its bits. stagerun's fields are all INT64; Caffe's have several types.
INTEGERS = {
    FieldDescriptor.TYPE_INT64: (-(2**63), INT64_MAX, 64),
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1, 32),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1, 32),
}
# A float of Caffe's is also read as the number that is written.
NUMBERS = (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT)

_BOOLEANS = {**dict.fromkeys(("true", "t", "1", "True"), True), **dict.fromkeys(("false", "f", "0", "False"), False)}

WORDS = {
    **dict.fromkeys(INTEGERS, "a whole number"),
    **dict.fromkeys(NUMBERS, "a number"),
    FieldDescriptor.TYPE_BOOL: "`true` or `false`",
    FieldDescriptor.TYPE_STRING: "a text in quotes",
    FieldDescriptor.TYPE_MESSAGE: "a message",
}


PLAIN = "write a plain number: no `%`, no arithmetic"


class WrongValue(Exception):
    """The field can't have the value; the message starts with a verb, `is a whole number, not "2"`."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def read(field: FieldDescriptor, token: Token) -> Scalar:
    """Return the value of a whole number, number, BOOL or ENUM field. WrongValue."""
    text = token.text
    if token.kind is Kind.STRING:
        inside = text.strip("\"'")
        raise WrongValue(
            f"is {wanted(field)}, not a text in quotes", f"write `{field.name}: {inside}`" if inside else ""
        )
    if field.enum_type is not None:
        return _enum(field, text)
    if field.type in INTEGERS:
        return _integer(text, *INTEGERS[field.type])
    if field.type in NUMBERS:
        return _number(text)
    if text not in _BOOLEANS:
        raise WrongValue(f"is `true` or `false`, not `{shown(text)}`", nearest(text.lower(), ("true", "false")))
    return _BOOLEANS[text]


def wanted(field: FieldDescriptor) -> str:
    """Return the kind of a field's value, in words."""
    if field.enum_type is not None:
        return listing(_values(field))
    return "`{ name: value ... }`" if takes_arguments(field) else WORDS[field.type]


def _values(field: FieldDescriptor) -> list[str]:
    return [value.name for value in field.enum_type.values if not retired_value(value)]


def string(token: Token) -> bytes:
    """Return the bytes of a string literal. WrongValue."""
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
        raise WrongValue("is not UTF-8", "write the characters rather than their bytes") from None


def _integer(text: str, low: int, high: int, bits: int) -> int:
    try:
        value = int(re.sub("^(-?)0([0-9]+)$", r"\g<1>0o\2", text), 0)
    except ValueError:
        if len(text) > 4000 and text.strip("-").isdecimal():  # Python refuses longer numbers
            raise WrongValue(f"is too large for {bits} bits") from None
        raise WrongValue(f"is a whole number, not `{shown(text)}`", _whole(text)) from None
    if low == 0 and value < 0:
        raise WrongValue(f"must not be negative, not `{shown(text)}`")
    if not low <= value <= high:
        raise WrongValue(f"is too {'large' if value > 0 else 'small'} for {bits} bits")
    return value


def _whole(text: str) -> str:
    """Return a hint that writes a number such as 1e3 as a whole number."""
    try:
        number = _number(text)
    except WrongValue as wrong:
        return wrong.hint
    return f"write {int(number)}" if number.is_integer() and abs(number) < 1e18 else ""


def _number(text: str) -> float:
    if re.match("(?i)[+-]?(inf|infinity|nan)f?$", text):
        raise WrongValue(f"must be finite, not `{shown(text)}`")
    if re.match("-?0[0-9]", text):
        raise WrongValue(f"is a number, not `{shown(text)}`", "take the leading 0 off")
    try:
        value = float(text.rstrip("fF"))  # 1.0f
    except ValueError:
        hint = "write `carry { momentum: KEEP }`" if text == "KEEP" else PLAIN if text[0].isdecimal() else ""
        raise WrongValue(f"is a number, not `{shown(text)}`", hint) from None
    if not math.isfinite(value):
        raise WrongValue(f"must be finite: `{shown(text)}` is too large for a double")
    return value


def _enum(field: FieldDescriptor, text: str) -> str:
    kind = field.enum_type
    try:
        value = kind.values_by_name.get(text) or kind.values_by_number.get(int(text, 0))
    except ValueError:
        # A typo is TOPK for TOP_K, but not FP16 for FP64.
        hint = nearest(text.upper(), _values(field), cutoff=0.8) or f"values: {wanted(field)}"
        raise WrongValue(f"has no value `{shown(text)}`", hint) from None
    if value is None:
        raise WrongValue(f"has no value number {shown(text)}", f"values: {wanted(field)}")
    if hint := retired_value(value):
        raise WrongValue(f"had the value `{value.name}`, which was retired", hint)
    return str(value.name)


def shown(text: str) -> str:
    """Return a piece of the file for a message: printable and shortened."""
    cut = text if len(text) <= 40 else text[:37] + "..."
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in cut)
