"""README.md and the manual show what is there: commands, options, files, outputs; and they can be read.

`git show COMMIT:README.md | python tests/fast/test_readme.py` counts what this file forbids, in another version of a page.
"""

import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from test_layers import TOOLS, TRUNK

from stagerun.base.errors import EXIT_MEANINGS
from stagerun.cli import COMMANDS, main
from stagerun.manual.pages import FOLDER, PAGES

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
FILES = {"README": ROOT / "README.md"} | {name: FOLDER / f"{name}.md" for name in PAGES}
TEXTS = {name: path.read_text() for name, path in FILES.items()}

LONGEST = 30  # words of a sentence
WORDS = ("told", "begun", "nobody", "is no")
LARGEST_PICTURE = 100_000  # bytes

pages = pytest.mark.parametrize("page", FILES)


def code_lines(text: str) -> Iterator[str]:
    """Lines of code blocks, indented or between fences; a backslash at the end joins the next line."""
    fenced, before = False, ""
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            line = before + (line if fenced else line[4:])
            before = line[:-1] if line.endswith("\\") else ""
            if not before:
                yield line


def prose(text: str) -> str:
    """A page without its code blocks, link targets and comments."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"^( {4}| *\[\w+\]:).*$", "", text, flags=re.M)
    return re.sub(r"\]\([^)]*\)|\]\[\w+\]", "]", text)


def sentences(text: str) -> list[str]:
    """A heading, an item of a list, a cell of a table and a caption each end a sentence."""
    text = re.sub(r"^(#+ .*|\|[-|: ]+\|)$", "\n", prose(text), flags=re.M)
    found = []
    for block in re.split(r"\n\s*\n|\n(?=- |\d+\. |\|)", text):
        for cell in re.split(r"(?<!\\)\|", block) if block.lstrip().startswith("|") else [block]:
            found += re.split(r"(?<=[.!?])[*_)]*\s+(?=[A-Z`*\[(])", " ".join(cell.split()))
    return [sentence for sentence in found if sentence]


def long_sentences(text: str) -> list[str]:
    return [s for s in sentences(text) if len([w for w in s.split() if re.search(r"\w", w)]) > LONGEST]


def forbidden(text: str) -> list[str]:
    return re.findall(rf"\b({'|'.join(WORDS)})\b", prose(text))


def calls(text: str) -> set[str]:
    """What follows `stagerun` in code, up to a comment or a description."""
    code = [*code_lines(text), *(" ".join(words.split()) for words in re.findall(r"`([^`]+)`", prose(text)))]
    found = set()
    for line in code:
        for call in re.findall(r"(?:^|[\w>=] |^\S*/)stagerun ([a-z-][^;|]*)", line.split(" # ")[0].split("  #")[0]):
            found.add(re.split(r"\s{2,}|\s*\.\.\.", call)[0].strip())
    return found


def block(text: str, first: str) -> list[str]:
    """The indented lines from the one that is `first` on."""
    lines = text.splitlines()
    start = lines.index("    " + first)
    end = next(i for i in range(start, len(lines)) if lines[i] and not lines[i].startswith("    "))
    return [line[4:] for line in lines[start:end]]


@pages
def test_every_command_line_names_what_there_is(page: str) -> None:
    for call in calls(TEXTS[page]):
        words, command, context = shlex.split(call), main, click.Context(main, **main.context_settings)
        while isinstance(command, click.Group) and words and not words[0].startswith("-"):
            command = command.get_command(context, words.pop(0))
            assert command is not None, call
        try:
            _, left, _ = command.make_parser(click.Context(command, context)).parse_args(words)
        except click.UsageError as error:
            pytest.fail(f"{page}: `stagerun {call}`: {error.format_message()}")
        assert not left or isinstance(command, click.Group), f"{page}: `stagerun {call}`: {left} is too much"


@pages
def test_links_files_and_pictures_are_there(page: str) -> None:
    text, path = TEXTS[page], FILES[page]
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in target:
            file, _, heading = target.partition("#")
            other = path.parent / file
            assert other.exists(), target
            headings = re.findall(r"^#+ (.*)$", other.read_text(), re.M) if heading else []
            assert not heading or heading in [h.lower().replace(" ", "-") for h in headings], target
    assert set(re.findall(r"\]\[(\w+)\]", text)) == set(re.findall(r"^\[(\w+)\]: https://", text, re.M))
    for named in set(re.findall(r"scripts/[\w.-]*\w|tests/[\w/]+\.\w+|solvers/[a-z0-9_]+(?=[/`])", text)):
        assert (ROOT / named).exists(), named


@pages
def test_modules_are_there(page: str) -> None:
    """Named from the package or the root, or by their file's name alone. `train.py` is timm's."""
    there = {
        path.relative_to(ROOT).as_posix() for folder in ("stagerun", "tests") for path in (ROOT / folder).rglob("*.py")
    }
    for named in set(re.findall(r"`([\w/]+\.py)\b", TEXTS[page])):
        assert named == "train.py" or "NAME" in named or any(f"/{path}".endswith(f"/{named}") for path in there), named


def test_the_map_has_every_folder_and_every_tool() -> None:
    internals, readme = TEXTS["internals"], TEXTS["README"]
    assert tuple(re.findall(r"^\| `(\w+)(?:/|\.py)` \|", internals, re.M)) == TRUNK
    listed = re.search(r"`tools/` has a folder for each tool beside the run:\n\n((?:    .*\n)+)", internals)
    assert listed and set(listed[1].split()) == TOOLS
    contributing = readme[readme.index("## Contributing") :]
    assert {*re.findall(r"^    (\w+)/ ", contributing, re.M), "comm", "engine", "cli"} == {*TRUNK, "tools"}


@pages
def test_sentences_are_short_and_plain(page: str) -> None:
    assert long_sentences(TEXTS[page]) == [] and forbidden(TEXTS[page]) == []


def test_scripts_solver_files_and_changelog_are_plain_too() -> None:
    files = [ROOT / "CHANGELOG.md", *(ROOT / "scripts").iterdir(), *(ROOT / "solvers").rglob("*.prototxt")]
    words = re.compile(rf"\b({'|'.join(WORDS)})\b")
    assert {path.name: found for path in files if path.is_file() and (found := words.findall(path.read_text()))} == {}


def test_ci_runs_the_whole_suite_and_readme_names_both_ways() -> None:
    assert "scripts/test --all" in (ROOT / ".ci" / "run").read_text().splitlines()
    contributing = TEXTS["README"][TEXTS["README"].index("## Contributing") :]
    assert re.search(r"^    scripts/test +#", contributing, re.M) and "\n    scripts/test --all " in contributing


def test_readme_is_short_and_pages_and_pictures_are_all_used() -> None:
    assert len(TEXTS["README"].splitlines()) < 200
    assert {path.stem for path in FOLDER.glob("*.md")} == set(PAGES)
    assert all(f"manual/{name}.md" in TEXTS["README"] for name in PAGES)
    used = {name for text in TEXTS.values() for name in re.findall(r"pictures/([\w.-]+)\)", text)}
    assert used == {path.name for path in (FOLDER / "pictures").iterdir()}
    for path in (FOLDER / "pictures").iterdir():
        assert path.stat().st_size < LARGEST_PICTURE, path.name


@pytest.mark.parametrize("page", ["README", "getting-started"])
def test_the_table_of_commands_has_all(page: str) -> None:
    listed = re.findall(
        r"^    stagerun ([\w-]+) .* {2}", TEXTS[page][TEXTS[page].lower().index("commands\n\n") :], re.M
    )
    assert {usage.split()[0] for usage, _, _ in COMMANDS} <= {*listed, "retry", "import"}


def test_exit_codes() -> None:
    for code, meaning in EXIT_MEANINGS.items():
        assert f"| {int(code)} | {meaning} |" in TEXTS["running-and-resuming"]


def test_the_solver_file_is_quoted_whole() -> None:
    text = (ROOT / "solvers" / "fashion_collapse" / "cyc3.prototxt").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert [line for line in block(TEXTS["getting-started"], lines[0]) if line] == lines


@pytest.mark.parametrize("page, golden", [("designing", "plan/resnet50_72ep.txt")])
def test_what_is_quoted_is_what_is_printed(page: str, golden: str) -> None:
    printed = [line for line in (GOLDEN / golden).read_text().splitlines() if line and line[0] != "$"]
    quoted = [line for line in block(TEXTS[page], printed[0]) if line]
    assert quoted == printed[: len(quoted)] and len(quoted) > 5


def test_the_quoted_mistakes_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bad = Path(shutil.copytree(ROOT / "solvers" / "resnet50_72ep", "bad"))
    for name, right, wrong in (("cyc1", "lr_policy:", "lr_polcy:"), ("schedule", "size: 32", "size: 48")):
        file = bad / f"{name}.prototxt"
        file.write_text(file.read_text().replace(right, wrong))
    checked = CliRunner().invoke(main, ["check", "bad"])
    lines = checked.stderr.rstrip().splitlines()
    assert checked.exit_code == 64 and block(TEXTS["designing"], lines[0])[: len(lines)] == lines


def test_the_quoted_budget_is_the_one_that_is_printed(tmp_path: Path) -> None:
    text = " ".join(TEXTS["designing"].split())
    planned = (
        CliRunner()
        .invoke(
            main, ["plan", str(ROOT / "solvers" / "resnet50_72ep"), "--images-per-second", "6303", "--budget", "4h"]
        )
        .stdout
    )
    for quoted, printed in (
        ("4 h 05 min in total", "about 4 h 05 min left at 6303 images/s"),
        ("in `collapse`, at iteration 1092 of 1560", "ends in collapse, at iteration 1092 of 1560"),
        ("continues from iteration 600", "the last snapshot by then is collapse at 600"),
        ("Two allocations", "2 allocations of 4 h 00 min in all"),
    ):
        assert quoted in text and printed in planned, (quoted, planned)


def test_the_schedule_of_readme_gives_the_plan_of_readme(tmp_path: Path) -> None:
    (tmp_path / "schedule.prototxt").write_text("\n".join(block(TEXTS["README"], 'name: "imagenette"')))
    planned = CliRunner().invoke(main, ["plan", str(tmp_path), "--out", str(tmp_path / "out")])
    assert planned.exit_code == 0, planned.output
    lines = planned.stdout.splitlines()
    quoted = [line for line in block(TEXTS["README"], lines[0]) if line]
    assert quoted == [line for line in lines if line][: len(quoted)] and quoted[-1].startswith("total")
    linted = CliRunner().invoke(main, ["check", str(tmp_path)])
    assert linted.exit_code == 0 and "no findings" in linted.stdout


def test_no_page_is_cited_that_is_not_there() -> None:
    """A reason that the code gives can be read where the code is."""
    there = {path.name for folder in (ROOT, ROOT / "tests" / "reliability") for path in folder.glob("*.md")}
    cited = {
        (str(path.relative_to(ROOT)), name)
        for folder in ("stagerun", "scripts", "protos", "solvers")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
        for name in re.findall(r"\b[A-Z]{3,}\.md\b", path.read_text(errors="replace"))
    }
    assert {name for _, name in cited} <= there, cited


if __name__ == "__main__":
    text = sys.stdin.read()
    print(f"{len(sentences(text))} sentences, {len(long_sentences(text))} of more than {LONGEST} words")
    print({word: forbidden(text).count(word) for word in WORDS}, f"{len(text.splitlines())} lines")
