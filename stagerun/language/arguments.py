"""Arguments of a function of the user's: `{ depths: [2, 2] drop_path_rate: 0.1 }`. One text for the same arguments, sorted by name. Pure."""

import keyword
import math
from collections.abc import Mapping

from stagerun.language import lexer
from stagerun.language.lexer import Kind, Token, WrongValue, tokens
from stagerun.language.tree import quoted

Scalar = bool | int | float | str
Argument = Scalar | tuple[Scalar, ...]


def scalar(token: Token) -> Scalar:
    """WrongValue for what is neither a number, `true`, `false`, nor a text in quotes."""
    if token.kind is Kind.STRING:
        return lexer.utf8(lexer.string(token))
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
    what = lexer.shown(token.text)
    hint = f'write `"{what}"`' if token.kind is Kind.WORD else ""
    raise WrongValue(f"is a number, `true`, `false` or a text in quotes, not `{what}`", hint)


def require_name(name: str) -> None:
    """WrongValue for what can't be the name of an argument."""
    if not name.isidentifier() or keyword.iskeyword(name):
        raise WrongValue("can't be the name of an argument", "letters, digits and `_` can be in it")


def written(arguments: Mapping[str, Argument]) -> str:
    """`{ depths: [2, 2] drop_path_rate: 0.1 }`"""
    return "".join(["{ ", *(f"{name}: {_text(arguments[name])} " for name in sorted(arguments)), "}"])


def _text(value: Argument) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return quoted(value) if isinstance(value, str) else repr(value)


def read(text: str | None) -> dict[str, Argument]:
    """The arguments that `written` wrote; of None there are none. ValueError for another text."""
    found: dict[str, Argument] = {}
    if text is None:
        return found
    words = tokens(text)
    if [words[0].text, words[-2].text if len(words) > 1 else ""] != ["{", "}"]:
        raise ValueError("arguments are not in braces")
    rest = words[1:-2]
    try:
        while rest:
            name, colon, value, *rest = rest
            require_name(name.text)
            if colon.text != ":":
                raise ValueError(f"no value of `{name.text}`")
            if value.text != "[":
                found[name.text] = scalar(value)
                continue
            end = next(i for i, token in enumerate(rest) if token.text == "]")
            found[name.text] = tuple(scalar(token) for token in rest[:end] if token.text != ",")
            rest = rest[end + 1 :]
    except (WrongValue, StopIteration) as error:
        raise ValueError(f"arguments that can't be read: {error}") from None
    return found
