"""The pages of the manual: their names, and what `stagerun help PAGE` prints."""

import re
from pathlib import Path

FOLDER = Path(__file__).parent
WIDEST = 110  # columns; longer lines are hard to read

PAGES = {
    "getting-started": "from an empty machine to a first trained schedule",
    "your-own-images": "import a folder of pictures, make a schedule for them, look at what is trained on",
    "fine-tuning": "weights from a file, another run or a published network; freezing; a network per stage",
    "your-own-network": "a network from a Python file, a package or timm; what is looked at, what counts as an edit",
    "designing": "stages, branches, learning rates; what `check`, `plan` and `rehearse` show before you pay",
    "view": "one page for a schedule's whole life: mistakes, plan, run, results; who may see it",
    "running-and-resuming": "workers, signals, snapshots, exit codes; what happens after a kill or an edit",
    "many-machines": "ssh, MPI, Slurm, Kubernetes; cores, scratch disks",
    "compression": "gradients in fewer bytes: methods, memory, when it pays, what was measured",
    "atlas": "what a collapse gains, by shape, length, augmentation and decay: hundreds of them on real images",
    "asynchronous": "workers that push gradients and don't wait: staleness, what is recorded, how a run is replayed",
    "losses": "binary and distilled losses, your own, several labels, early stopping, FixRes",
    "reports": "tables, curves, evaluation, predictions, export",
    "trackers": "wandb, a tracker of your own; a word when the run ends",
    "editor": "mistakes as you type, the manual under the cursor, one style for files; VS Code, Neovim, Helix, Emacs",
    "library": "`import stagerun`: load, plan, run, report and snapshots in scripts and notebooks",
    "caffe": "what is Caffe's here, and how its solver files are imported",
    "reliability": "which faults are survived, and how that is counted",
    "measured": "every figure, with the command that measured it",
    "internals": "the map of the code, and where to add what",
}

_PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")


def page_name(words: str) -> str:
    """The page that `words` name, written with hyphens, spaces or underscores; '' if there is none."""
    name = "-".join(re.split(r"[\s_-]+", words.strip().lower()))
    return name if name in PAGES else ""


def page_text(name: str) -> str:
    """The Markdown of a page, with each picture as its caption and the path of its file."""
    text = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    return _PICTURE.sub(lambda found: f"[{found[1]}: {FOLDER / found[2]}]", text).rstrip("\n")


def print_page(name: str) -> None:
    """Prints a page on a terminal, laid out and in colour."""
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    console.print(Markdown(_LINK.sub(_typed, page_text(name))), width=min(console.width, WIDEST))


def _typed(link: re.Match[str]) -> str:
    """A link as a terminal can use it: another page as the command that shows it."""
    name = link[2].removesuffix(".md")
    return f"`stagerun help {name}`" if name in PAGES else link[0]
