"""Arguments of a function of the user's: `{ depths: [2, 2] drop_path_rate: 0.1 }`. One text for the same arguments, sorted by name. Pure."""

import keyword
import math
from collections.abc import Container, Iterator, Mapping
from contextlib import suppress

from stagerun.base.errors import Problems, Span
from stagerun.language.lexer import Cursor, Kind, Token, TooManyMistakes, WrongValue, shown, string, tokens, utf8
from stagerun.language.tree import Scalar, literal

Argument = Scalar | tuple[Scalar, ...]


def parse(cursor: Cursor, opening: Token) -> Iterator[tuple[str, Argument, Span]]:
    """Yield (name, value, span) of the arguments after the brace `opening`, up to its closing brace or the end. Report the wrong ones and
    read the others."""
    names = set[str]()
    while not cursor.took("}"):
        if cursor.at_end:
            cursor.fail(opening, "`{` is never closed", "add the missing `}`")
            return
        name = cursor.take()
        try:
            value = _value(cursor, name.text, names)
            names.add(name.text)
            cursor.took(",", ";")
            yield name.text, value, cursor.span(name)
        except WrongValue as wrong:
            cursor.fail(name, f"`{shown(name.text)}` {wrong.message}", wrong.hint)
            while not cursor.at_end and not cursor.starts_field("=") and not cursor.looking_at("}"):
                cursor.skip_one()


def _value(cursor: Cursor, name: str, names: Container[str]) -> Argument:
    """Read the colon and the value of an argument whose name is taken. WrongValue."""
    if not name.isidentifier() or keyword.iskeyword(name):
        raise WrongValue("can't be the name of an argument", "letters, digits and `_` can be in it")
    if name in names:
        raise WrongValue("is set twice", "remove one")
    if not cursor.took(":") and not cursor.looking_at("{"):
        raise WrongValue("has no value", f"write `{shown(name)}: ...`")
    if cursor.looking_at("{"):
        raise WrongValue("is a message, which arguments can't hold", "write a number, a text or a list")
    if not cursor.took("["):
        return scalar(cursor.take())
    values: list[Scalar] = []
    while not cursor.took("]"):
        values.append(scalar(cursor.take()))
        if not cursor.took(",") and not cursor.looking_at("]"):
            raise WrongValue("is a list that is not closed, or has no comma", "write `[2, 2]`")
    return tuple(values)


def scalar(token: Token) -> Scalar:
    """Read a number, `true`, `false` or a text in quotes. WrongValue."""
    if token.kind is Kind.STRING:
        return utf8(string(token))
    if token.kind is Kind.WORD and token.text in ("true", "false"):
        return token.text == "true"
    if token.kind is Kind.NUMBER:
        for kind in (int, float):
            try:
                value = kind(token.text)
            except ValueError:
                continue
            if not math.isfinite(value):
                raise WrongValue("must be finite")
            return value
    what = shown(token.text)
    hint = f'write `"{what}"`' if token.kind is Kind.WORD else ""
    raise WrongValue(f"is a number, `true`, `false` or a text in quotes, not `{what}`", hint)


def written(arguments: Mapping[str, Argument]) -> str:
    """Return `{ depths: [2, 2] drop_path_rate: 0.1 }`."""
    return "".join(["{ ", *(f"{name}: {literal(arguments[name])} " for name in sorted(arguments)), "}"])


def read(text: str | None) -> dict[str, Argument]:
    """Read the text of `written`; None has no arguments. ValueError for another text."""
    if text is None:
        return {}
    problems = Problems()
    cursor = Cursor("", tokens(text), problems)
    opening = cursor.take()
    arguments: dict[str, Argument] = {}
    with suppress(TooManyMistakes):
        arguments = {name: value for name, value, _ in parse(cursor, opening)}
    if problems or opening.text != "{" or not cursor.at_end:
        raise ValueError(": ".join(["arguments that can't be read", *(p.message for p in problems.all()[:1])]))
    return arguments
