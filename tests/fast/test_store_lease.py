"""Two runs in one folder where no lock tells of the other: the lease, its beats, and the fence around all that is written."""

import errno
import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path

import audited
import disks
import pytest
from disks import HookedDisk, Killed, failing, killed
from facade import ExitCode, FolderInUseError, Identity, PermissionDenied, StagerunError, StorageError, this_process

from stagerun import store
from stagerun.store import Lease, Life, LocalDisk, Lock

HERE = this_process()
NODE7 = Identity("node7", "another boot", "pid:[1]", 12, 34)
NODE8 = replace(NODE7, host="node8")
WAIT = 15.0  # three beats
KEPT = 8  # files of lives


class Clock:
    """Time that passes in `pause` alone. `then` maps times to what happens then."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.then: dict[float, Callable[[], object]] = {}

    def pause(self, seconds: float) -> None:
        self.now += seconds
        for time in [t for t in self.then if 1000 + t <= self.now]:
            self.then.pop(time)()


def lease(out: Path, me: Identity = HERE, clock: Clock | None = None, disk: store.Disk | None = None) -> Lease:
    clock = clock or Clock()
    return Lease(disk or LocalDisk(), out, me, clock=lambda: clock.now, pause=clock.pause)


def taken(out: Path, me: Identity = HERE, locked: bool = True, clock: Clock | None = None) -> Lease:
    """A lease that was waited for and taken; no thread beats."""
    found = lease(out, me, clock)
    found.wait(locked, lambda text: None)
    found.take("newest", ())
    return found


def life(out: Path, attempt: int) -> Life:
    return next(one for one in store.last_lives(LocalDisk(), out, KEPT) if one.attempt == attempt)


def newest(out: Path) -> int:
    return store.last_lives(LocalDisk(), out, 1)[0].attempt


def commit(out: Path, held: Lease, iter: int = 100, disk: store.Disk | None = None, attempt: int | None = None) -> str:
    attempt = attempt or newest(out)
    files = {"w": b"w" * 100}
    return disks.commit(disk or LocalDisk(), out, "cyc1", iter, attempt, files, held.require_held).name


@pytest.fixture
def out(tmp_path):
    store.prepare(LocalDisk(), tmp_path / "out")
    return tmp_path / "out"


# ---- one after the other


def test_a_life_says_who_it_is_and_how_it_ended(out):
    one = taken(out)
    one.require_held()
    found = life(out, 1)
    assert found.process == HERE and found.code is None and found.beat == 0 and found.newest == "newest"
    assert str(found).startswith(f"process {os.getpid()} on {os.uname().nodename}, since 20")
    one.beat()
    one.beat()
    assert life(out, 1).beat == 2
    one.release(75)
    assert life(out, 1) == replace(found, beat=2, code=75)
    with pytest.raises(FolderInUseError, match="has ended"):
        one.require_held()


def test_the_files_of_old_lives_go_and_what_killed_ones_left(out):
    for _ in range(KEPT + 4):
        taken(out).release(0)
        (out / "lives" / ".tmp-a0001.json-00ff00ff").write_bytes(b"half")
    taken(out)
    last = KEPT + 5
    assert sorted(os.listdir(out / "lives")) == [f"a{n:04d}.json" for n in range(last - KEPT + 1, last + 1)]


# ---- whom one meets


@pytest.mark.parametrize("code", [0, 69, 75])
def test_nobody_waits_for_a_life_that_has_ended_wherever_that_was(out, code):
    taken(out, NODE7).release(code)
    clock = Clock()
    taken(out, clock=clock)
    assert clock.now == 1000


def wait_and_take(out: Path, named: str) -> None:
    """A second life waits for one that is silent, says for whom, and takes over."""
    clock, said = Clock(), list[str]()
    second = lease(out, clock=clock)
    second.wait(True, said.append)
    assert second.take("", ()) == 2 and WAIT <= clock.now - 1000 < WAIT + 5
    (line,) = said
    assert named in line and "for 15 s at most" in line and line.isprintable()


@pytest.mark.parametrize("away", [NODE7, replace(HERE, boot="another"), replace(HERE, namespace="another")])
def test_a_silent_one_is_waited_for_and_then_taken_over(out, away):
    """Elsewhere, after a reboot, in a container."""
    first = taken(out, away)
    wait_and_take(out, f"process {away.pid} on {away.host}, since 20")
    assert life(out, 1).taken_by == 2
    with pytest.raises(FolderInUseError, match="life 2"):
        first.require_held()


def changed(path: Path, host: str = "h", **changes: object) -> None:
    path.parent.rmdir()
    taken(path.parents[1])
    other = replace(life(path.parents[1], 1), process=replace(HERE, host=host), **changes)
    path.write_text(json.dumps(asdict(other)))


@pytest.mark.parametrize(
    "make",
    [
        *(b"", b"{", b"[" * 5000, b'{"process": 3, "attempt": 1}', b"x" * (1 << 17)),
        lambda path: changed(path, attempt=2),
        lambda path: changed(path, beat="1"),
        lambda path: changed(path, host="\x1b[31m"),
        # What is no file is not opened.
        lambda path: path.symlink_to(path.parents[1] / "precious"),
        os.mkfifo,
        Path.mkdir,
    ],
)
def test_and_so_is_one_whose_name_cannot_be_read(out, make):
    (out / "precious").write_bytes(b"x")
    (out / "lives").mkdir()
    path = out / "lives" / "a0001.json"
    path.write_bytes(make) if isinstance(make, bytes) else make(path)
    wait_and_take(out, "left no readable name in a0001.json")


@pytest.mark.parametrize("after, asleep", [(0.5, 0), (7, 0), (14.9, 0), (1, 1000)])
def test_one_that_gives_a_sign_of_life_is_left_alone(out, after, asleep):
    """`asleep`: of a taker that was stopped itself; its clock says that the time is over, but it has not looked for all of it."""
    first = taken(out, NODE7)
    clock = Clock()

    def beats() -> None:
        clock.now += asleep
        first.beat()

    clock.then[after] = beats
    with pytest.raises(FolderInUseError, match="process 12 on node7") as caught:
        taken(out, clock=clock)
    assert caught.value.exit_code == ExitCode.IN_USE and "--out" in caught.value.hint
    first.require_held()
    assert os.listdir(out / "lives") == ["a0001.json"]


@pytest.mark.parametrize("took", [[6.0], [6.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0, 6.0]])
def test_a_taker_whose_looks_are_slow_does_not_look_for_ever(out, took):
    taken(out, NODE7)
    clock, looks = Clock(), 0

    def before(call: int, name: str) -> None:
        nonlocal looks
        if name == "names":  # the first of the calls of a look
            clock.now += took[looks % len(took)]
            looks += 1
            assert looks < 100

    lease(out, clock=clock, disk=HookedDisk(LocalDisk(), before)).wait(True, lambda text: None)
    assert clock.now >= 1000 + WAIT


def test_a_look_that_hung_is_not_the_last(out):
    """The server was away for the holder's beats, too; and it counts as one beat, wherever in the wait that is."""
    first, hung = taken(out, NODE7), 0
    for at in count(1):
        clock, looks = Clock(), 0
        first.beat()

        def before(call: int, name: str, at: int = at, clock: Clock = clock) -> None:
            nonlocal looks
            looks += name == "names"
            if name == "names" and looks == at:
                clock.now += 1000
                # Its beat comes after what that look has found.
                clock.then[clock.now - 1000 + 0.5] = first.beat

        second = lease(out, clock=clock, disk=HookedDisk(LocalDisk(), before))
        try:
            second.wait(True, lambda text: None)
        except FolderInUseError:
            hung += 1
        else:
            assert looks < at and hung > 10, "there was a last look, and none of those before it hung"
            return


def test_a_stop_is_answered_while_it_waits(out):
    taken(out, NODE7)
    clock = Clock()
    second = lease(out, clock=clock)
    with pytest.raises(StagerunError, match="nothing was started") as caught:
        second.wait(True, lambda text: None, lambda: clock.now >= 1003)
    assert caught.value.exit_code == ExitCode.SAVED and clock.now < 1005
    assert os.listdir(out / "lives") == ["a0001.json"]


def test_of_two_that_wait_the_second_finds_that_the_first_was_faster(out):
    taken(out, NODE7)
    clock = Clock()
    clock.then[14] = lambda: taken(out, NODE8)
    with pytest.raises(FolderInUseError, match="node8"):
        taken(out, clock=clock)


# ---- two at once


def test_the_making_of_the_file_decides_between_them(out):
    """At every call of the slower one, the faster one comes in between: never do both hold the folder."""
    for at in count(1):
        folder = out / str(at)
        store.prepare(LocalDisk(), folder)
        faster = lease(folder, NODE7)
        faster.wait(False, pytest.fail)
        won: list[int] = []

        def before(call: int, name: str, at: int = at, faster: Lease = faster, won: list[int] = won) -> None:
            if call == at:
                try:
                    won.append(faster.take("", ()))
                except FolderInUseError:
                    won.append(0)

        disk = HookedDisk(LocalDisk())
        slower = lease(folder, NODE8, disk=disk)
        slower.wait(False, pytest.fail)
        disk.before, disk.calls = before, []
        try:
            mine = slower.take("", ())
            slower.require_held()
        except FolderInUseError:
            mine = 0
        if not won:
            assert mine == 1 and at > 5
            return
        assert sorted((mine, won[0])) == [0, 1], f"at call {at}"
        assert life(folder, 1).process.host == ("node8" if mine else "node7")


# ---- a holder that comes back


def tree(out: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_one_that_comes_back_may_not_publish(out):
    first = taken(out, NODE7)
    commit(out, first)
    second, before = taken(out), tree(out)
    with pytest.raises(FolderInUseError) as caught:
        commit(out, first, 200, attempt=1)
    assert f"life 2, process {os.getpid()} on" in caught.value.message and caught.value.exit_code == 73
    assert first.lost
    first.beat()
    first.release(0)
    assert tree(out) == before, "nothing of it is left, nothing of the other is changed"
    second.require_held()
    second.beat()


def test_one_that_comes_back_in_the_middle_of_publishing_takes_nobodys_place(out):
    """At every call of its commit the other takes over and writes a snapshot of the same iteration."""
    for at in count(1):
        folder = out / str(at)
        store.prepare(LocalDisk(), folder)
        first = taken(folder, NODE7)
        other: list[str] = []

        def before(call: int, name: str, at: int = at, folder: Path = folder, other: list[str] = other) -> None:
            if call == at:
                store.sweep(LocalDisk(), folder)
                other.append(commit(folder, taken(folder), 200))

        first.disk = disk = HookedDisk(LocalDisk(), before)
        try:
            own = commit(folder, first, 200, disk, attempt=1)
        except StagerunError:  # most often that it is no longer there: the other has swept it away
            own = ""
        found = store.inventory(LocalDisk(), folder)
        for ref in found.snapshots:
            store.read(LocalDisk(), folder, ref)
        assert found.damaged == ()
        if not other:
            assert own and at > 8
            return
        assert other[0] in [ref.name for ref in found.snapshots], f"at call {at}"
        assert found.snapshots[-1].attempt == 2, "the order puts that of the higher attempt after the other"


def test_one_whose_file_is_gone_or_anothers_is_out(out):
    one, path = taken(out), out / "lives" / "a0001.json"
    path.unlink()
    with pytest.raises(FolderInUseError, match=r"a0001\.json is gone"):
        one.require_held()
    two = taken(out)
    taken(out / "other", NODE8)
    (out / "other" / "lives" / "a0001.json").rename(path)
    with pytest.raises(FolderInUseError, match="life 1, process 12 on node8"):
        two.require_held()


def test_a_file_of_its_own_that_was_torn_is_mended(out):
    one = taken(out)
    (out / "lives" / "a0001.json").write_bytes(b"\0" * 300)
    one.require_held()
    one.beat()
    assert life(out, 1).beat == 1


# ---- a disk that fails


def refusing(call: str, error: int) -> Callable[[int, str], None]:
    def hook(number: int, name: str) -> None:
        if name == call:
            raise OSError(error, os.strerror(error))

    return hook


def test_whether_it_is_held_must_be_known(out):
    one = taken(out)
    for code, kind in ((errno.EIO, StorageError), (errno.EACCES, PermissionDenied), (errno.ESTALE, StorageError)):
        one.disk = HookedDisk(LocalDisk(), refusing("names", code))
        with pytest.raises(kind, match="process lives"):
            one.require_held()
    one.disk = LocalDisk()
    one.require_held()


@pytest.mark.parametrize("hook", [killed, lambda at: failing(at, errno.EIO), lambda at: failing(at, errno.ENOSPC)])
def test_killed_or_failing_at_every_call_the_next_one_goes_on(out, hook):
    for at in count(1):
        folder = out / str(at)
        store.prepare(LocalDisk(), folder)
        taken(folder)  # was killed
        disk = HookedDisk(LocalDisk(), hook(at))
        one = lease(folder, disk=disk)
        try:
            one.wait(True, lambda text: None)
            one.take("", ())
            one.release(69)
        except (Killed, StagerunError) as error:
            assert not isinstance(error, FolderInUseError)
        clock = Clock()
        next_one = taken(folder, clock=clock)
        next_one.require_held()
        assert clock.now == 1000, f"the lock is held, so nobody is waited for; killed at {disk.calls[-1]}"
        attempt = newest(folder)
        assert 2 <= attempt <= 3
        assert not [name for name in os.listdir(folder / "lives") if name.startswith(".")]
        if len(disk.calls) < at:
            return


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK])
def test_without_second_names_for_files_a_life_is_made_all_the_same(out, error):
    one, two = (lease(out, who, disk=HookedDisk(LocalDisk(), refusing("link", error))) for who in (NODE7, NODE8))
    for each in (one, two):
        each.wait(False, pytest.fail)
    assert one.take("", ()) == 1
    with pytest.raises(FolderInUseError, match="node7"):
        two.take("", ())
    assert os.listdir(out / "lives") == ["a0001.json"]


@pytest.mark.parametrize("error", [errno.EEXIST, errno.EIO, errno.ESTALE])
def test_a_life_that_was_made_though_the_answer_was_an_error_is_made(out, error):
    one = lease(out, disk=HookedDisk(LocalDisk(), after=refusing("link", error)))
    one.wait(True, pytest.fail)
    assert one.take("", ()) == 1
    one.require_held()


def test_a_folder_of_lives_that_is_a_link_is_refused_at_once(out):
    (out / "real").mkdir()
    (out / "lives").symlink_to(out / "real")
    with pytest.raises(StorageError, match="can't be read back") as caught:
        taken(out)
    assert "not a link" in caught.value.hint and os.listdir(out / "real") == []


# ---- what a server shows for an instant


def gap(at: int, code: int) -> HookedDisk:
    """At look number `at` at the file of a life, counted from 1, it gives this error."""
    looks = count(1)

    def before(call: int, name: str) -> None:
        if name == "read" and next(looks) == at:
            raise OSError(code, os.strerror(code))

    return HookedDisk(LocalDisk(), before)


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ESTALE])
def test_a_file_that_is_away_for_an_instant_is_no_reason_to_take_over(out, code):
    first, clock = taken(out, NODE7), Clock()
    clock.then[4] = first.beat
    with pytest.raises(FolderInUseError):
        lease(out, clock=clock, disk=gap(3, code)).wait(True, lambda text: None)
    first.disk = disk = gap(1, code)
    first.require_held()
    assert disk.calls.count("read") > 1 and not first.lost


def test_a_chain_of_takers_tells_everybody_of_the_last(out):
    """The second was killed before it could tell the first; what the first sees of the folder is old."""
    first = taken(out, NODE7)

    def before(call: int, name: str) -> None:
        if name == "rename":  # of the first one's file, with the word that it was taken over
            raise Killed

    second = lease(out, NODE8, disk=HookedDisk(LocalDisk(), before))
    second.wait(True, lambda text: None)
    with pytest.raises(Killed):
        second.take("", ())
    assert life(out, 2).process == NODE8 and life(out, 1).taken_by is None
    taken(out)
    first.disk = OldList()
    with pytest.raises(FolderInUseError, match="life 3"):
        first.require_held()


class OldList(LocalDisk):
    """A client of NFS that has not noticed a change of the folder yet."""

    __slots__ = ()

    def names(self, path: Path) -> list[str]:
        return ["a0001.json"] if path.name == "lives" else super().names(path)


def test_without_locks_the_lease_alone_decides(out):
    clock = Clock()
    with audited.no_flock(errno.ENOLCK):
        with Lock(out) as lock:
            assert not lock.held
        first = taken(out, locked=False)  # this process lives
        with pytest.raises(FolderInUseError, match=f"process {os.getpid()} on"):
            taken(out, locked=False, clock=clock)
        assert clock.now == 1000
        first.require_held()


# ---- whom others are told of


def test_the_last_word(out):
    assert store.last_word(LocalDisk(), out) is None
    here = taken(out)
    found = store.last_word(LocalDisk(), out)
    assert found is not None and found[1] and found[0].pid == os.getpid()
    here.release(0)
    assert store.last_word(LocalDisk(), out) is None
    taken(out, replace(HERE, born=1))
    assert store.last_word(LocalDisk(), out) is None, "killed, here"
    away = taken(out, NODE7, clock=Clock())
    away.beat()
    found = store.last_word(LocalDisk(), out)
    assert found is not None and not found[1]
    assert (found[0].host, found[0].pid, found[0].beat) == ("node7", 12, 1) and found[0].since is not None
    (out / "lives" / "a0003.json").write_bytes(b"")
    found = store.last_word(LocalDisk(), out)
    assert found == (store.Holder("a process that left no readable name in a0003.json"), False)
