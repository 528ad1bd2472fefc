"""The folder of a command that leaves nothing: one command at a time has it."""

from contextlib import ExitStack
from pathlib import Path

import pytest
from facade import FolderInUseError

from stagerun.store import lock
from stagerun.store.throw_away import claim


def test_who_waited_for_a_lock_that_was_deleted_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the opening of the lock's file and the lock its holder leaves, and another comes."""
    folder, others = tmp_path / "x", ExitStack()
    first = ExitStack()
    claim(folder, "work", first)
    honest = lock._try

    def late(fd: int) -> bool:
        monkeypatch.setattr(lock, "_try", honest)
        first.close()
        assert not folder.exists()
        (claim(folder, "work", others) / "theirs").touch()
        return honest(fd)

    monkeypatch.setattr(lock, "_try", late)
    with pytest.raises(FolderInUseError), ExitStack() as mine:
        claim(folder, "work", mine)
    assert (folder / "work" / "theirs").exists()
    others.close()
    assert not folder.exists()


def test_a_folder_that_is_left_before_its_lock_is_opened_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, first = tmp_path / "x", ExitStack()
    claim(folder, "work", first)
    honest = lock.Lock.acquire

    def late(self: lock.Lock) -> None:
        monkeypatch.setattr(lock.Lock, "acquire", honest)
        first.close()
        assert not folder.exists()
        honest(self)

    monkeypatch.setattr(lock.Lock, "acquire", late)
    with ExitStack() as mine:
        assert claim(folder, "work", mine).is_dir()
    assert not folder.exists()
