"""The server: what the editor says and asks, in the protocol's values; the texts that it holds, and when they are looked at. Effects.

A folder is looked at a moment after the last key press, so that typing queues no work; a question is answered for the text as it is.
"""

import asyncio
import os
import sys
import traceback
from collections.abc import Iterable
from typing import Any

from lsprotocol import types as lsp
from pygls.exceptions import JsonRpcException
from pygls.lsp.server import LanguageServer
from pygls.uris import from_fs_path, to_fs_path

import stagerun
from stagerun.base.errors import Problem, Problems, Span, UsageError
from stagerun.language.parse import parse
from stagerun.tools.fmt.style import formatted
from stagerun.tools.lsp import names
from stagerun.tools.lsp.actions import fix
from stagerun.tools.lsp.complete import proposals
from stagerun.tools.lsp.folder import Folder, folder_of, look
from stagerun.tools.lsp.hints import beside
from stagerun.tools.lsp.hover import hover_text
from stagerun.tools.lsp.place import Place, Text, folds, place_at

DELAY_S = 0.05  # after a key press
_KINDS = {
    "field": lsp.CompletionItemKind.Field,
    "value": lsp.CompletionItemKind.EnumMember,
    "stage": lsp.CompletionItemKind.Reference,
    "file": lsp.CompletionItemKind.File,
}


class Server(LanguageServer):
    def __init__(self) -> None:
        # Whole texts: pygls finds the places of changes in lines that other characters end, too.
        super().__init__("stagerun", stagerun.__version__, lsp.TextDocumentSyncKind.Full)
        self._waiting: dict[str, asyncio.TimerHandle] = {}
        self._shown: dict[str, set[str]] = {}  # the files of each folder that have diagnostics
        self._looked: dict[str, tuple[dict[str, str], Folder]] = {}

    # -- texts

    @property
    def typed(self) -> dict[str, str]:
        """What the editor holds, by absolute path."""
        documents = self.workspace.text_documents.values()
        return {path: one.source for one in documents if (path := _path(one.uri))}

    def text(self, path: str) -> Text:
        """As the editor holds it, or else as it is on disk; empty where it can't be read."""
        text = self.typed.get(path)
        if text is None:
            try:
                with open(path, encoding="utf-8", errors="replace", newline="") as file:
                    text = file.read()
            except OSError:
                text = ""
        encoding = str(getattr(self.workspace.position_encoding, "value", self.workspace.position_encoding) or "utf-16")
        return Text(text, encoding)

    def uri(self, path: str) -> str:
        """As the editor writes it, for a file that it holds."""
        documents = self.workspace.text_documents.values()
        known = (one.uri for one in documents if _path(one.uri) == path)
        return next(known, None) or from_fs_path(path) or ""

    def folder(self, path: str) -> Folder | None:
        """The folder of a file, looked at; once for the same texts."""
        typed = self.typed
        place = folder_of(path, typed)
        if place is None:
            return None
        known = self._looked.get(place)
        if known is None or known[0] != typed:
            known = self._looked[place] = typed, look(place, typed)
        return known[1]

    # -- diagnostics

    def changed(self, uri: str, delay: float = 0.0, reread: bool = True) -> None:
        """The folder of the file will be looked at. `reread`: files on disk may be others, too."""
        place = folder_of(_path(uri), self.typed)
        if place is None:
            return
        if reread:
            self._looked.pop(place, None)
        if (before := self._waiting.pop(place, None)) is not None:
            before.cancel()
        self._waiting[place] = asyncio.get_running_loop().call_later(delay, self._publish, place)

    def _publish(self, place: str) -> None:
        """A failure is logged, and the next text is looked at as if there had been none."""
        self._waiting.pop(place, None)
        try:
            folder = self.folder(os.path.join(place, "schedule.prototxt"))
            by_path: dict[str, list[lsp.Diagnostic]] = {path: [] for path in self._shown.get(place, ())}
            if folder is not None and any(folder_of(path, self.typed) == place for path in self.typed):
                for path in {problem.span.path for problem in folder.problems}:
                    by_path[path] = self._diagnostics(folder, path)
            for path, found in by_path.items():
                self.text_document_publish_diagnostics(lsp.PublishDiagnosticsParams(self.uri(path), found))
            self._shown[place] = {path for path, found in by_path.items() if found}
        except Exception:
            self.window_log_message(lsp.LogMessageParams(lsp.MessageType.Error, traceback.format_exc()))

    def _diagnostics(self, folder: Folder, path: str) -> list[lsp.Diagnostic]:
        text = self.text(path)
        levels = (
            (folder.mistakes, lsp.DiagnosticSeverity.Error),
            (folder.findings, lsp.DiagnosticSeverity.Warning),
            (folder.refused, lsp.DiagnosticSeverity.Information),
        )
        return [
            lsp.Diagnostic(span_range(text, one.span), said(one), severity=level, source="stagerun")
            for problems, level in levels
            for one in problems
            if one.span.path == path
        ]

    # -- what a question is about

    def here(self, params: Any) -> "tuple[Folder, str, Text, Place, int] | None":
        """None outside of the files that a schedule names, and in comments."""
        path = _path(params.text_document.uri)
        folder, text = self.folder(path), self.text(path)
        kind = folder.kind(path) if folder is not None else None
        if folder is None or kind is None:
            return None
        offset = text.at(params.position.line, params.position.character)
        place = place_at(text, kind, offset)
        return (folder, path, text, place, offset) if place is not None else None

    def edits(self, path: str, edits: Iterable[names.Edit]) -> lsp.WorkspaceEdit:
        return lsp.WorkspaceEdit({self.uri(path): [_text_edit(self.text(path), one) for one in edits]})


def _path(uri: str) -> str:
    """Absolute; '' for what isn't a file."""
    return os.path.normpath(to_fs_path(uri) or "") if uri.startswith("file:") else ""


def said(problem: Problem) -> str:
    return problem.message + (f"\nhint: {problem.hint}" if problem.hint else "")


def offsets_range(text: Text, first: int, last: int) -> lsp.Range:
    return lsp.Range(lsp.Position(*text.position(first)), lsp.Position(*text.position(last)))


def span_range(text: Text, span: Span) -> lsp.Range:
    return offsets_range(text, *text.ends(span))


def _text_edit(text: Text, edit: names.Edit) -> lsp.TextEdit:
    return lsp.TextEdit(offsets_range(text, edit.first, edit.last), edit.text)


server = Server()


def serve() -> None:
    """Until the editor leaves. What anyone else prints goes to stderr: one such line would end the conversation."""
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        server.start_io(sys.stdin.buffer, answers)


@server.feature(lsp.TEXT_DOCUMENT_DID_OPEN)
@server.feature(lsp.TEXT_DOCUMENT_DID_SAVE)
@server.feature(lsp.TEXT_DOCUMENT_DID_CLOSE)
def read_anew(params: Any) -> None:
    server.changed(params.text_document.uri)


@server.feature(lsp.TEXT_DOCUMENT_DID_CHANGE)
def typed(params: lsp.DidChangeTextDocumentParams) -> None:
    server.changed(params.text_document.uri, DELAY_S, reread=False)


@server.feature(lsp.WORKSPACE_DID_CHANGE_WATCHED_FILES)
def watched(params: lsp.DidChangeWatchedFilesParams) -> None:
    for change in params.changes:
        server.changed(change.uri, DELAY_S)


@server.feature(lsp.TEXT_DOCUMENT_FORMATTING)
def formatting(params: lsp.DocumentFormattingParams) -> list[lsp.TextEdit] | None:
    path = _path(params.text_document.uri)
    folder, text, found = server.folder(path), server.text(path), Problems()
    kind = folder.kind(path) if folder is not None else None
    if kind is None:
        return None
    parse(path, text.text, kind, found)
    if found or (new := formatted(text.text)) == text.text:
        return None
    return [_text_edit(text, names.Edit(0, len(text.text), new))]


@server.feature(lsp.TEXT_DOCUMENT_HOVER)
def hover(params: lsp.HoverParams) -> lsp.Hover | None:
    if (here := server.here(params)) is None:
        return None
    folder, path, text, place, _ = here
    shown = hover_text(folder, path, text, place).replace(folder.path + os.sep, "")
    if not shown or place.token is None:
        return None
    first, last = text.of(place.token)
    content = lsp.MarkupContent(lsp.MarkupKind.Markdown, f"~~~~\n{shown}\n~~~~")
    return lsp.Hover(content, offsets_range(text, first, last))


@server.feature(lsp.TEXT_DOCUMENT_COMPLETION, lsp.CompletionOptions(trigger_characters=['"', ":", " "]))
def completion(params: lsp.CompletionParams) -> list[lsp.CompletionItem]:
    if (here := server.here(params)) is None:
        return []
    folder, _, text, place, offset = here
    stages = [name for node in folder.nodes() for name in (node.name, node.group) if name]
    found = []
    for n, one in enumerate(proposals(text, place, offset, stages, folder.listed())):
        edit = _text_edit(text, names.Edit(one.first, offset, one.text))
        item = lsp.CompletionItem(one.label, kind=_KINDS[one.kind], documentation=one.says or None, text_edit=edit)
        item.sort_text = f"{n:04}"
        found.append(item)
    return found


@server.feature(lsp.TEXT_DOCUMENT_DEFINITION)
def definition(params: lsp.DefinitionParams) -> lsp.Location | None:
    if (here := server.here(params)) is None:
        return None
    folder, path, text, place, _ = here
    span = names.definition(folder, path, text, place, os.path.exists)
    return lsp.Location(server.uri(span.path), span_range(server.text(span.path), span)) if span is not None else None


@server.feature(lsp.TEXT_DOCUMENT_PREPARE_RENAME)
def prepare_rename(params: lsp.PrepareRenameParams) -> lsp.Range | None:
    here = server.here(params)
    name = names.stage_named(here[3]) if here is not None else ""
    if here is None or not name or here[3].token is None:
        return None
    first = here[2].of(here[3].token)[0] + 1
    return offsets_range(here[2], first, first + len(name))


@server.feature(lsp.TEXT_DOCUMENT_RENAME, lsp.RenameOptions(prepare_provider=True))
def rename(params: lsp.RenameParams) -> lsp.WorkspaceEdit | None:
    here = server.here(params)
    old = names.stage_named(here[3]) if here is not None else ""
    if here is None or not old:
        return None
    folder = here[0]
    texts = {path: server.text(path) for path in (os.path.join(folder.path, name) for name in folder.kinds)}
    try:
        edits = names.renamed(folder, texts, old, params.new_name)
    except UsageError as error:
        raise JsonRpcException(error.message, lsp.LSPErrorCodes.RequestFailed.value) from None
    changes = {server.uri(path): [_text_edit(texts[path], one) for one in found] for path, found in edits.items()}
    return lsp.WorkspaceEdit(changes)


@server.feature(lsp.TEXT_DOCUMENT_CODE_ACTION, lsp.CodeActionOptions([lsp.CodeActionKind.QuickFix]))
def code_action(params: lsp.CodeActionParams) -> list[lsp.CodeAction]:
    path = _path(params.text_document.uri)
    folder, text = server.folder(path), server.text(path)
    found = []
    for problem in folder.mistakes if folder is not None else ():
        place = span_range(text, problem.span)
        apart = place.end < params.range.start or params.range.end < place.start
        if folder is None or problem.span.path != path or apart:
            continue
        mended = fix(folder.path, server.typed, text, problem)
        if mended is not None:
            diagnostic = lsp.Diagnostic(place, said(problem), severity=lsp.DiagnosticSeverity.Error, source="stagerun")
            edit = server.edits(path, [mended.edit])
            found.append(lsp.CodeAction(mended.title, lsp.CodeActionKind.QuickFix, [diagnostic], edit=edit))
    return found


@server.feature(lsp.TEXT_DOCUMENT_INLAY_HINT)
def inlay_hint(params: lsp.InlayHintParams) -> list[lsp.InlayHint]:
    path = _path(params.text_document.uri)
    folder, text = server.folder(path), server.text(path)
    if folder is None or folder.schedule is None:
        return []
    ends = [(text.position(text.ends(one.span)[1]), one.text) for one in beside(folder.schedule, path)]
    shown = [one for one in ends if params.range.start.line <= one[0][0] <= params.range.end.line]
    return [lsp.InlayHint(lsp.Position(*place), said, padding_left=True) for place, said in shown]


@server.feature(lsp.TEXT_DOCUMENT_FOLDING_RANGE)
def folding(params: lsp.FoldingRangeParams) -> list[lsp.FoldingRange]:
    return [lsp.FoldingRange(first, last) for first, last in folds(server.text(_path(params.text_document.uri)))]
