"""`stagerun lsp` over stdin and stdout, with the client of pygls."""

import asyncio
import os
import shutil
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from lsprotocol import types as lsp
from pygls.lsp.client import LanguageClient

SOLVERS = Path(__file__).parents[2] / "solvers"
LIMIT_S = 60.0


class Editor:
    """Opens files and types in them as an editor does; `diagnostics` by file name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.client = LanguageClient("test", "1")
        self.diagnostics: dict[str, list[lsp.Diagnostic]] = {}
        self.logged: list[str] = []
        self._news = asyncio.Event()
        self._version = 0
        self.client.feature(lsp.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS)(lambda params: self._published(params))
        self.client.feature(lsp.WINDOW_LOG_MESSAGE)(lambda params: self.logged.append(params.message))

    def _published(self, params: lsp.PublishDiagnosticsParams) -> None:
        self.diagnostics[params.uri.rpartition("/")[2]] = list(params.diagnostics)
        self._news.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        async def wait() -> None:
            while not holds():
                self._news.clear()
                await self._news.wait()

        await asyncio.wait_for(wait(), LIMIT_S)

    async def start(self) -> lsp.ServerCapabilities:
        await self.client.start_io(sys.executable, "-m", "stagerun", "lsp")
        asked = lsp.InitializeParams(capabilities=lsp.ClientCapabilities(), root_uri=self.folder.as_uri())
        result = await asyncio.wait_for(self.client.initialize_async(asked), LIMIT_S)
        self.client.initialized(lsp.InitializedParams())
        return result.capabilities

    def uri(self, name: str) -> str:
        return (self.folder / name).as_uri()

    def open(self, name: str, text: str | None = None) -> str:
        text = (self.folder / name).read_text() if text is None else text
        item = lsp.TextDocumentItem(self.uri(name), "prototxt", 0, text)
        self.client.text_document_did_open(lsp.DidOpenTextDocumentParams(item))
        return text

    def type(self, name: str, text: str) -> None:
        self._version += 1
        document = lsp.VersionedTextDocumentIdentifier(self._version, self.uri(name))
        whole = lsp.TextDocumentContentChangeWholeDocument(text)
        self.client.text_document_did_change(lsp.DidChangeTextDocumentParams(document, [whole]))

    def at(self, name: str, text: str, words: str, behind: int = 1) -> dict[str, Any]:
        """A document and the place in it that is `behind` characters after the start of `words`."""
        before = text[: text.index(words) + behind]
        place = lsp.Position(before.count("\n"), len(before) - before.rfind("\n") - 1)
        return {"text_document": lsp.TextDocumentIdentifier(self.uri(name)), "position": place}


def with_editor(folder: Path, test: Callable[[Editor], Awaitable[None]]) -> None:
    async def run() -> None:
        editor = Editor(folder)
        await editor.start()
        await test(editor)
        await asyncio.wait_for(editor.client.shutdown_async(None), LIMIT_S)
        editor.client.exit(None)
        await asyncio.wait_for(editor.client.stop(), LIMIT_S)
        assert not editor.logged

    asyncio.run(run())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SOLVERS / "resnet50_72ep", tmp_path / "a b" / "resnet50_72ep"))


def test_a_mistake_is_shown_mended_and_gone(folder: Path) -> None:
    async def test(editor: Editor) -> None:
        def mistakes() -> list[lsp.Diagnostic]:
            found = editor.diagnostics.get("cyc1.prototxt", [])
            return [one for one in found if one.severity is lsp.DiagnosticSeverity.Error]

        text = editor.open("cyc1.prototxt")
        wrong = text.replace("base_lr", "# 😀\nbase_rl")
        editor.type("cyc1.prototxt", wrong)
        await editor.until(lambda: bool(mistakes()))
        first = mistakes()[0]
        assert first.message == "Solver has no field `base_rl`\nhint: did you mean `base_lr`?"
        document = lsp.TextDocumentIdentifier(editor.uri("cyc1.prototxt"))
        asked = lsp.CodeActionParams(document, first.range, lsp.CodeActionContext([first]))
        (action,) = await editor.client.text_document_code_action_async(asked)
        (edit,) = action.edit.changes[editor.uri("cyc1.prototxt")]
        assert (action.title, edit.new_text, edit.range) == ("write `base_lr`", "base_lr", first.range)
        editor.type("cyc1.prototxt", wrong.replace("base_rl", edit.new_text))
        await editor.until(lambda: not mistakes())
        # What is unsaved counts for the other files, too.
        editor.type("cyc1.prototxt", text.replace("max_iter: 3750", "max_iter: 0"))
        await editor.until(lambda: bool(mistakes()))
        editor.client.text_document_did_close(lsp.DidCloseTextDocumentParams(document))
        await editor.until(lambda: not mistakes())

    with_editor(folder, test)


def test_what_an_editor_asks(folder: Path) -> None:
    async def test(editor: Editor) -> None:
        client, name = editor.client, "schedule.prototxt"
        text = editor.open(name)
        shown = await client.text_document_hover_async(lsp.HoverParams(**editor.at(name, text, "mirror: true")))
        assert "Flip left and right" in shown.contents.value and "schedule.prototxt:43" in shown.contents.value
        typed = text.replace("mirror: true", "mirror: true\n    in")
        editor.type(name, typed)
        found = await client.text_document_completion_async(
            lsp.CompletionParams(**editor.at(name, typed, "    in\n", 6))
        )
        assert "crop_size_ramp_param" in {item.label for item in found}
        assert "mirror" not in {item.label for item in found}
        editor.type(name, text)
        document = editor.at(name, text, '"cyc2"')["text_document"]
        editor.type(name, text.replace("seed: 1", "seed  :  1"))
        asked = lsp.DocumentFormattingParams(document, lsp.FormattingOptions(2, True))
        (edit,) = await client.text_document_formatting_async(asked)
        assert edit.new_text == text

    with_editor(folder, test)


def test_a_schedule_that_is_taken_away_or_not_yet_saved(folder: Path) -> None:
    async def test(editor: Editor) -> None:
        text = editor.open("cyc1.prototxt", (folder / "cyc1.prototxt").read_text() + "bad: 1\n")
        await editor.until(lambda: bool(editor.diagnostics.get("cyc1.prototxt")))
        shutil.move(folder / "schedule.prototxt", folder / "away")
        editor.type("cyc1.prototxt", text.replace("bad: 1\n", ""))
        await editor.until(lambda: not editor.diagnostics["cyc1.prototxt"])
        new = editor.open("new/schedule.prototxt", 'name: "x"\nstage { na }\n')
        asked = lsp.CompletionParams(**editor.at("new/schedule.prototxt", new, "na }", 2))
        found = await editor.client.text_document_completion_async(asked)
        assert "name" in {item.label for item in found}

    with_editor(folder, test)


def test_the_definition_of_a_file_does_not_read_it(folder: Path) -> None:
    os.mkfifo(folder / "net.prototxt")  # which no one writes to

    async def test(editor: Editor) -> None:
        text = 'model { caffe_net: "net.prototxt" }\n' + (folder / "schedule.prototxt").read_text()
        editor.open("schedule.prototxt", text)
        where = editor.at("schedule.prototxt", text, '"net.', 2)
        found = await asyncio.wait_for(
            editor.client.text_document_definition_async(lsp.DefinitionParams(**where)), LIMIT_S
        )
        assert found.uri.endswith("/net.prototxt")

    with_editor(folder, test)
