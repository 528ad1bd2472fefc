"""The language server: mistakes, the manual, completion, formatting. Lines and characters count from 0."""

import asyncio
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from lsprotocol import types as lsp
from pygls.exceptions import JsonRpcException
from pygls.lsp.server import LanguageServer
from pygls.uris import from_fs_path, to_fs_path

import stagerun
from stagerun.base.errors import Level, Problem, Problems, RecipeError, Span, StagerunError, UsageError
from stagerun.base.recipe import Schedule
from stagerun.language import files_in, load, look_at_classes, look_at_folders, stage_nodes, tree
from stagerun.language.lexer import Kind, Token, TooManyMistakes, tokens
from stagerun.language.parse import Read, Reader, parse
from stagerun.language.ranges import CHOICES
from stagerun.language.resolve import SCHEDULE_FILE
from stagerun.language.stages import Node, names_of
from stagerun.language.tree import SCHEDULE, SOLVER, Value, is_message
from stagerun.manual.fields import enum_name, first_sentence, help_text, value_names, value_text
from stagerun.system.files import upward
from stagerun.tools.fmt import formatted
from stagerun.tools.lint import lint
from stagerun.tools.why import explained, full_name

Texts = Mapping[str, str]  # what the editor holds, by absolute path


@dataclass(slots=True)
class Look:
    """The result of `stagerun check` for a folder, with the texts of an editor. `schedule`: None if it has mistakes. `kinds`: Schedule or
    Solver, by absolute path. `nodes`: the stages, as far as schedule.prototxt can be read."""

    path: str
    texts: Texts
    schedule: Schedule | None = None
    problems: tuple[Problem, ...] = ()
    kinds: Mapping[str, Descriptor] = field(default_factory=dict)
    nodes: Sequence[Node] = ()


def folder_of(path: str, texts: Texts) -> str | None:
    """Return the nearest folder at or above a file that has a schedule.prototxt, on disk or in the editor."""
    for folder in upward(path):
        first = os.path.join(folder, SCHEDULE_FILE)
        if first in texts or os.path.isfile(first):
            return folder
    return None


def look(path: str, texts: Texts) -> Look:
    edited = {os.path.relpath(one, path): text.encode(errors="surrogatepass") for one, text in texts.items()}
    looked, first = Look(path, texts), os.path.join(path, SCHEDULE_FILE)
    try:
        files = files_in(path, edited)
        looked.nodes = stage_nodes(files[SCHEDULE_FILE])
        looked.kinds = {os.path.join(path, name): SOLVER for name in files} | {first: SCHEDULE}
        looked.schedule = schedule = load(path, (), edited)
        looked.problems = lint(schedule)
        if all(one.level is Level.NOTE for one in looked.problems):
            looked.problems += (*look_at_folders(schedule), *look_at_classes(schedule))
    except RecipeError as error:
        looked.problems = error.problems
    except StagerunError as error:
        looked.problems = (Problem(error.message, Span(first, 1, 1), "", error.hint),)
    return looked


def range_of(span: Span) -> lsp.Range:
    line, first = span.line - 1, span.column - 1
    return lsp.Range(lsp.Position(line, first), lsp.Position(line, first + span.width))


# -- what is at the cursor


@dataclass(slots=True)
class Target:
    """`path`: fields that lead to the message around the target. `messages`: kind and fields of each message, from the file inwards. `field`: its
    name (`is_name`) or value is at the target. `token`: what the cursor touches, '_' if it touches none; `typed`: the part
    before the cursor."""

    path: tuple[str, ...]
    messages: tuple[tuple[Descriptor, Read], ...]
    field: FieldDescriptor | None
    is_name: bool
    token: Token
    typed: str = ""


class _Finder(Reader):
    """The parser of the language, which notes what it reads at one token."""

    def __init__(self, words: list[Token], cursor: int) -> None:
        super().__init__("", words, Problems())
        self.cursor, self.names, self.messages = cursor, list[str](), list[tuple[Descriptor, Read]]()
        self.target: Target | None = None

    def fields(self, kind: Descriptor, opening: Token | None, read: Read, doubtful: set[str]) -> bool:
        self.messages.append((kind, read))
        broken = super().fields(kind, opening, read, doubtful)
        self.messages.pop()
        return broken

    def field(self, kind: Descriptor, read: Read, doubtful: set[str]) -> None:
        self._note(kind.fields_by_name.get(self.token.text), True)
        super().field(kind, read, doubtful)

    def value(self, field: FieldDescriptor, name: Span, listed: bool = False) -> Value | None:
        self._note(field, False)
        self.names.append(field.name)
        value = super().value(field, name, listed)
        self.names.pop()
        return value

    def _note(self, field: FieldDescriptor | None, is_name: bool) -> None:
        if self.at == self.cursor:
            self.target = Target(tuple(self.names), tuple(self.messages), field, is_name, self.token)


def target_at(text: str, kind: Descriptor, line: int, character: int) -> Target | None:
    """Return None in a comment, and where the parser skips what it can't read."""
    words, cursor = tokens(text), (line + 1, character + 1)
    number = next(n for n, token in enumerate(words) if not _is_before(token, cursor))
    token = words[number]
    if token.kind in (Kind.MARK, Kind.END) or (token.line, token.column) > cursor:
        begin = words[number - 1].column - 1 if number and words[number - 1].line == line + 1 else 0
        before = text.split("\n")[line][begin:character]
        if "#" in re.sub(r"\"[^\"]*\"|'[^']*'", "", before):
            return None
        token = Token(Kind.WORD, "_", *cursor)
        words.insert(number, token)
    finder = _Finder(words, number)
    with suppress(TooManyMistakes):
        finder.block(kind, Span("", 1, 1), None)
    if finder.target is not None:
        finder.target.typed = token.text[: cursor[1] - token.column]
    return finder.target


def _is_before(token: Token, cursor: tuple[int, int]) -> bool:
    """Return whether a token ends before the cursor, and what is typed at the cursor doesn't belong to it."""
    last = token.line, token.column + len(token.text)
    closed = token.kind is Kind.STRING and len(token.text) > 1 and token.text[-1] == token.text[0]
    return token.kind is not Kind.END and (last < cursor or (last == cursor and (closed or token.kind is Kind.MARK)))


def hover_text(looked: Look, path: str, target: Target) -> str:
    """Return the manual of the field or value at the cursor, or `plan --why` if the schedule loads; '' for anything else."""
    held, word = target.field, target.token.text
    if held is None or word == "_":
        return ""
    if held.enum_type is not None and not target.is_name and word in held.enum_type.values_by_name:
        return value_text(held.enum_type, word)
    words = [*target.path, held.name]
    if looked.kinds[path] is not SCHEDULE:
        file = os.path.relpath(path, looked.path)
        words = [next((node.group or node.name for node in looked.nodes if node.file == file), ""), *words]
    elif target.path[:1] == ("stage",):
        name = target.messages[1][1].get("name")
        words = [word for word in words[1:] if word not in ("sweep", "solver", "solver_param")]
        words = [str(name[2][0].value) if name else "", *words]
    if looked.schedule is not None and words[0]:
        with suppress(UsageError):  # a field inside a list of messages, the name of a stage
            return explained(looked.schedule, ".".join(words))
    return help_text(full_name(held))


# -- completion


def proposals(looked: Look, text: str, target: Target) -> Iterator[lsp.CompletionItem]:
    """Return all that can be written at a target. The editor compares that with what is typed."""
    held, token = target.field, target.token
    first, line = token.column - 1, token.line - 1
    quote = target.typed[:1] if token.kind is Kind.STRING else ""
    behind, words = "", dict[str, str]()  # with what the manual says
    if target.is_name:
        kind, written = target.messages[-1]
        rest = text.split("\n")[line][first + len(token.text) * (token.text != "_") :].lstrip()
        for one in tree.fields(kind):
            if one.is_repeated or one is held or one.name not in written:
                end = " { " if is_message(one) else ": "
                name = one.name + ("" if rest.startswith((":", "{", "<")) else end)
                words[name] = first_sentence(full_name(one))
    elif held is None or (token.kind is Kind.STRING and not quote):  # before the quotes
        return
    elif held.enum_type is not None:
        words = {name: first_sentence(f"{enum_name(held.enum_type)}.{name}") for name in value_names(held)}
    elif held.type == FieldDescriptor.TYPE_BOOL:
        words = {"true": "", "false": ""}
    else:
        name = full_name(held)
        stages = name in ("StageEntry.from", "Sweep.from", "Ensemble.members", "LossParameter.teacher")
        texts = names_of(looked.nodes) if stages else CHOICES.get(name, ())
        behind = "" if quote and token.text[1:].endswith(quote) else quote or '"'
        words = {(quote or '"') + word: "" for word in texts}
    typed = range_of(Span("", token.line, token.column, len(target.typed)))
    for number, (word, manual) in enumerate(words.items()):
        edit, order = lsp.TextEdit(typed, word + behind), f"{number:04}"
        label = word.strip("\"' {:")
        yield lsp.CompletionItem(label, documentation=manual or None, text_edit=edit, sort_text=order, filter_text=word)


# -- the conversation with an editor

DELAY_S = 0.05  # until a change is checked, so that typing queues no work
_SEVERITY = {
    Level.MISTAKE: lsp.DiagnosticSeverity.Error,
    Level.WARNING: lsp.DiagnosticSeverity.Warning,
    Level.NOTE: lsp.DiagnosticSeverity.Information,
}


class Server(LanguageServer):
    """The texts that an editor holds, and the checks of their folders."""

    def __init__(self) -> None:
        # Whole texts: pygls splits lines at more characters than editors do.
        super().__init__("stagerun", stagerun.__version__, lsp.TextDocumentSyncKind.Full)
        self._looks: dict[str, Look] = {}  # by folder
        self._shown: set[str] = set()  # files with diagnostics
        self._timer: asyncio.TimerHandle | None = None

    def look(self, path: str) -> Look | None:
        """Return the check of a file's folder, which is made once after each change; None for a file of no schedule."""
        texts = {path: one.source for one in self.workspace.text_documents.values() if (path := path_of(one.uri))}
        folder = folder_of(path, texts)
        if folder is None:
            return None
        if folder not in self._looks:
            self._looks[folder] = look(folder, texts)
        return self._looks[folder]

    def change(self) -> None:
        self._looks.clear()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(DELAY_S, self._publish)

    def _publish(self) -> None:
        """Show the problems of all schedules with an open file."""
        shown: dict[str, list[lsp.Diagnostic]] = defaultdict(list)
        uris = {path_of(uri): uri for uri in self.workspace.text_documents}
        for looked in {one.path: one for path in uris if path and (one := self.look(path))}.values():
            for problem in looked.problems:
                message = "\nhint: ".join(filter(None, (problem.message, problem.hint)))
                diagnostic = lsp.Diagnostic(
                    range_of(problem.span), message, _SEVERITY[problem.level], source="stagerun"
                )
                shown[problem.span.path].append(diagnostic)
        for path in self._shown | shown.keys():
            uri = uris.get(path) or from_fs_path(path) or ""
            self.text_document_publish_diagnostics(lsp.PublishDiagnosticsParams(uri, shown[path]))
        self._shown = {path for path, diagnostics in shown.items() if diagnostics}

    def at(self, params: Any) -> tuple[Look, Target, str] | None:
        """Return what is at a position, with the path of the file; None outside the files of a schedule, and in comments."""
        path, position = path_of(params.text_document.uri), params.position
        looked = self.look(path)
        if looked is None or path not in looked.kinds:
            return None
        target = target_at(looked.texts[path], looked.kinds[path], position.line, position.character)
        return (looked, target, path) if target is not None else None

    def report_server_error(self, error: Exception, source: Any) -> None:
        """Show an error in a window, but not that the server lacks what an editor asks for."""
        if not isinstance(error, JsonRpcException):
            super().report_server_error(error, source)


def path_of(uri: str) -> str:
    """Return the absolute path; '' for anything but a file."""
    path = to_fs_path(uri) if uri.startswith("file://") else ""
    return os.path.normpath(path) if path else ""


server = Server()


def serve() -> None:
    """Serve until the editor leaves. Whatever else is printed goes to stderr: one such line would end the conversation."""
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        server.start_io(sys.stdin.buffer, answers)


@server.feature(lsp.TEXT_DOCUMENT_DID_OPEN)
@server.feature(lsp.TEXT_DOCUMENT_DID_CHANGE)
@server.feature(lsp.TEXT_DOCUMENT_DID_SAVE)
@server.feature(lsp.TEXT_DOCUMENT_DID_CLOSE)
def change(params: Any) -> None:
    server.change()


@server.feature(lsp.TEXT_DOCUMENT_FORMATTING)
def formatting(params: lsp.DocumentFormattingParams) -> list[lsp.TextEdit]:
    path, problems = path_of(params.text_document.uri), Problems()
    looked = server.look(path)
    if looked is None or path not in looked.kinds:
        return []
    text = looked.texts[path]
    parse(path, text, looked.kinds[path], problems)
    whole = lsp.Range(lsp.Position(0, 0), lsp.Position(text.count("\n") + 1, 0))
    return [] if problems else [lsp.TextEdit(whole, formatted(text))]


@server.feature(lsp.TEXT_DOCUMENT_HOVER)
def hover(params: lsp.HoverParams) -> lsp.Hover | None:
    if (at := server.at(params)) is None:
        return None
    looked, target, path = at
    text = hover_text(looked, path, target).replace(looked.path + os.sep, "")
    return lsp.Hover(lsp.MarkupContent(lsp.MarkupKind.Markdown, f"~~~~\n{text}\n~~~~")) if text else None


@server.feature(lsp.TEXT_DOCUMENT_COMPLETION, lsp.CompletionOptions(trigger_characters=['"', ":", " "]))
def completion(params: lsp.CompletionParams) -> list[lsp.CompletionItem]:
    if (at := server.at(params)) is None:
        return []
    looked, target, path = at
    return list(proposals(looked, looked.texts[path], target))
