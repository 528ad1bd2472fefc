"""`stagerun lsp` over stdin and stdout, as an editor talks to it."""

import json
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SOLVERS = Path(__file__).parents[2] / "solvers"
LIMIT_S = 60.0
ERROR = 1


class Editor:
    """Opens files and types in them; `mistakes` by file name."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.sent = folder, 0
        self.mistakes: dict[str, list[dict[str, Any]]] = {}
        self.heard: queue.Queue[dict[str, Any]] = queue.Queue()
        words = [sys.executable, "-m", "stagerun", "lsp"]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        threading.Thread(target=self.listen, daemon=True).start()
        self.ask("initialize", processId=None, rootUri=folder.as_uri(), capabilities={})
        self.send("initialized")

    def listen(self) -> None:
        while head := self.process.stdout.readline():
            if head.startswith(b"Content-Length"):
                length = int(head.split(b":")[1])
            elif not head.strip():
                self.heard.put(json.loads(self.process.stdout.read(length)))

    def send(self, method: str, /, **message: Any) -> None:
        text = json.dumps({"jsonrpc": "2.0", "method": method, **message}).encode()
        self.process.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(text), text))
        self.process.stdin.flush()

    def until(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The message of which that holds. Until then mistakes are noted."""
        while True:
            message = self.heard.get(timeout=LIMIT_S)
            assert message.get("method") != "window/logMessage", message
            if message.get("method") == "textDocument/publishDiagnostics":
                found = message["params"]["diagnostics"]
                name = message["params"]["uri"].rpartition("/")[2]
                self.mistakes[name] = [one for one in found if one["severity"] == ERROR]
            if holds(message):
                return message

    def until_mistakes(self, name: str, there: bool) -> None:
        self.until(lambda _: name in self.mistakes and bool(self.mistakes[name]) == there)

    def ask(self, method: str, /, **params: Any) -> Any:
        self.sent += 1
        self.send(method, id=self.sent, params=params)
        return self.until(lambda message: message.get("id") == self.sent)["result"]

    def document(self, name: str, **more: object) -> dict[str, Any]:
        return {"uri": (self.folder / name).as_uri(), **more}

    def open(self, name: str, text: str) -> None:
        document = self.document(name, languageId="prototxt", version=0, text=text)
        self.send("textDocument/didOpen", params={"textDocument": document})

    def type(self, name: str, text: str) -> None:
        self.sent += 1
        document = self.document(name, version=self.sent)
        self.send("textDocument/didChange", params={"textDocument": document, "contentChanges": [{"text": text}]})

    def ask_at(self, what: str, name: str, text: str, words: str, behind: int = 1) -> Any:
        """Of the place that is `behind` characters after the start of `words`."""
        before = text[: text.index(words) + behind]
        place = {"line": before.count("\n"), "character": len(before) - before.rfind("\n") - 1}
        return self.ask(f"textDocument/{what}", textDocument=self.document(name), position=place)


@pytest.fixture
def editor(tmp_path):
    editor = Editor(Path(shutil.copytree(SOLVERS / "resnet50_72ep", tmp_path / "a b" / "resnet50_72ep")))
    try:
        yield editor
        editor.ask("shutdown")
        editor.send("exit")
        assert editor.process.wait(LIMIT_S) == 0
    finally:
        editor.process.kill()
        editor.process.communicate()


def test_a_mistake_is_shown_mended_and_gone(editor):
    name = "cyc1.prototxt"
    text = (editor.folder / name).read_text()
    wrong = text.replace("base_lr", "# 😀\nbase_rl")
    editor.open(name, text)
    editor.type(name, wrong)
    editor.until_mistakes(name, True)
    first, document = editor.mistakes[name][0], editor.document(name)
    assert first["message"] == "Solver has no field `base_rl`\nhint: did you mean `base_lr`?"
    editor.type(name, wrong.replace("base_rl", "base_lr"))
    editor.until_mistakes(name, False)
    # What is unsaved counts for the other files, too.
    editor.type(name, text.replace("max_iter: 3750", "max_iter: 0"))
    editor.until_mistakes(name, True)
    editor.send("textDocument/didClose", params={"textDocument": document})
    editor.until_mistakes(name, False)


def test_what_an_editor_asks(editor):
    name = "schedule.prototxt"
    text = (editor.folder / name).read_text()
    editor.open(name, text)
    shown = editor.ask_at("hover", name, text, "mirror: true")["contents"]["value"]
    assert "Flip left and right" in shown and "schedule.prototxt:43" in shown
    typed = text.replace("mirror: true", "mirror: true\n    in")
    editor.type(name, typed)
    offered = {item["label"] for item in editor.ask_at("completion", name, typed, "    in\n", 6)}
    assert "crop_size_ramp_param" in offered and "mirror" not in offered
    editor.type(name, text.replace("seed: 1", "seed  :  1"))
    style = {"tabSize": 2, "insertSpaces": True}
    (edit,) = editor.ask("textDocument/formatting", textDocument=editor.document(name), options=style)
    assert edit["newText"] == text
