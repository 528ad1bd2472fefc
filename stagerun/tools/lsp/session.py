"""The conversation with an editor: the texts that it holds, when they are looked at, and what it is shown without asking. Effects.

A folder is looked at a moment after the last key press, so that typing queues no work; a question is answered for the text as it is.
"""

import asyncio
import os
import stat
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lsprotocol import types as lsp
from pygls.exceptions import JsonRpcException
from pygls.lsp.server import LanguageServer
from pygls.uris import from_fs_path, to_fs_path

import stagerun
from stagerun.base.errors import Level, Problem, Span
from stagerun.language.parse import LARGEST
from stagerun.tools.lsp.folder import Folder, folder_of, look
from stagerun.tools.lsp.names import Edit
from stagerun.tools.lsp.place import Place, Text, place_at

DELAY_S = 0.05  # after a key press


@dataclass(frozen=True, slots=True)
class Here:
    """What a question is about: a place in a file of a schedule."""

    folder: Folder
    path: str
    text: Text
    place: Place
    offset: int


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
        return {path: one.source for one in documents if (path := path_of(one.uri))}

    def text(self, path: str) -> Text:
        """As the editor holds it, or else as it is on disk; empty where it can't be read."""
        text = self.typed.get(path)
        if text is None:
            text = ""
            with suppress(OSError, ValueError):  # ValueError: a name that no file can have
                if stat.S_ISREG(os.stat(path).st_mode):  # opening a FIFO would wait for a writer
                    with open(path, "rb") as file:
                        text = file.read(LARGEST).decode(errors="replace")
        encoding = str(getattr(self.workspace.position_encoding, "value", self.workspace.position_encoding) or "utf-16")
        return Text(text, encoding)

    def uri(self, path: str) -> str:
        """As the editor writes it, for a file that it holds."""
        documents = self.workspace.text_documents.values()
        known = (one.uri for one in documents if path_of(one.uri) == path)
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
        path = path_of(uri)
        # It may belong to another folder than it did: schedule.prototxt is gone, or there is a new one.
        places = {place for place, shown in self._shown.items() if path in shown}
        if (now := folder_of(path, self.typed)) is not None:
            places.add(now)
        for place in places:
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
            if (
                folder is not None
                and folder.path == place
                and any(folder_of(path, self.typed) == place for path in self.typed)
            ):
                for path in {problem.span.path for problem in folder.problems}:
                    by_path[path] = self._diagnostics(folder, path)
            for path, found in by_path.items():
                self.text_document_publish_diagnostics(lsp.PublishDiagnosticsParams(self.uri(path), found))
            self._shown[place] = {path for path, found in by_path.items() if found}
        except Exception as error:
            self.report_server_error(error, type(error))

    def report_server_error(self, error: Exception, source: object) -> None:
        """pygls would show a window for each. A refusal is an answer."""
        if isinstance(error, JsonRpcException):
            return
        text = "".join(traceback.format_exception(error))
        self.window_log_message(lsp.LogMessageParams(lsp.MessageType.Error, text))

    def _diagnostics(self, folder: Folder, path: str) -> list[lsp.Diagnostic]:
        text = self.text(path)
        return [
            lsp.Diagnostic(span_range(text, one.span), said(one), severity=_SEVERITY[one.level], source="stagerun")
            for one in folder.problems
            if one.span.path == path
        ]

    # -- questions

    def here(self, params: Any) -> Here | None:
        """None outside of the files that a schedule names, and in comments."""
        path = path_of(params.text_document.uri)
        folder, text = self.folder(path), self.text(path)
        kind = folder.kind(path) if folder is not None else None
        if folder is None or kind is None:
            return None
        offset = text.at(params.position.line, params.position.character)
        place = place_at(text, kind, offset)
        return Here(folder, path, text, place, offset) if place is not None else None

    def edits(self, path: str, edits: Iterable[Edit]) -> lsp.WorkspaceEdit:
        return lsp.WorkspaceEdit({self.uri(path): [text_edit(self.text(path), one) for one in edits]})


_SEVERITY = {
    Level.MISTAKE: lsp.DiagnosticSeverity.Error,
    Level.WARNING: lsp.DiagnosticSeverity.Warning,
    Level.NOTE: lsp.DiagnosticSeverity.Information,
}


def path_of(uri: str) -> str:
    """Absolute; '' for what isn't a file."""
    local = uri.replace("file://localhost/", "file:///", 1)
    path = to_fs_path(local) if local.startswith("file:///") else ""
    return os.path.normpath(path) if path else ""


def said(problem: Problem) -> str:
    return problem.message + (f"\nhint: {problem.hint}" if problem.hint else "")


def offsets_range(text: Text, first: int, last: int) -> lsp.Range:
    return lsp.Range(lsp.Position(*text.position(first)), lsp.Position(*text.position(last)))


def span_range(text: Text, span: Span) -> lsp.Range:
    return offsets_range(text, *text.ends(span))


def text_edit(text: Text, edit: Edit) -> lsp.TextEdit:
    return lsp.TextEdit(offsets_range(text, edit.first, edit.last), edit.text)
