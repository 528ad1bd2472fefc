"""Text -> tokens of protobuf's text format, each with its place. Pure.

The tokens are those of google.protobuf.text_format, so that what this parser accepts means the same there. What is
refused here alone is said in `unescape` and in `parse`.
"""

import enum
import re
from dataclasses import dataclass


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
    """All tokens of a text and an END after the last one. Any text has tokens; what they are worth, `parse` says."""
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
                raise ValueError(f"`\\{other}` is no escape sequence")
            code = _ESCAPES[other]
        elif short or long:
            code = int(short or long, 16)
            if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
                raise ValueError(f"`{match.group()}` is no character")
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
        raise ValueError("half of a surrogate pair is no character") from None
    return _ESCAPE.sub(replace, raw).encode("latin-1")
