"""README.md and the manual show what is there: commands, options, files, outputs."""

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import click
import contract
import pytest
from facade import ExitCode
from test_layers import TRUNK

from stagerun.cli import main

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
MANUAL = ROOT / "stagerun" / "manual"
FILES = {"README": ROOT / "README.md"} | {path.stem: path for path in sorted(MANUAL.glob("*.md"))}
TEXTS = {name: path.read_text() for name, path in FILES.items()}

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
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.M | re.S)
    text = re.sub(r"^( {4}| *\[\w+\]:).*$", "", text, flags=re.M)
    return re.sub(r"\]\([^)]*\)|\]\[\w+\]", "]", text)


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
def test_every_command_line_names_what_there_is(page):
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
def test_links_files_and_pictures_are_there(page):
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


def test_the_map_has_every_folder():
    internals = TEXTS["internals"]
    assert tuple(re.findall(r"^\| `(\w+)(?:/|\.py)` \|", internals, re.M)) == TRUNK


def test_pages_and_pictures_are_all_used():
    listed = contract.stagerun(["help"], ROOT).stdout
    assert all(f"\n  {name} " in listed for name in FILES if name != "README")
    used = {name for text in TEXTS.values() for name in re.findall(r"pictures/([\w.-]+)\)", text)}
    assert used == {path.name for path in (MANUAL / "pictures").iterdir()}


def test_the_list_of_commands_is_that_of_the_help():
    listed = [
        line for line in (GOLDEN / "cli" / "stagerun.txt").read_text().splitlines() if line.startswith("  stagerun ")
    ]
    quoted = [line for line in block(TEXTS["getting-started"], listed[0][2:]) if line]
    assert quoted == [line[2:] for line in listed], "run scripts/dev golden"


def test_readme_is_short():
    assert TEXTS["README"].count("\n") <= 120
    assert (ROOT / "CHANGELOG.md").read_text().count("\n") <= 60


def test_exit_codes():
    said = contract.stagerun(["--help"], ROOT).stdout
    listed = re.findall(r"^ +(\d+)  (.+)$", said[said.index("Exit codes:") :], re.M)
    assert len(listed) == len(ExitCode)
    page = TEXTS["running-and-resuming"]
    table = page[page.index("| exit code | what to do |") :].split("\n\n")[0]
    assert {code for code, _ in listed} <= set(re.findall(r"\d+", table))


def test_the_solver_file_is_quoted_whole():
    text = (ROOT / "solvers" / "fashion_collapse" / "cyc3.prototxt").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert [line for line in block(TEXTS["getting-started"], lines[0]) if line] == lines


def test_what_is_quoted_is_what_is_printed():
    printed = [
        line for line in (GOLDEN / "plan" / "resnet50_72ep.txt").read_text().splitlines() if line and line[0] != "$"
    ]
    quoted = [line for line in block(TEXTS["designing"], printed[0]) if line]
    assert quoted == printed[: len(quoted)] and len(quoted) > 5


def test_the_quoted_mistakes_are_found(tmp_path):
    bad = shutil.copytree(ROOT / "solvers" / "resnet50_72ep", tmp_path / "bad")
    for name, right, wrong in (("cyc1", "lr_policy:", "lr_polcy:"), ("schedule", "size: 32", "size: 48")):
        file = bad / f"{name}.prototxt"
        file.write_text(file.read_text().replace(right, wrong))
    checked = contract.stagerun(["check", "bad"], tmp_path)
    lines = checked.stderr.rstrip().splitlines()
    assert checked.exit_code == 64 and block(TEXTS["designing"], lines[0])[: len(lines)] == lines


def test_the_quoted_budget_is_the_one_that_is_printed(tmp_path):
    text = " ".join(TEXTS["designing"].split())
    words = ["plan", ROOT / "solvers" / "resnet50_72ep", "--images-per-second", "6303", "--budget", "4h"]
    planned = contract.stagerun(words, tmp_path).stdout
    for quoted, printed in (
        ("4 h 05 min in total", "about 4 h 05 min left at 6303 images/s"),
        ("in `collapse`, at iteration 1092 of 1560", "ends in collapse, at iteration 1092 of 1560"),
    ):
        assert quoted in text and printed in planned, (quoted, planned)


def test_the_schedule_of_readme_gives_the_plan_of_readme(tmp_path):
    (tmp_path / "schedule.prototxt").write_text("\n".join(block(TEXTS["README"], 'name: "flowers"')))
    planned = contract.stagerun(["plan", ".", "--out", "out"], tmp_path)
    assert planned.exit_code == 0, planned.output
    lines = planned.stdout.splitlines()
    quoted = [line for line in block(TEXTS["README"], lines[0]) if line]
    assert quoted == [line for line in lines if line][: len(quoted)] and quoted[-1].startswith("total")
    linted = contract.stagerun(["check", "."], tmp_path)
    assert linted.exit_code == 0 and "no warnings" in linted.stdout
