"""The files of the counts, a JSON file for each scenario, and RESULTS.md beside them, which always says what they say."""

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from reliability import counted
from reliability.counted import Counted
from reliability.trial import Scenario


class Counts:
    """The folder of the counts. `rows`: those of the table, as for `counted.render`."""

    def __init__(self, folder: Path, rows: Sequence[tuple[Scenario, str]] = ()) -> None:
        self.folder, self.rows = folder, rows
        folder.mkdir(exist_ok=True)

    @property
    def table(self) -> Path:
        return self.folder.parent / "RESULTS.md"

    def read(self, name: str) -> list[Counted]:
        try:
            return counted.from_json((self.folder / f"{name}.json").read_text())
        except FileNotFoundError:
            return []

    def change(self, name: str, do: Callable[[list[Counted]], list[Counted]]) -> list[Counted]:
        """Replaces the counts of a scenario by `do` of them, and the table, while no other process does the same."""
        with self.alone():
            new = do(self.read(name))
            replace_file(self.folder / f"{name}.json", counted.to_json(new))
            replace_file(self.table, self.rendered())
        return new

    def write_table(self) -> None:
        with self.alone():
            replace_file(self.table, self.rendered())

    def rendered(self) -> str:
        """The table that the counts give. Within `alone` it is that of one moment."""
        sums: Mapping[str, list[Counted]] = {scenario.name: self.read(scenario.name) for scenario, _ in self.rows}
        return counted.render(self.rows, sums)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No other process changes anything meanwhile."""
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def replace_file(path: Path, text: str) -> None:
    temp = path.with_name(f".{path.name}.tmp")
    temp.write_text(text)
    os.replace(temp, path)
