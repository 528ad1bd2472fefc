"""Mistakes in the lists that come with images, as problems with places: the first 20 of a file, at once."""

from collections.abc import Iterator

from stagerun.errors import Problem, RecipeError, Span

MOST_MISTAKES = 20
_LONGEST_SHOWN = 200


def lines(text: str) -> Iterator[tuple[int, str]]:
    """(number, line) of all that isn't blank. Lines end in newlines alone: a name may hold any other character."""
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line.rstrip(" \t\r")


def shown(text: str) -> str:
    """Without characters that a terminal would act upon, one for one."""
    text = text[:_LONGEST_SHOWN]
    return "".join(c if c.isprintable() or c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def problem_at(path: str, number: int, line: str, at: int, message: str, hint: str) -> Problem:
    """A problem with the word of a line that begins at index `at`."""
    width = len(line[at:].split(None, 1)[0]) if line[at:].strip() else 1
    return Problem(message, Span(path, number, at + 1, width), shown(line) if at < _LONGEST_SHOWN else "", hint)


def stop(problems: list[Problem]) -> None:
    """Raises them, if there are any; the one above MOST_MISTAKES only says that there are more."""
    if len(problems) > MOST_MISTAKES:
        last = problems[MOST_MISTAKES]
        more = Problem(
            f"more than {MOST_MISTAKES} mistakes; the rest is not shown", last.span, "", "is it such a list?"
        )
        problems = [*problems[:MOST_MISTAKES], more]
    if problems:
        raise RecipeError(problems)
