"""What an import finds on its way: mistakes, and what is not carried over. Alive while one folder is read."""

from dataclasses import dataclass

from stagerun.errors import Problems, Span


@dataclass(frozen=True, slots=True)
class Left:
    """Something that the written folder does not say as Caffe's did: `what`, usually a field, why, and what the user can do."""

    span: Span
    what: str
    why: str
    todo: str = ""

    def __str__(self) -> str:
        place = f"{self.span.path}:{self.span.line}" if self.span.line else self.span.path
        return f"{place}: {self.what}: {self.why}" + (f"; {self.todo}" if self.todo else "")


class Findings:
    """`mistakes` stop the import. `left` is listed in its output and in the head of schedule.prototxt, `idle` too: fields,
    by name, without which nothing is lost, and why."""

    def __init__(self) -> None:
        self.mistakes = Problems()
        self.left: list[Left] = []
        self.idle: dict[str, str] = {}

    def leave(self, span: Span, what: str, why: str, todo: str = "") -> None:
        found = Left(span, what, why, todo)
        if found not in self.left:  # a net that five solvers name is looked at five times
            self.left.append(found)
