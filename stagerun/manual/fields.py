"""`stagerun help`: the manual of fields from the comments of stagerun.proto, topics and pages."""

import re
import sys
import textwrap
from collections.abc import Collection, Iterator, Mapping
from importlib import import_module
from pathlib import Path

import click
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor

from stagerun.base.errors import UsageError, nearest
from stagerun.base.proto import comments, stagerun_pb2
from stagerun.command.ending import show, width_of
from stagerun.command.options import argument, command
from stagerun.language import tree
from stagerun.language.layers import partner
from stagerun.language.ranges import CHOICES, RETIRED
from stagerun.language.tree import is_message

# -- pages

FOLDER = Path(__file__).parent
WIDEST = 110  # columns; longer lines are hard to read

PAGES = {
    "getting-started": "install, train a first schedule; commands, networks, the gallery",
    "your-own-images": "import a folder of pictures, make a schedule for them, transforms, rare classes",
    "fine-tuning": "weights from a file, another run or a published network; freezing; a network per stage",
    "your-own-network": "a network from a Python file, a package or timm",
    "designing": "stages, branches, learning rates; what `check`, `plan` and `rehearse` show before a run",
    "running-and-resuming": "workers, signals, snapshots, exit codes; what happens after a kill or an edit",
    "many-machines": "ssh, MPI, Slurm, Kubernetes; cores, scratch disks",
    "reports": "tables, the page of `view`, evaluation, predictions, export",
    "losses": "binary, distilled and Python losses, several labels, early stopping, FixRes",
    "compression": "compressed gradients, replicas that synchronise, asynchronous workers",
    "trackers": "wandb, writing a tracker, notifications",
    "editor": "the language server for VS Code, Neovim, Helix, Emacs; formatting",
    "library": "`import stagerun`: load, plan, run, report and snapshots in scripts and notebooks",
    "caffe": "importing Caffe's solver files, nets, weights and solver states",
    "reliability": "which faults are survived, and how that is tested",
    "measured": "every figure, with the command that measured it",
    "internals": "the map of the code, and where to add what",
}

_PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")


def page_name(words: str) -> str:
    """Return the page that `words` name, with hyphens, spaces or underscores, or ''."""
    name = "-".join(re.split(r"[\s_-]+", words.strip().lower()))
    return name if name in PAGES else ""


def page_text(name: str) -> str:
    """Return the Markdown of a page, with each picture as its caption and file."""
    text = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    return _PICTURE.sub(lambda picture: f"[{picture[1]}: {FOLDER / picture[2]}]", text).rstrip("\n")


def print_page(name: str) -> None:
    """Print a page on a terminal, laid out and in colour."""
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    console.print(Markdown(_LINK.sub(_typed, page_text(name))), width=min(console.width, WIDEST))


def _typed(link: re.Match[str]) -> str:
    """Return a link for a terminal: another page as the command that shows it."""
    name = link[2].removesuffix(".md")
    return f"`stagerun help {name}`" if name in PAGES else link[0]


# -- topics: words of users that name no field. A page of the same name comes first. The first line of each has its names, in lower case.
_TEXT = (FOLDER / "topics.txt").read_text(encoding="utf-8")

TOPICS = {entry.split(",")[0].split("\n")[0]: entry for entry in _TEXT.strip().split("\n\n")}
WORDS = {word: topic for topic, entry in TOPICS.items() for word in entry.split("\n")[0].split(", ")}


def topic_text(name: str) -> str:
    """Return the topic of a word or a few, or ''."""
    topic = WORDS.get(" ".join(name.lower().replace("-", " ").replace("_", " ").split()), "")
    return "\n".join([topic, *TOPICS[topic].split("\n")[1:]]) if topic else ""


# -- fields

# Comments about changes of a file's content: "makes no snapshot stale" would be about its name alone.
_FILE = re.compile("file of the same bytes|change of the file")

_TYPES = {
    FieldDescriptor.TYPE_INT64: "whole number",
    FieldDescriptor.TYPE_DOUBLE: "number",
    FieldDescriptor.TYPE_BOOL: "true or false",
    FieldDescriptor.TYPE_STRING: "text in quotes",
}


def help_text(name: str) -> str:
    """Return the manual of a field (`base_lr`, `Solver.base_lr`, `transform_param.crop_size`, `solver.base_lr`), a message or
    an enum, of the field that has such a value (`poly_cyc`, `LARS`), or of a topic (`resume`); an overview for ''. A name of
    several messages prints all. `weight decay` and `adam` work, too. UsageError for an unknown name.
    """
    if not name:
        return _overview()
    messages = {m.name: m for m in _messages()}
    enums = {enum_name(e): e for e in _enums()}
    if name in messages:
        return _message(messages[name])
    for candidate, kind in enums.items():
        if name in (candidate, kind.name):
            return _enum(kind)
    *path, last = name.split(".")
    fields = [
        f for m in messages.values() for f in m.fields if f.name == last and (not path or path[-1] in _holders(m))
    ]
    gone = [f"{f.containing_type.name}.{f.name} was retired: {hint}" for f in fields if (hint := tree.retired(f))]
    named = [kind.values_by_name[name] for kind in _enums() if name in kind.values_by_name]
    gone += [f"{name} was retired: {hint}" for value in named if (hint := tree.retired_value(value))]
    gone += [f"{name} was retired: {texts[name]}" for texts in RETIRED.values() if name in texts]
    if gone and not any(not tree.retired(f) for f in fields):
        return "\n".join(gone)
    fields = [f for f in fields if not tree.retired(f)]
    if fields and (len(path) < 2 or _follows(path, last)):
        return "\n\n".join(_field(f) for f in fields)
    meant = [key for key, values in CHOICES.items() if name in values]  # a policy, a solver type, a network
    meant += [f"{m.name}.{f.name}" for m in messages.values() for f in tree.fields(m) if name in value_names(f)]
    if meant:
        return "\n\n".join(help_text(key) for key in meant)
    if topic := topic_text(name):
        return topic
    everything = [*PAGES, *messages, *enums, *WORDS, *(f.name for m in messages.values() for f in m.fields)]
    everything += [f"{m.name}.{f.name}" for m in messages.values() for f in tree.fields(m)]
    values = {value for m in messages.values() for f in tree.fields(m) for value in value_names(f)}
    spelled = "_".join(re.split(r"[\s_-]+", name.strip().lower()))
    for candidate in [*everything, *(value for values in CHOICES.values() for value in values), *sorted(values)]:
        if candidate.lower() == spelled and candidate != name:
            return help_text(candidate)
    raise UsageError(f"the manual has no `{name}`", nearest(name, everything) or "`stagerun help` lists all words")


def value_names(field: FieldDescriptor) -> list[str]:
    """Return the values of an enum that a field accepts."""
    if field.enum_type is None:
        return []
    return [v.name for v in field.enum_type.values if not tree.retired_value(v) and v.name not in refused(field)]


def _messages() -> list[Descriptor]:
    return list(stagerun_pb2.DESCRIPTOR.message_types_by_name.values())


def _enums() -> Iterator[EnumDescriptor]:
    yield from stagerun_pb2.DESCRIPTOR.enum_types_by_name.values()
    for message in _messages():
        yield from message.enum_types


def enum_name(kind: EnumDescriptor) -> str:
    return f"{kind.containing_type.name}.{kind.name}" if kind.containing_type else str(kind.name)


def _holders(message: Descriptor) -> set[str]:
    """Return the names allowed before the dot: of the message, and of fields that hold it."""
    return {message.name, *(f.name for m in _messages() for f in m.fields if f.message_type is message)}


def _follows(path: list[str], last: str) -> bool:
    """Return whether a name of three or more words leads from field to field: `solver.transform_param.pad`."""
    at = [m for m in _messages() if path[0] in _holders(m)]
    for word in [*path[1:], last]:
        fields = [f for m in at for f in m.fields if f.name == word]
        at = [f.message_type for f in fields if is_message(f)]
        if not fields:
            return False
    return True


def _type(field: FieldDescriptor) -> str:
    if is_message(field):
        base = str(field.message_type.name)
    elif field.enum_type is not None:
        base = ", ".join(value_names(field))
    else:
        base = _TYPES[field.type]
    return f"{base}, any number of times" if field.is_repeated else base


def _head(field: FieldDescriptor) -> str:
    value = tree.default(field)
    default = "" if value is None else f"   default: {tree.canonical(value, field)}"
    return f"{field.containing_type.name}.{field.name}   {_type(field)}{default}"


def _indented(name: str, margin: str = "  ") -> str:
    return "\n".join((margin + line).rstrip() for line in comments().get(name, "").split("\n"))


def _field(field: FieldDescriptor) -> str:
    name = f"{field.containing_type.name}.{field.name}"
    text = f"{_head(field)}\n{_indented(name)}"
    if other := partner(field):
        text += f"\n  See `{other}`: set one of the two."
    if not tree.identity(field) and not _FILE.search(" ".join(comments().get(name, "").split())):
        text += "\n  Changing it makes no snapshot stale."
    if is_message(field):
        text += f"\n  Its fields: `stagerun help {field.message_type.name}`."
    if field.enum_type is not None:
        text += "\n" + _values(field.enum_type, refused(field))
    return text


# Fields with a method of compression, and the methods that they refuse.
REFUSED = {"CompressionParameter.allow": {"NONE", "AUTO"}, "CompressionRule.method": {"AUTO"}}


def refused(field: FieldDescriptor) -> set[str]:
    """Return the values of its enum that a field refuses."""
    return REFUSED.get(f"{field.containing_type.name}.{field.name}", set())


def value_text(kind: EnumDescriptor, value: str) -> str:
    """Return the manual of one value of an enum."""
    name = f"{enum_name(kind)}.{value}"
    return f"{name}\n{_indented(name)}".rstrip()


def _values(kind: EnumDescriptor, but: Collection[str] = ()) -> str:
    lines = []
    for value in kind.values:
        if value.name in but or tree.retired_value(value):
            continue
        comment = comments().get(f"{enum_name(kind)}.{value.name}", "").replace("\n", "\n      ")
        lines.append(f"    {value.name}" + (f"\n      {comment}" if comment else ""))
    return "\n".join(lines)


def _message(message: Descriptor) -> str:
    width = max(len(f.name) for f in tree.fields(message))
    lines = [message.name, _indented(message.name), ""]
    lines += [
        f"  {f.name:{width}}  {first_sentence(f'{message.name}.{f.name}') or _type(f)}" for f in tree.fields(message)
    ]
    return "\n".join(lines)


def _enum(kind: EnumDescriptor) -> str:
    name = enum_name(kind)
    comment = f"{_indented(name)}\n" if name in comments() else ""
    return f"{name}\n{comment}{_values(kind)}"


def _overview() -> str:
    messages = {m.name: first_sentence(m.name) for m in _messages()}
    topics = textwrap.wrap(", ".join(TOPICS), 118, initial_indent="  ", subsequent_indent="  ")
    return "\n".join(
        [
            "Pages of the manual; `stagerun help PAGE` shows one:",
            "",
            *_columns(PAGES),
            "",
            "Messages of the solver files; `stagerun help NAME` prints one, or one of their fields:",
            "",
            *_columns(messages),
            "",
            "Topics, also under other names; `stagerun help lint` lists the rules of the linter:",
            "",
            *topics,
        ]
    )


def _columns(entries: Mapping[str, str]) -> list[str]:
    width = max(map(len, entries))
    return [f"  {name:{width}}  {says}" for name, says in entries.items()]


def first_sentence(name: str) -> str:
    """Return the comment's first sentence on one line."""
    text = " ".join(comments().get(name, "").split())
    return re.split(r"(?<!\.)\. ", text)[0].rstrip(".:")  # not in `0 .. 9`


@command("help")
def help_command(words: tuple[str, ...] = argument("[PAGE|TOPIC|FIELD]", default=())) -> None:
    """Show a page of the manual (`designing`, `many-machines`), or explain a field, message or enum of the solver files, or a topic (`own
    images`, `resume`, `freeze`). `lint` lists the rules of the linter. Without a word: an overview."""
    name = " ".join(words)
    if page := page_name(name):
        if width_of(sys.stdout) is None:
            show(page_text(page))
        else:
            print_page(page)
        return
    if name == "lint":  # a tool's: the trunk imports it by name alone
        show(import_module("stagerun.tools.lint").rules_text())
        return
    try:
        show(help_text(name))
    except UsageError:
        commands = click.get_current_context().obj
        matched = next((path for path in commands if name in (path, path.split()[-1])), None)
        if matched is None:
            raise
        show(f"{matched}: {commands[matched] or f'a command; `stagerun {matched} --help` says what it does'}")
