"""Text -> tokens of protobuf's text format, each with its place; a cursor over them; token -> value. Pure.

The tokens are those of google.protobuf.text_format, so that what this parser accepts means the same there. What is
refused here alone is said in `unescape` and in `parse`.
"""

import enum
import math
import re
from dataclasses import dataclass

from google.protobuf.descriptor import FieldDescriptor

from stagerun.base.errors import Problems, Span, listing, nearest
from stagerun.language.tree import Scalar, retired_value, takes_arguments

# A MARK is a single character: { } < > [ ] : ; , and whatever has no meaning.
Kind = enum.Enum("Kind", "WORD NUMBER STRING MARK END")


@dataclass(frozen=True, slots=True)
class Token:
    """`line` and `column` count from 1. A STRING has its quotes; without the closing one it ends at the line's end."""

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
    """All tokens of a text, and an END after the last one. Any text has tokens; `parse` says whether they make sense."""
    lines = text.split("\n")
    found = [
        Token(Kind[str(match.lastgroup)], match.group(), number, match.start() + 1)
        for number, line in enumerate(lines, 1)
        for match in _TOKEN.finditer(line)
        if match.lastgroup is not None
    ]
    return [*found, Token(Kind.END, "", len(lines), len(lines[-1]) + 1)]


# -- a place in the tokens of a file, and how to go on behind a mistake

MOST_MISTAKES = 100  # of one file; after that the file is probably something else
CLOSING = {"{": "}", "<": ">", "[": "]"}


class TooManyMistakes(Exception):
    """The rest of the file is not read."""


class Cursor:
    """`token` is the next one. Mistakes go to `problems`. A mark is known by its text, which no other token
    has."""

    def __init__(self, path: str, found: list[Token], problems: Problems) -> None:
        self.path = path
        self.tokens = found
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
        """Go past the next token if it is one of these marks."""
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
        return ", but here is the end" if self.at_end else f", not `{shown(self.token.text)}`"

    def starts_field(self, *marks: str) -> bool:
        """Whether a name comes next, followed by what may follow a name."""
        return self.token.kind is Kind.WORD and self.tokens[self.at + 1].text in (":", "{", "<", *marks)

    def starts_line(self) -> bool:
        return self.at > 0 and self.tokens[self.at - 1].line != self.token.line

    def skip(self, closing: str = "") -> None:
        """To the next name before a colon or brace, the next word that starts a line, the next closing brace, or the end; or past
        `closing`."""
        while not (self.at_end or self.looking_at("}", ">") or self.starts_field("=")):
            if self.took(closing) or (self.token.kind is Kind.WORD and self.starts_line()):
                return
            self.skip_one()

    def skip_one(self) -> None:
        """Past a token, or past a bracket and everything up to the one that closes it."""
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
    r"""The bytes that the inside of a string literal means. ValueError, with what is wrong, for an escape that has no
    meaning: Python's text_format keeps its backslash (and takes `\N{NAME}`), C++'s refuses it, and so does this.
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

    # One character per byte, so that \303\251 and a plain é may stand side by side.
    return _ESCAPE.sub(replace, text.encode().decode("latin-1")).encode("latin-1")


# -- one token -> the value of a field, as google.protobuf.text_format reads it, but finite

INT64_MAX = 2**63 - 1
# The least and the largest whole number, and its bits. stagerun's own are all INT64; Caffe's are of several types.
INTEGERS = {
    FieldDescriptor.TYPE_INT64: (-(2**63), INT64_MAX, 64),
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1, 32),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1, 32),
}
# A float of Caffe's is read as the number that is written, too.
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
    """A value that the field can't have: the message starts with a verb, `is a whole number, not "2"`."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def read(field: FieldDescriptor, token: Token) -> Scalar:
    """The value of a whole number, number, BOOL or ENUM field. WrongValue if the token doesn't have one."""
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
    """What a field's value is, in words."""
    if field.enum_type is not None:
        return listing(_values(field))
    return "`{ name: value ... }`" if takes_arguments(field) else WORDS[field.type]


def _values(field: FieldDescriptor) -> list[str]:
    return [value.name for value in field.enum_type.values if not retired_value(value)]


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


def _integer(text: str, low: int, high: int, bits: int) -> int:
    try:
        value = int(re.sub("^(-?)0([0-9]+)$", r"\g<1>0o\2", text), 0)
    except ValueError:
        if len(text) > 4000 and text.strip("-").isdecimal():  # Python reads no longer ones
            raise WrongValue(f"is too large for {bits} bits") from None
        raise WrongValue(f"is a whole number, not `{shown(text)}`", _whole(text)) from None
    if low == 0 and value < 0:
        raise WrongValue(f"must not be negative, not `{shown(text)}`")
    if not low <= value <= high:
        raise WrongValue(f"is too {'large' if value > 0 else 'small'} for {bits} bits")
    return value


def _whole(text: str) -> str:
    """How to write a number such as 1e3 as a whole one, as a hint."""
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
        # A slip of the pen, TOPK for TOP_K: FP16 is no slip for FP64.
        hint = nearest(text.upper(), _values(field), cutoff=0.8) or f"known: {wanted(field)}"
        raise WrongValue(f"has no value `{shown(text)}`", hint) from None
    if value is None:
        raise WrongValue(f"has no value number {shown(text)}", f"known: {wanted(field)}")
    if hint := retired_value(value):
        raise WrongValue(f"had the value `{value.name}`, which was retired", hint)
    return str(value.name)


def shown(text: str) -> str:
    """A piece of the file for use in a message: only what prints, and shortened."""
    cut = text if len(text) <= 40 else text[:37] + "..."
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in cut)
