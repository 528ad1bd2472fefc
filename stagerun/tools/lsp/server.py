"""What an editor asks, answered in the protocol's values. Effects: `session` has the texts."""

import os
import sys
from typing import Any

from lsprotocol import types as lsp

from stagerun.base.errors import Problems, Span
from stagerun.language.parse import parse
from stagerun.language.stages import names_of
from stagerun.tools.fmt.style import formatted
from stagerun.tools.lsp.actions import fix
from stagerun.tools.lsp.complete import proposals
from stagerun.tools.lsp.hover import hover_text
from stagerun.tools.lsp.names import Edit, definition_of
from stagerun.tools.lsp.session import DELAY_S, Server, offsets_range, path_of, said, span_range, text_edit

_KINDS = {
    "field": lsp.CompletionItemKind.Field,
    "value": lsp.CompletionItemKind.EnumMember,
    "stage": lsp.CompletionItemKind.Reference,
    "file": lsp.CompletionItemKind.File,
}
_MOST_TRIED = 10  # mistakes of one answer: each takes a few looks at the folder
server = Server()


def serve() -> None:
    """Until the editor leaves. What anyone else prints goes to stderr: one such line would end the conversation."""
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        server.start_io(sys.stdin.buffer, answers)


@server.feature(lsp.INITIALIZED)
def watch_files(params: lsp.InitializedParams) -> None:
    """An editor tells of files that others write, if it is asked to."""
    workspace = server.client_capabilities.workspace
    if workspace is None or workspace.did_change_watched_files is None:
        return
    if workspace.did_change_watched_files.dynamic_registration:
        patterns = [lsp.FileSystemWatcher(f"**/*.{end}") for end in ("prototxt", "py")]
        options = lsp.DidChangeWatchedFilesRegistrationOptions(patterns)
        one = lsp.Registration("files", lsp.WORKSPACE_DID_CHANGE_WATCHED_FILES, options)
        server.client_register_capability(lsp.RegistrationParams([one]))


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
    path = path_of(params.text_document.uri)
    folder, text, found = server.folder(path), server.text(path), Problems()
    kind = folder.kind(path) if folder is not None else None
    if kind is None:
        return None
    parse(path, text.text, kind, found)
    if found or (new := formatted(text.text)) == text.text:
        return None
    return [text_edit(text, Edit(0, len(text.text), new))]


@server.feature(lsp.TEXT_DOCUMENT_HOVER)
def hover(params: lsp.HoverParams) -> lsp.Hover | None:
    if (here := server.here(params)) is None:
        return None
    shown = hover_text(here.folder, here.path, here.text, here.place).replace(here.folder.path + os.sep, "")
    if not shown or here.place.token is None:
        return None
    content = lsp.MarkupContent(lsp.MarkupKind.Markdown, f"~~~~\n{shown}\n~~~~")
    return lsp.Hover(content, offsets_range(here.text, *here.text.of(here.place.token)))


@server.feature(lsp.TEXT_DOCUMENT_COMPLETION, lsp.CompletionOptions(trigger_characters=['"', ":", " "]))
def completion(params: lsp.CompletionParams) -> list[lsp.CompletionItem]:
    if (here := server.here(params)) is None:
        return []
    stages, files = names_of(here.folder.nodes()), here.folder.listed()
    found = []
    for n, one in enumerate(proposals(here.text, here.place, here.offset, stages, files)):
        edit = text_edit(here.text, Edit(one.first, here.offset, one.text))
        item = lsp.CompletionItem(one.label, kind=_KINDS[one.kind], documentation=one.says or None, text_edit=edit)
        item.sort_text = f"{n:04}"
        found.append(item)
    return found


@server.feature(lsp.TEXT_DOCUMENT_DEFINITION)
def definition(params: lsp.DefinitionParams) -> lsp.Location | None:
    if (here := server.here(params)) is None:
        return None
    span = definition_of(here.folder, here.path, here.text, here.place, os.path.exists)
    if span is None:
        return None
    if span == Span(span.path, 1, 1):  # a file, of any kind and size
        return lsp.Location(server.uri(span.path), lsp.Range(lsp.Position(0, 0), lsp.Position(0, 0)))
    return lsp.Location(server.uri(span.path), span_range(server.text(span.path), span))


@server.feature(lsp.TEXT_DOCUMENT_CODE_ACTION, lsp.CodeActionOptions([lsp.CodeActionKind.QuickFix]))
def code_action(params: lsp.CodeActionParams) -> list[lsp.CodeAction]:
    path = path_of(params.text_document.uri)
    folder, text = server.folder(path), server.text(path)
    found = []
    tried = 0
    for problem in folder.mistakes if folder is not None else ():
        place = span_range(text, problem.span)
        apart = place.end < params.range.start or params.range.end < place.start
        if folder is None or problem.span.path != path or apart or tried == _MOST_TRIED:
            continue
        tried += 1
        mended = fix(folder, text, problem)
        if mended is not None:
            diagnostic = lsp.Diagnostic(place, said(problem), severity=lsp.DiagnosticSeverity.Error, source="stagerun")
            edit = server.edits(path, [mended.edit])
            found.append(lsp.CodeAction(mended.title, lsp.CodeActionKind.QuickFix, [diagnostic], edit=edit))
    return found
