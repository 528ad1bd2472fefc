"""What stagerun does, seen from outside: `stagerun(words, folder)` says how the command ended and what it printed and wrote.

A case of tests/cases is a text of sections. What stands above the first says what the case shows; each `-- NAME --` is a file of the
folder in which the commands run; the last, `-- transcript --`, has lines `$ stagerun ...`, below each what it prints and, where the
exit code is not 0, `[CODE]`. `$ cat FILE` and `$ replace FILE OLD NEW` look at a file and edit one; `case_files` has more. `...` stands for
anything within a line.
`scripts/dev golden` writes transcripts anew.
"""

import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import case_files
from click.testing import CliRunner, Result

from stagerun.cli import main

CASES = Path(__file__).parents[1] / "cases"
_SECTION = re.compile(r"^-- (.+) --$", re.MULTILINE)


def stagerun(words: Sequence[object], folder: Path, **options: Any) -> Result:
    """The command in this process, for what needs no torch and no signals; `small.stagerun` starts one of its own."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        return CliRunner().invoke(main, [str(word) for word in words], prog_name="stagerun", **options)
    finally:
        os.chdir(before)


Command = Callable[[Sequence[str], Path], tuple[int, str]]  # words, run in a folder -> exit code, what it printed
Prepare = Callable[[str, Path], None]  # puts into a case's folder what its text can't hold, by its name


def in_process(words: Sequence[str], folder: Path) -> tuple[int, str]:
    done = stagerun(words, folder)
    return done.exit_code, done.output


@dataclass(frozen=True)
class Case:
    path: Path
    head: str
    files: dict[str, str]
    transcript: str

    @staticmethod
    def read(path: Path) -> "Case":
        head, *sections = _SECTION.split(path.read_text())
        texts = dict(zip(sections[::2], (text.lstrip("\n") for text in sections[1::2]), strict=True))
        transcript = texts.pop("transcript")
        return Case(path, head, texts, transcript)

    def write(self, folder: Path) -> None:
        for name, text in self.files.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    def played(self, folder: Path, command: Command, prepare: Prepare | None) -> str:
        """The transcript as it is now. Lines that the old one describes with `...` stay as they are there."""
        if prepare is not None:
            prepare(self.path.stem, folder)
        self.write(folder)
        parts = re.split(r"^\$ (.*)\n", self.transcript, flags=re.MULTILINE)
        played = ""
        for line, expected in zip(parts[1::2], parts[2::2], strict=True):
            said = _said(shlex.split(line), folder, command).replace(str(folder), "$FOLDER")
            # Where the caret stands below the folder depends on its length.
            said = re.sub(r"(\$FOLDER.*\n) *(?:\.\.\.)? *\^+\n", r"\1", said)
            played += f"$ {line}\n{_kept(expected, said)}"
        return played

    def rewrite(self, transcript: str) -> None:
        files = "".join(f"-- {name} --\n{text}" for name, text in self.files.items())
        self.path.write_text(f"{self.head}{files}-- transcript --\n{transcript}")


def check(path: Path, folder: Path, command: Command = in_process, prepare: Prepare | None = None) -> None:
    """That the case's commands print what it says."""
    case = Case.read(path)
    assert case.played(folder, command, prepare) == case.transcript, "run scripts/dev golden and read the difference"


def rewrite(paths: Iterable[Path], command: Command = in_process, prepare: Prepare | None = None) -> None:
    for case in map(Case.read, paths):
        with tempfile.TemporaryDirectory() as folder:
            case.rewrite(case.played(Path(folder).resolve(), command, prepare))


def _said(words: Sequence[str], folder: Path, command: Command) -> str:
    match words:
        case ["stagerun", *rest]:
            code, text = command(rest, folder)
            text += "" if not text or text.endswith("\n") else "\n"
            return text + (f"[{code}]\n" if code else "")
        case ["cat", name]:
            return (folder / name).read_text()
        case ["replace", name, old, new]:
            text = (folder / name).read_text()
            assert old in text, f"{old!r} is not in {name}"
            (folder / name).write_text(text.replace(old, new))
            return ""
        case [verb, file, *rest] if (said := case_files.done(folder, verb, file, *rest)) is not None:
            return said
    raise AssertionError(f"a case can't do this: {words}")


def _kept(expected: str, said: str) -> str:
    """`said`, but its lines as they stand in `expected` where all of them fit."""
    rows, lines = expected.splitlines(), said.splitlines()
    fits = len(rows) == len(lines) and all(
        re.fullmatch(".*".join(map(re.escape, row.split("..."))), line) for row, line in zip(rows, lines, strict=True)
    )
    return expected if fits else said
