"""Hearing of changes in a folder."""

import select
from pathlib import Path

from stagerun.tools.view.inotify import Inotify


def heard(kernel: Inotify) -> bool:
    found, _, _ = select.select([kernel], [], [], 0)
    return bool(found)


def test_it_hears_writing_renaming_and_removing_and_nothing_else(tmp_path: Path) -> None:
    kernel = Inotify()
    kernel.add(tmp_path)
    kernel.add(tmp_path / "not there")
    file = tmp_path / "a"
    assert not heard(kernel)
    for change in (
        lambda: file.write_text("1"),
        lambda: file.rename(tmp_path / "b"),
        lambda: (tmp_path / "b").unlink(),
        lambda: tmp_path.rmdir(),
    ):
        change()
        assert heard(kernel)
        kernel.drain()
        assert not heard(kernel)
    kernel.close()
    kernel.close()
    assert kernel.fileno() == -1
