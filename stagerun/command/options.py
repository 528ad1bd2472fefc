"""Commands whose options are written once: as a parameter of the command's function, or as a field of a dataclass that is one of its
parameters.

    Nproc = Annotated[int | None, option("--nproc N", "Workers on this machine.", least=1)]  # of several commands

    @dataclass(frozen=True)
    class RehearseOptions:
        folder: Folder
        nproc: Nproc = None
        workers: int | None = option("--workers N", "Estimate for a job of N workers.")

    @command()
    def rehearse(options: RehearseOptions) -> int:
        "The text of --help."

What click needs to know, the groups of --help, and the command line of a worker are derived from that. The type says whether an option is a
flag (bool) or can be repeated (tuple).
"""

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, is_dataclass, replace
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin

import click
from click.shell_completion import CompletionItem

from stagerun.base.errors import UsageError
from stagerun.command.ending import guarded

T = TypeVar("T")
_HERE = "parameter"  # the key in a field's metadata


@dataclass(frozen=True, slots=True)
class Parameter:
    """`settings` are click's own. `flag`: '' for an argument. `title`: the group of --help, in a command with groups. `least`: the
    smallest number allowed. `launcher`: workers don't get it. `word`: a value as it is written on the command line. Name, type and
    default value are those of the field, or of the function's parameter."""

    settings: dict[str, Any]
    flag: str = ""
    title: str = ""
    least: int | None = None
    launcher: bool = False
    word: Callable[[Any], str] = str
    name: str = ""
    kind: type = str
    default: Any = None

    @property
    def several(self) -> bool:
        return bool(self.settings.get("multiple")) or (self.kind is tuple and "type" not in self.settings)

    def for_click(self) -> click.Parameter:
        required = self.default is MISSING
        settings = {"required": required, **({} if required else {"default": self.default}), **self.settings}
        if not self.several and self.kind in (int, float, str):
            settings.setdefault("type", self.kind)
        if place := _place(str(settings.get("metavar", ""))):
            settings.setdefault("shell_complete", lambda ctx, param, word: [CompletionItem(word, type=place)])
        if "STAGE" in str(settings.get("metavar", "")):
            settings.setdefault("shell_complete", stage_word)
        if not self.flag:
            return click.Argument([self.name], **{"nargs": -1 if self.several else 1, **settings})
        if self.kind is bool:
            settings["is_flag"] = True
        elif self.several:
            settings["multiple"] = True
        elif self.default is not None:
            settings.setdefault("show_default", True)
        return click.Option([self.flag, self.name], **settings)


# Words of a metavar that stand for a folder, and for a file or either.
_FOLDERS = {"DIR", "FOLDER", "OUT", "LMDB", "SNAPSHOT", "A", "B"}
_FILES = {"FILE", "IMAGE", "SOURCE", "PATH"}


def _place(metavar: str) -> str:
    """What a shell completes there: `dir` or `file`; '' where it is something else.

    >>> _place("DIR"), _place("FOLDER|IMAGE..."), _place("STAGE.FIELD=VALUE")
    ('dir', 'file', '')
    """
    words = set(re.findall("[A-Z]+", metavar))
    return "file" if words & _FILES else "dir" if words & _FOLDERS else ""


def stage_word(ctx: click.Context, param: click.Parameter, word: str) -> list[CompletionItem]:
    """Stages of the schedule that was typed before, or their fields where the metavar says so."""
    from stagerun.command import completion

    # Where an option has no value yet, click leaves all arguments in `args`.
    folder, form = ctx.params.get("folder") or next(iter(ctx.args), None), param.make_metavar(ctx)
    if not isinstance(folder, str):
        return []
    if "." in form or "NAME" in form:
        return [CompletionItem(one) for one in completion.settings(folder, word, "=" if "=" in form else "")]
    return [CompletionItem(one) for one in completion.stage_names(folder) if one.startswith(word)]


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
    """`usage`: the flag and what stands for its value, `--nproc N`. `text`: of --help. `default`: MISSING for an option that must be given."""
    flag, _, metavar = usage.partition(" ")
    settings |= {"metavar": metavar} if metavar else {}
    found = Parameter({"help": text, **settings}, flag, title, least, launcher, word)
    return field(default=default, metadata={_HERE: found})


def flag(usage: str, text: str, **settings: Any) -> Any:
    return option(usage, text, default=False, **settings)


def argument(metavar: str, default: Any = MISSING, **settings: Any) -> Any:
    return field(default=default, metadata={_HERE: Parameter({"metavar": metavar, **settings})})


def declared(of: Callable[..., Any]) -> Iterator[Parameter]:
    """The parameters of a function, or fields of a dataclass, that are on the command line, and those of dataclasses among them."""
    for name, one in inspect.signature(of).parameters.items():
        if _nested(one):
            yield from declared(one.annotation)
        own = getattr(of, "__dataclass_fields__", {}).get(name, one.default)
        default = own.default if isinstance(own, Field) else MISSING if own is one.empty else own
        for each in (own, *getattr(one.annotation, "__metadata__", ())):
            if isinstance(each, Field) and _HERE in each.metadata:
                yield replace(each.metadata[_HERE], name=name, kind=_kind(one.annotation), default=default)


def _nested(one: inspect.Parameter) -> bool:
    """Whether it is a dataclass with parameters of its own."""
    return is_dataclass(one.annotation)


def _kind(annotation: Any) -> type:
    """`int` for `int | None`, `tuple` for `tuple[str, ...]`."""
    annotation = getattr(annotation, "__origin__", annotation) if hasattr(annotation, "__metadata__") else annotation
    if isinstance(annotation, UnionType):
        annotation = next(kind for kind in get_args(annotation) if kind is not NoneType)
    return get_origin(annotation) or annotation


def filled(of: Callable[..., T], values: Mapping[str, Any]) -> T:
    """Calls a function, or makes a dataclass, with its share of click's values."""
    share = {}
    for name, one in inspect.signature(of).parameters.items():
        share[name] = filled(one.annotation, values) if _nested(one) else values[name]
    return of(**share)


def arguments(options: Any, *names: str) -> list[str]:
    """The words of a command line that stand for `options`, apart from what is the default and what only a launcher needs; or those of the
    fields `names`."""
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
    """The flags of all that isn't the default."""
    return [one.flag for one in declared(type(options)) if getattr(options, one.name) != one.default]


def require_least(of: Callable[..., Any], values: Mapping[str, Any]) -> None:
    """UsageError with each number that is too small."""
    problems = []
    for one in declared(of):
        least, value, flag = one.least, values[one.name], one.flag
        if least is not None and value is not None and value < least:
            problems.append(f"{flag} must be {least} or more, and is {value}")
    if problems:
        raise UsageError("\n".join(problems))


_GOES_ON = "the same command goes on where a run stopped"
# What people of other programs, or of stagerun before 1.0, type; and what to type now.
_INSTEAD = {
    **dict.fromkeys(("--resume", "--continue", "--restart", "--snapshot"), _GOES_ON),
    "--workers-per-node": "with --hosts, --nproc is the number of workers on each",
    "--remote-python": "the hosts need this interpreter at the same path",
    **dict.fromkeys(
        ("--min-nodes", "--max-restarts"), "it was retired: `stagerun retry -- stagerun run DIR --hosts FILE`"
    ),
    "--sync-code": "it was retired: install stagerun on the hosts",
    "--watch": "it was retired: `stagerun view DIR` follows",
    "--paired": "it was retired: `stagerun report OUT --format csv` has the numbers",
    "--op": "it was retired: `stagerun report OUT... --by epoch --format csv` has the numbers",
    "--log-format": "it was retired: `stagerun report OUT --format caffe` writes Caffe's log",
    "--notify": "it was retired: `stagerun run DIR; COMMAND` runs COMMAND at the end, with the exit code in `$?`",
    "--images-per-second": "`stagerun plan DIR --images-per-second N --budget TIME` says how many allocations it takes",
    "--output": "`run` has --out; what other commands write goes to stdout: `> FILE`",
    "--csv": "it was retired: --json has the same",
    "--random": "it was retired: `--first K`; what `stagerun data import` writes is shuffled",
    **dict.fromkeys(
        ("--batch-size", "--device-batch-size", "--classes", "--train-source", "--val-source"),
        "it is a field of schedule.prototxt, also in what `import caffe` writes",
    ),
    "--lint": "findings are always shown, and fail with --strict",
    "--model": "the network is `model` in schedule.prototxt, also in what `import caffe` writes",
    "--keep": "it was retired: undo the edit of the stage, which `stagerun plan` names, or --redo the stage",
}


class Command(click.Command):
    """`titles`: the group in --help for each option that is in one. The others come first."""

    titles: dict[str, str]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name not in _INSTEAD:
                raise
            message = f"No such option {error.option_name!r}: {_INSTEAD[error.option_name]}"
            raise click.UsageError(message, ctx) from None

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
    """A decorator that makes a command of a function, which returns the exit code. `grouped`: with the titles of options in --help."""

    def decorate(function: Callable[..., int | None]) -> Command:
        @guarded
        @functools.wraps(function)
        def run(**values: Any) -> None:
            require_least(function, values)
            sys.exit(filled(function, values))

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
