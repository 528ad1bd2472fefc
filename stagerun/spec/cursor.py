"""Walking over tokens, and going on after a mistake. Alive while one file is read."""

from stagerun.errors import Span
from stagerun.spec.lexer import Kind, Token
from stagerun.spec.problems import Problems
from stagerun.spec.scalars import shown

MOST_MISTAKES = 100  # of one file; after that the file is probably something else

CLOSING = {"{": "}", "<": ">", "[": "]"}


class TooManyMistakes(Exception):
    """The rest of the file is not read."""


class Cursor:
    """A place in the tokens of a file, and where its mistakes go."""

    def __init__(self, path: str, found: list[Token], problems: Problems) -> None:
        self.path = path
        self.tokens = found
        self.at = 0
        self.problems = problems

    @property
    def token(self) -> Token:
        return self.tokens[self.at]

    def take(self) -> Token:
        token = self.token
        if token.kind is not Kind.END:
            self.at += 1
        return token

    def took(self, *marks: str) -> bool:
        if self.token.kind is Kind.MARK and self.token.text in marks:
            self.at += 1
            return True
        return False

    def looking_at(self, *marks: str) -> bool:
        return self.token.kind is Kind.MARK and self.token.text in marks

    def span(self, token: Token) -> Span:
        return Span(self.path, token.line, token.column, max(1, len(token.text)))

    def fail(self, place: Token | Span, message: str, hint: str = "") -> None:
        self.problems.add(place if isinstance(place, Span) else self.span(place), message, hint)
        if self.problems.count(self.path) > MOST_MISTAKES:
            raise TooManyMistakes

    def instead(self) -> str:
        if self.token.kind is Kind.END:
            return ", but here is the end"
        return f", not `{shown(self.token.text)}`"

    def starts_field(self) -> bool:
        """Whether a name and what follows a name is next."""
        following = self.tokens[min(self.at + 1, len(self.tokens) - 1)]
        return self.token.kind is Kind.WORD and following.kind is Kind.MARK and following.text in (":", "{", "<", "=")

    def may_start_field(self) -> bool:
        """Whether to go on reading here: a field, or a word at the start of a line."""
        first = self.at > 0 and self.tokens[self.at - 1].line != self.token.line
        return self.starts_field() or (first and self.token.kind is Kind.WORD)

    def skip_value(self) -> None:
        """Past what may be the value of a field that can't be read, up to the next field."""
        if self.looking_at("{", "<", "["):
            self.skip_nested()
        self.skip()

    def skip(self) -> None:
        """To the next name before a colon or brace, the next closing brace, or the end."""
        while self.token.kind is not Kind.END and not self.may_start_field() and not self.looking_at("}", ">"):
            if self.looking_at("{", "<", "["):
                self.skip_nested()
            else:
                self.take()

    def skip_list(self) -> None:
        """Out of a list in which something is wrong: past its bracket, or to the next field."""
        while self.token.kind is not Kind.END and not self.may_start_field() and not self.looking_at("}", ">"):
            if self.took("]"):
                return
            if self.looking_at("{", "<", "["):
                self.skip_nested()
            else:
                self.take()

    def skip_nested(self) -> None:
        """Past a bracket and everything up to the one that closes it."""
        opening = self.take()
        depth = 1
        while depth and self.token.kind is not Kind.END:
            if (
                opening.text == "["
                and self.starts_field()
                and self.tokens[self.at - 1].line != self.token.line
                and depth == 1
            ):
                return  # a list that is not closed must not swallow the file
            if self.looking_at("{", "<", "["):
                depth += 1
            elif self.looking_at("}", ">", "]"):
                depth -= 1
            self.take()
        if depth:
            self.fail(opening, f"`{opening.text}` is never closed", f"add the missing `{CLOSING[opening.text]}`")
