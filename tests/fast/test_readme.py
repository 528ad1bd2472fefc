"""What README.md shows is what is there."""

import re
from pathlib import Path

from stagerun.cli.main import COMMANDS
from stagerun.errors import EXIT_MEANINGS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def block(first: str) -> list[str]:
    """The indented lines from the one that is `first` on."""
    lines = README.splitlines()
    start = lines.index("    " + first)
    end = next(i for i in range(start, len(lines)) if lines[i] and not lines[i].startswith("    "))
    return [line[4:] for line in lines[start:end]]


def test_the_solver_file_is_quoted_whole() -> None:
    text = (ROOT / "solvers" / "fashion_collapse" / "cyc3.prototxt").read_text()
    said = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert [line for line in block(said[0]) if line] == said


def test_the_plan_is_the_one_that_is_printed() -> None:
    plan = (ROOT / "tests" / "golden" / "plan" / "resnet50_72ep.txt").read_text().splitlines()
    quoted = [line for line in block(plan[0]) if line]
    assert quoted == [line for line in plan if line][: len(quoted)] and quoted[-1].startswith("total")


def test_commands_scripts_and_exit_codes() -> None:
    assert set(re.findall(r"^    stagerun ([\w-]+) ", README, re.M)) == {usage.split()[0] for usage, _, _ in COMMANDS}
    for script in set(re.findall(r"scripts/[a-z-]+", README)):
        assert (ROOT / script).exists(), script
    for code, meaning in EXIT_MEANINGS.items():
        assert f"| {int(code)} | {meaning} |" in README


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
