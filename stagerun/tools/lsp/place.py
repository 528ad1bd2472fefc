"""A place in a solver file: as editors count it and as the language does, what stands there, and in which message. Pure.

Works on tokens alone, since a file that someone types in has mistakes most of the time.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from stagerun.base.errors import Span
from stagerun.language.lexer import Kind, Token, tokens
from stagerun.language.tree import is_message

_LINE_END = re.compile("\r\n|\n|\r")
_BOM = "\N{BYTE ORDER MARK}"
_OPENING, _CLOSING = ("{", "<"), ("}", ">")


_CODECS = {
    "utf-8": ("utf-8", 1),
    "utf-16": ("utf-16-le", 2),
    "utf-32": ("utf-32-le", 4),
}  # with the bytes of a code unit


def _units(text: str, encoding: str) -> int:
    """The length of a text in the code units that the editor counts."""
    codec, size = _CODECS[encoding]
    return len(text.encode(codec, "surrogatepass")) // size


class Text:
    """A text with three ways to name a place: an offset, the language's line and column from 1, which a \\n ends and a byte order mark
    doesn't count in, and the editor's line and code units from 0, which a \\r ends, too."""

    def __init__(self, text: str, encoding: str = "utf-16") -> None:
        self.text = text
        self._encoding = encoding
        self._mark = len(_BOM) if text.startswith(_BOM) else 0
        self._own = [self._mark, *(match.end() for match in re.finditer("\n", text))]
        self._editors = [0, *(match.end() for match in _LINE_END.finditer(text))]

    def offset(self, line: int, column: int) -> int:
        start = self._own[min(line, len(self._own)) - 1]
        end = self.text.find("\n", start)
        return min(start + column - 1, end if end >= 0 else len(self.text))

    def ends(self, span: Span) -> tuple[int, int]:
        """The offsets of a span, which may be said to go on behind its line."""
        return self.offset(span.line, span.column), self.offset(span.line, span.column + span.width)

    def position(self, offset: int) -> tuple[int, int]:
        line = next(n for n in reversed(range(len(self._editors))) if self._editors[n] <= offset)
        return line, _units(self.text[self._editors[line] : offset], self._encoding)

    def at(self, line: int, units: int) -> int:
        """The offset of an editor's place; the line's or the text's end for one behind it."""
        if line >= len(self._editors):
            return len(self.text)
        offset = self._editors[line]
        while units > 0 and offset < len(self.text) and self.text[offset] not in "\r\n":
            units -= _units(self.text[offset], self._encoding)
            offset += 1
        return offset

    def tokens(self) -> list[Token]:
        return tokens(self.text[self._mark :])

    def of(self, token: Token) -> tuple[int, int]:
        start = self.offset(token.line, token.column)
        return start, start + len(token.text)


@dataclass(frozen=True, slots=True)
class Around:
    """A message around a place. `name`: of the field that holds it, '' for the file. `kind`: None where the field isn't one of a
    message. `first`: the index of its first token."""

    name: str
    kind: Descriptor | None
    first: int


@dataclass(frozen=True, slots=True)
class Place:
    """`around`: from the file inwards. `token`: the one that the cursor touches, with what stands to its left as `typed`. `field`: the one whose
    name (`is_name`) or value that is; where nothing is touched, the one that wants a value."""

    around: tuple[Around, ...]
    token: Token | None
    typed: str
    field: FieldDescriptor | None
    is_name: bool

    @property
    def path(self) -> tuple[str, ...]:
        """The fields that lead there, its own included."""
        return (*(one.name for one in self.around[1:]), *((self.field.name,) if self.field is not None else ()))


def place_at(text: Text, kind: Descriptor, offset: int) -> Place | None:
    """None inside of a comment."""
    found = text.tokens()[:-1]
    before = [token for token in found if text.of(token)[1] < offset or _ends_at(text, token, offset)]
    here = found[len(before)] if len(before) < len(found) else None
    touched = here if here is not None and text.of(here)[0] <= offset and here.kind is not Kind.MARK else None
    gap = text.of(before[-1])[1] if before else 0
    if touched is None and "#" in text.text[max(gap, text.text.rfind("\n", 0, offset) + 1) : offset]:
        return None
    walk = _Walk(kind, found)
    for number in range(len(before)):
        walk.past(number)
    is_name = walk.wants_name(len(before)) if touched is not None else walk.field is None
    around = walk.belonging(touched.text if touched is not None and is_name else "")
    field = walk.field
    if is_name:
        inner = around[-1].kind
        field = inner.fields_by_name.get(touched.text) if inner is not None and touched is not None else None
    typed = text.text[text.of(touched)[0] : offset] if touched is not None else ""
    return Place(around, touched, typed, field, is_name)


def _ends_at(text: Text, token: Token, offset: int) -> bool:
    """Whether a cursor behind the token touches it no more: a mark, or a text in quotes that is closed."""
    closed = token.kind is Kind.STRING and len(token.text) > 1 and token.text[-1] == token.text[0]
    return text.of(token)[1] == offset and (token.kind is Kind.MARK or closed)


class _Walk:
    """The messages that are open, and the field that has begun, after some tokens."""

    def __init__(self, kind: Descriptor, found: Sequence[Token]) -> None:
        self._found = found
        self._around = [Around("", kind, 0)]
        self._name = ""  # of the field that has begun
        self._colon = False
        self._lists: list[tuple[int, str]] = []  # (messages around it, field) of each list that is open
        marks = [token.text for token in found if token.kind is Kind.MARK]
        self._unclosed = sum(m in _OPENING for m in marks) - sum(m in _CLOSING for m in marks)

    @property
    def field(self) -> FieldDescriptor | None:
        """The field that wants a value."""
        inner = self._around[-1].kind
        return inner.fields_by_name.get(self._name) if inner is not None and self._colon else None

    def wants_name(self, number: int) -> bool:
        """Whether token `number` is the name of a field, after those before it."""
        following = self._found[number + 1] if number + 1 < len(self._found) else None
        begins = following is not None and following.kind is Kind.MARK and following.text in (":", *_OPENING)
        return self._found[number].kind is Kind.WORD and (begins or not self._colon)

    def belonging(self, name: str) -> tuple[Around, ...]:
        """The messages around a field: where a brace is missing, the innermost that has such a one."""
        around = tuple(self._around)
        for size in range(len(around), 0, -1) if self._unclosed > 0 else ():
            inner = around[size - 1].kind
            if inner is not None and name in inner.fields_by_name:
                return around[:size]
        return around

    def past(self, number: int) -> None:
        token = self._found[number]
        if token.kind is Kind.MARK:
            self._mark(token.text, number)
        elif self.wants_name(number):
            self._around = list(self.belonging(token.text))
            self._name, self._colon = token.text, False
        elif not self._listed:
            self._name, self._colon = "", False

    @property
    def _listed(self) -> bool:
        return bool(self._lists) and self._lists[-1][0] == len(self._around)

    def _mark(self, mark: str, number: int) -> None:
        if mark in _OPENING:
            outer = self._around[-1].kind
            field = outer.fields_by_name.get(self._name) if outer is not None else None
            inner = field.message_type if field is not None and is_message(field) else None
            self._around.append(Around(self._name, inner, number + 1))
            self._name, self._colon = "", False
        elif mark in _CLOSING and len(self._around) > 1:
            self._around.pop()
            self._lists = [one for one in self._lists if one[0] <= len(self._around)]
            self._name, self._colon = (self._lists[-1][1], True) if self._listed else ("", False)
        elif mark == "[" and self._name:
            self._lists.append((len(self._around), self._name))
            self._colon = True
        elif mark == "]" and self._listed:
            self._lists.pop()
            self._name, self._colon = "", False
        elif mark == ":":
            self._colon = bool(self._name)


def fields_in(found: Sequence[Token], around: Around) -> Iterator[tuple[Token, Token | None]]:
    """(name, first token of the value) of each field of a message, up to its closing brace."""
    depth = 0
    for number in range(around.first, len(found)):
        token = found[number]
        opens = token.kind is Kind.MARK and token.text in (*_OPENING, "[")
        closes = token.kind is Kind.MARK and token.text in (*_CLOSING, "]")
        depth += opens - closes
        if depth < 0:
            return
        following = found[number + 1 : number + 3]
        if depth == 0 and token.kind is Kind.WORD and following and following[0].text in (":", *_OPENING):
            yield token, following[1] if len(following) > 1 else None


def text_in(token: Token | None) -> str:
    """The inside of a text in quotes, closed or not; '' for another token."""
    if token is None or token.kind is not Kind.STRING:
        return ""
    return token.text[1:].removesuffix(token.text[0])
