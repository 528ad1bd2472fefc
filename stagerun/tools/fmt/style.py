"""A solver file in one style, its comments kept. Pure.

Lines stay where the author broke them, except that a message or list of several lines has its brackets at the ends of lines. Two spaces per
level, one between fields. Neighbouring messages with the same fields stand in columns, and so do comments behind neighbouring lines.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise

from stagerun.language.lexer import CLOSING, Kind, Token, tokens

COMMENT_COLUMN = 34  # of comments behind short lines, from 0
_CLOSERS = tuple(CLOSING.values())
_BRACES = {"<": "{", ">": "}"}


@dataclass(slots=True)
class _Line:
    """`depth`: of the brackets of several lines around it. `comment`: behind the tokens, or alone. `spaced`: a blank line comes before."""

    depth: int
    tokens: list[Token] = field(default_factory=list)
    comment: str = ""
    spaced: bool = False


def formatted(text: str) -> str:
    """The file in that style, for a text in which `parse` finds no mistake. It means the same; formatted again, it stays as it is."""
    text = text.removeprefix("\N{BYTE ORDER MARK}")
    found = tokens(text)[:-1]
    several = _of_several_lines(found)
    lines = _lines(list(_needed(found)), _comments(text, found), several)
    rows = ["  " * line.depth + row for line, row in zip(lines, _in_columns(lines), strict=True)]
    result = ""
    before: _Line | None = None
    for line, row in zip(lines, _with_comments(lines, rows), strict=True):
        inner = before is not None and not (
            before.tokens and before.tokens[-1] in several and _opens(before.tokens[-1])
        )
        blank = line.spaced and inner and not (line.tokens and line.tokens[0] in several and _closes(line.tokens[0]))
        result += "\n" * blank + row + "\n"
        before = line
    assert meaning(result) == meaning(text), "a formatter may not change what a file says"
    return result


def meaning(text: str) -> list[str]:
    """The tokens, without what may be left out or written in two ways: separators of fields, the colon before a message, quotes."""
    return [_shown(token) for token in _needed(tokens(text)[:-1])]


def _shown(token: Token) -> str:
    text = token.text
    if token.kind is Kind.STRING and text[0] == "'" and not any(c in text for c in '"\\'):
        return f'"{text[1:-1]}"'
    return _BRACES.get(text, text) if token.kind is Kind.MARK else text


def _opens(token: Token) -> bool:
    return token.kind is Kind.MARK and token.text in CLOSING


def _closes(token: Token) -> bool:
    return token.kind is Kind.MARK and token.text in _CLOSERS


def _needed(found: Sequence[Token]) -> Iterator[Token]:
    """Without separators outside of lists, and colons before messages."""
    around = [""]
    for token, following in pairwise((*found, Token(Kind.END, "", 0, 0))):
        if _opens(token):
            around.append(token.text)
        elif _closes(token):
            around.pop()
        elif token.kind is Kind.MARK and (
            (token.text in ",;" and around[-1] != "[") or (token.text == ":" and following.text in _BRACES | {"{": ""})
        ):
            continue
        yield token


def _of_several_lines(found: Sequence[Token]) -> set[Token]:
    """The brackets whose partner is on another line."""
    found_ones: set[Token] = set()
    opened: list[Token] = []
    for token in found:
        if _opens(token):
            opened.append(token)
        elif _closes(token) and (opening := opened.pop()).line != token.line:
            found_ones |= {opening, token}
    return found_ones


def _comments(text: str, found: Sequence[Token]) -> dict[int, str]:
    """By line, from 1: from its `#` on, or '' for a blank line."""
    ends = {token.line: token.column - 1 + len(token.text) for token in found}
    lines = {number: line[ends.get(number, 0) :].strip() for number, line in enumerate(text.split("\n"), 1)}
    # What is left besides a comment is a separator.
    return {
        n: rest[rest.find("#") :] if "#" in rest else "" for n, rest in lines.items() if "#" in rest or n not in ends
    }


def _lines(needed: Sequence[Token], comments: dict[int, str], several: set[Token]) -> list[_Line]:
    by_line = {number: list(group) for number, group in groupby(needed, key=lambda token: token.line)}
    lines: list[_Line] = []
    depth = 0
    last: Token | None = None
    blank = False
    for number in sorted({*by_line, *comments}):
        for token in by_line.get(number, ()):
            depth -= token in several and _closes(token)
            here = lines[-1] if lines else None
            if (
                last is not None
                and here is not None
                and here.tokens
                and not here.comment
                and _joined(last, token, several)
            ):
                here.tokens.append(token)
            else:
                inside = 2 * (last is not None and _unfinished(last, token))
                lines.append(_Line(depth + inside, [token], spaced=blank))
            depth += token in several and _opens(token)
            last, blank = token, False
        comment = comments.get(number)
        if comment and number in by_line:
            lines[-1].comment = comment
        elif comment:
            lines.append(_Line(depth, comment=comment, spaced=blank))
        blank = not comment and comment is not None
    return lines


def _joined(last: Token, token: Token, several: set[Token]) -> bool:
    """Whether a token belongs on the line of the one before it."""
    if token.kind is Kind.MARK and token.text in ":,":
        return True
    if last in several or (token in several and _closes(token)):
        return False
    return last.line == token.line or (_unfinished(last, token) and last.kind is not Kind.STRING)


def _unfinished(last: Token, token: Token) -> bool:
    """Whether a field that has begun goes on with this token."""
    if last.kind is Kind.STRING:
        return token.kind is Kind.STRING
    return last.text == ":" or (last.kind is Kind.WORD and _opens(token))


def _row(found: Sequence[Token]) -> str:
    text = ""
    for n, token in enumerate(found):
        text += _shown(token)
        following = found[n + 1] if n + 1 < len(found) else None
        if (
            following is not None
            and token.text != "["
            and not (following.kind is Kind.MARK and following.text in ":,]")
        ):
            text += " "
    return text


def _cells(line: _Line) -> list[list[Token]]:
    """The fields of a message that stands on one line by itself, between its name with the brace and the closing one; else nothing."""
    found = line.tokens
    if len(found) < 3 or found[0].kind is not Kind.WORD or found[1].text not in _BRACES | {"{": ""}:
        return []
    cells: list[list[Token]] = [list(found[:2])]
    depth = 1
    for token, following in pairwise(found[2:]):
        depth += _opens(token) - _closes(token)
        if not depth:
            return []
        if depth == 1 and token.kind is Kind.WORD and (following.text == ":" or _opens(following)):
            cells.append([])
        cells[-1].append(token)
    return [*cells, [found[-1]]] if depth == 1 and _closes(found[-1]) else []


def _in_columns(lines: Sequence[_Line]) -> list[str]:
    cells = [_cells(line) for line in lines]
    kinds = [
        (line.depth, *(row[0].text for row in one)) if one else None for line, one in zip(lines, cells, strict=True)
    ]
    rows: list[str] = []
    for at, line in enumerate(lines):
        if kinds[at] is None:
            rows.append(_row(line.tokens))
        elif at and kinds[at] == kinds[at - 1] and not line.spaced:
            continue  # written with the first of its neighbours
        else:
            end = next((n for n in range(at + 1, len(lines)) if kinds[n] != kinds[at] or lines[n].spaced), len(lines))
            rows += _table([[_row(cell) for cell in one] for one in cells[at:end]])
    return rows


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Each field as wide as the widest of its column, but for the last."""
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-2]]
    return [" ".join([*map(str.ljust, row, widths), *row[-2:]]) for row in rows]


def _with_comments(lines: Sequence[_Line], rows: Sequence[str]) -> Iterator[str]:
    at = 0
    for n, (line, row) in enumerate(zip(lines, rows, strict=True)):
        if not line.comment or not line.tokens:
            yield row + line.comment
            continue
        if not (n and lines[n - 1].comment and lines[n - 1].tokens and not line.spaced):
            end = next(
                (m for m in range(n, len(lines)) if not _beside(lines[m]) or (m > n and lines[m].spaced)), len(lines)
            )
            at = max(COMMENT_COLUMN, *(len(one) + 2 for one in rows[n:end]))
        yield row.ljust(at) + line.comment


def _beside(line: _Line) -> bool:
    return bool(line.comment and line.tokens)
