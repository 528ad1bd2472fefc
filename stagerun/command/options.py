"""Commands whose options are written once: as a parameter of the command's function, or as a field of a dataclass that is one of its
parameters. Shared options are `Annotated[TYPE, option(...)]`.

    @command()
    def rehearse(folder: Folder, workers: int | None = option("--workers N", "Estimate for a job of N workers.")) -> int:
        "The text of --help."

What click needs to know, the groups of --help, and the command line of a worker are derived from that. The type says whether an option is a
flag (bool) or can be repeated (tuple).
"""

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, replace
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin

import click
from click.shell_completion import CompletionItem

from stagerun.command.ending import end_with

T = TypeVar("T")
_HERE = "parameter"  # the key in a field's metadata


@dataclass(frozen=True, slots=True)
class Parameter:
    """`settings`: click's. `flag`: '' for an argument. `title`: the group of --help, in a command with groups. `launcher`: workers don't get
    it. `word`: formats a value for the command line. Name, type and default come from the field, or the function's parameter."""

    settings: dict[str, Any]
    flag: str = ""
    title: str = ""
    launcher: bool = False
    word: Callable[[Any], str] = str
    name: str = ""
    kind: type = str
    default: Any = None

    @property
    def several(self) -> bool:
        return bool(self.settings.get("multiple")) or (self.kind is tuple and "type" not in self.settings)

    def for_click(self) -> click.Parameter:
        settings: dict[str, Any] = {"required": self.default is MISSING, "shell_complete": _completed}
        if self.default is not MISSING:
            settings["default"] = self.default
        if not self.several and self.kind in (int, float, str):
            settings["type"] = self.kind
        if not self.flag:
            return click.Argument([self.name], **settings | {"nargs": -1 if self.several else 1} | self.settings)
        if self.kind is bool or self.several:
            settings["is_flag" if self.kind is bool else "multiple"] = True
        elif self.default is not None and self.default is not MISSING:
            settings["show_default"] = True
        return click.Option([self.flag, self.name], **settings | self.settings)


# Words of a metavar that stand for a folder, and for a file or either.
_FOLDERS = {"DIR", "FOLDER", "OUT", "LMDB", "SNAPSHOT", "A", "B"}
_FILES = {"FILE", "IMAGE", "SOURCE", "PATH"}


def _completed(ctx: click.Context, param: click.Parameter, word: str) -> list[CompletionItem]:
    """Complete files and folders, or stages and fields of the typed schedule, by the metavar."""
    form = param.make_metavar(ctx)
    words = set(re.findall("[A-Z]+", form))
    if "STAGE" not in words:
        kind = "file" if words & _FILES else "dir" if words & _FOLDERS else ""
        return [CompletionItem(word, type=kind)] if kind else param.type.shell_complete(ctx, param, word)
    from stagerun.language import disk

    # Where an option has no value yet, click leaves all arguments in `args`.
    folder = ctx.params.get("folder") or next(iter(ctx.args), None)
    return [CompletionItem(one) for one in disk.words(folder, form, word)] if isinstance(folder, str) else []


def option(
    usage: str,
    text: str,
    *,
    default: Any = None,
    title: str = "",
    least: int | None = None,
    launcher: bool = False,
    word: Callable[[Any], str] = str,
    **settings: Any,
) -> Any:
    """`usage`: flag and metavar, `--nproc N`. `text`: for --help. `default`: MISSING for a required option. `least`: the smallest number
    allowed."""
    flag, _, metavar = usage.partition(" ")
    settings |= {"metavar": metavar} if metavar else {}
    settings |= {"type": click.IntRange(least)} if least is not None else {}
    parameter = Parameter({"help": text, **settings}, flag, title, launcher, word)
    return field(default=default, metadata={_HERE: parameter})


def flag(usage: str, text: str, **settings: Any) -> Any:
    return option(usage, text, default=False, **settings)


def argument(metavar: str, default: Any = MISSING, **settings: Any) -> Any:
    return field(default=default, metadata={_HERE: Parameter({"metavar": metavar, **settings})})


def declared(of: Callable[..., Any]) -> Iterator[Parameter]:
    """Yield the command-line parameters of a function or dataclass, including nested dataclasses."""
    for name, one in inspect.signature(of).parameters.items():
        if hasattr(one.annotation, "__dataclass_fields__"):
            yield from declared(one.annotation)
        value = getattr(of, "__dataclass_fields__", {}).get(name, one.default)
        default = value.default if isinstance(value, Field) else MISSING if value is one.empty else value
        for each in (value, *getattr(one.annotation, "__metadata__", ())):
            if isinstance(each, Field) and _HERE in each.metadata:
                yield replace(each.metadata[_HERE], name=name, kind=_kind(one.annotation), default=default)


def _kind(annotation: Any) -> type:
    """Return `int` for `int | None`, `tuple` for `tuple[str, ...]`."""
    annotation = getattr(annotation, "__origin__", annotation) if hasattr(annotation, "__metadata__") else annotation
    if isinstance(annotation, UnionType):
        annotation = next(kind for kind in get_args(annotation) if kind is not NoneType)
    return get_origin(annotation) or annotation


def filled(of: Callable[..., T], values: Mapping[str, Any]) -> T:
    """Call a function, or make a dataclass, with its share of click's values."""
    share = {}
    for name, one in inspect.signature(of).parameters.items():
        share[name] = (
            filled(one.annotation, values) if hasattr(one.annotation, "__dataclass_fields__") else values[name]
        )
    return of(**share)


def arguments(options: Any, *names: str) -> list[str]:
    """Return the command line of `options`, without defaults and options of the launcher; or of the fields `names` alone."""
    words: list[str] = []
    for one in declared(type(options)):
        value = getattr(options, one.name)
        if one.name not in names if names else one.launcher or value == one.default:
            continue
        flag = [one.flag] if one.flag else []
        if one.kind is bool:
            words += flag if value else []
        else:
            each = value if one.several else () if value is None else (value,)
            words += [word for item in each for word in (*flag, one.word(item))]
    return words


def given(options: Any) -> list[str]:
    """Return the flags whose values aren't the default."""
    return [one.flag for one in declared(type(options)) if getattr(options, one.name) != one.default]


class Command(click.Command):
    """`titles`: the groups of options in --help. Options without a group come first."""

    titles: dict[str, str]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {"Options": []}
        for one in self.get_params(ctx):
            if isinstance(one, click.Option) and (record := one.get_help_record(ctx)) is not None:
                groups.setdefault(self.titles.get(one.name or "", "Options"), []).append(record)
        for title, rows in groups.items():
            with formatter.section(title):
                formatter.write_dl(rows)


def command(
    name: str = "", *, grouped: bool = False, **settings: Any
) -> Callable[[Callable[..., int | None]], Command]:
    """Decorate a function, which returns the exit code, as a command. `grouped`: group options by title in --help."""

    def decorate(function: Callable[..., int | None]) -> Command:
        @functools.wraps(function)
        def run(**values: Any) -> None:
            try:
                sys.exit(filled(function, values))
            except (click.exceptions.Exit, click.ClickException, click.Abort, SystemExit):
                raise
            except BaseException as error:
                end_with(error)

        params = list(declared(function))
        made = Command(
            name or function.__name__,
            callback=run,
            params=[one.for_click() for one in params],
            help=inspect.getdoc(function),
            **settings,
        )
        made.titles = {one.name: one.title for one in params if grouped and one.title}
        return made

    return decorate
