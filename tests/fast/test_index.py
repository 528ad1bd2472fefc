"""Where records lie, and the side file: right for every layout, and refused when it is not."""

import errno
import os
import random
import re
import struct
import tracemalloc
from dataclasses import asdict, replace
from pathlib import Path

import contract
import lmdb
import made_images
import numpy as np
import pytest
from drawn import examples
from facade import DataError, LmdbSource, PermissionDenied, StorageError, build, index, same_set, set_of
from hypothesis import given
from hypothesis import strategies as st
from made_images import raw, stored

# around what fits into a page, and into one overflow page
SIZES = (0, 1, 784, 2030, 2040, 2041, 4079, 4080, 4081, 9000)


def write(folder: Path, records: dict[bytes, bytes], per_commit: int = 7) -> str:
    pairs = list(records.items())
    with lmdb.open(str(folder), map_size=1 << 26, sync=False) as env:
        for start in range(0, len(pairs), per_commit):
            with env.begin(write=True) as txn:
                for key, value in pairs[start : start + per_commit]:
                    txn.put(key, value)
    return str(folder)


def found_by_offset(path: str) -> dict[bytes, bytes]:
    offsets, data = LmdbSource(path, side_file=False).table, (Path(path) / "data.mdb").read_bytes()
    places = zip(offsets.offsets.tolist(), offsets.lengths.tolist(), strict=True)
    return {offsets.key(i): data[at : at + length] for i, (at, length) in enumerate(places)}


def test_every_record_lies_where_it_is_said_to(tmp_path):
    rng = random.Random(1)
    names = rng.sample(range(10**6), 1500)  # not in order: pages split in the middle
    records = {b"%08d_%s" % (n, b"x" * rng.randrange(200)): rng.randbytes(rng.choice(SIZES)) for n in names}
    path = write(tmp_path / "db", records)
    assert list(found_by_offset(path).items()) == sorted(records.items())
    some = sorted(records)[::3]
    with lmdb.open(path, map_size=1 << 26) as env, env.begin(write=True) as txn:
        for key in some:
            txn.delete(key)
    assert found_by_offset(path).keys() == records.keys() - set(some)


def test_another_kind_of_lmdb_is_refused(tmp_path):
    with lmdb.open(str(tmp_path / "named"), max_dbs=1) as env:
        env.open_db(b"inner")
    with pytest.raises(DataError, match="named databases"):
        LmdbSource(str(tmp_path / "named"))


@examples(300)
@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 255)), min_size=1, max_size=5), st.randoms())
def test_a_damaged_file_is_an_error_or_gives_places_inside_it(tmp_path_factory, changes, rng):
    folder = tmp_path_factory.getbasetemp() / "hostile"
    if not folder.exists():
        write(folder, {b"%04d" % i: bytes(i % 3 * 1500) for i in range(300)})
        (folder / "whole").write_bytes((folder / "data.mdb").read_bytes())
    data = bytearray((folder / "whole").read_bytes())
    for at, value in changes:
        # Page headers and nodes are small numbers near a page's ends: most changes go there.
        data[rng.choice([at % len(data), at % 8192, at // 4096 % (len(data) // 4096) * 4096 + at % 64])] = value
    (folder / "data.mdb").write_bytes(data)
    try:
        offsets = LmdbSource(str(folder), side_file=False).table
    except DataError:
        return
    assert (offsets.offsets >= 0).all() and (offsets.offsets + offsets.lengths <= len(data)).all()


PAGE = 65536


def one_leaf(folder: Path, nodes: list[tuple[int, int, int]], entries: int) -> str:
    """An LMDB of 192 kB: two meta pages and a leaf. `nodes`: where each lies, the bytes of its key and of its value."""
    lower = 16 + 2 * len(nodes)
    leaf = bytearray(struct.pack("<QHHHH", 2, 0, 0x02, lower, 0) + bytes(PAGE - 16))
    for i, (at, key, value) in enumerate(nodes):
        struct.pack_into("<H", leaf, 16 + 2 * i, at)
        struct.pack_into("<HHHH", leaf, at, value, 0, 0, key)
    metas = b""
    for number in range(2):
        tree = struct.pack("<4xHHQQQQQ", 0, 1, 0, 1, 0, entries, 2)  # flags, depth; pages by kind; entries, root
        free = struct.pack("<I44x", PAGE)
        meta = struct.pack("<QHHI", number, 0, 0x08, 0) + struct.pack("<IIQQ", 0xBEEFC0DE, 1, 0, 1 << 30) + free + tree
        metas += (meta + struct.pack("<QQ", 2, number + 1)).ljust(PAGE, b"\0")
    folder.mkdir()
    (folder / "data.mdb").write_bytes(metas + leaf)
    return str(folder)


def test_nodes_that_share_bytes_do_not_make_gigabytes(tmp_path):
    good = [(PAGE - 40 * (i + 1), 20, 12) for i in range(100)]
    assert len(LmdbSource(one_leaf(tmp_path / "good", good, 100))) == 100
    hostile = {
        "the number of nodes of a page is 0 or too large": [(PAGE - 8, 0, 0)] * 7000,
        "a key has 33000 bytes, and LMDB allows 511": [(20000, 33000, 0)],
        "overlap": [(16 + 2 * 6000, 511, 0)] * 6000,
        "reaches over the end of its page": [(PAGE - 100, 93, 0)],
        "overlap, though they have no keys": [(PAGE - 40, 0, 32)] * 6000,
    }
    for number, (why, nodes) in enumerate(hostile.items()):
        path = one_leaf(tmp_path / f"bad{number}", nodes, len(nodes))
        tracemalloc.start()
        with pytest.raises(DataError, match=why.partition(",")[0]) as error:
            LmdbSource(path)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert "data.mdb: is damaged" in error.value.message and most < 8 << 20


def test_a_tree_that_names_a_page_again_and_again_ends(tmp_path):
    """A branch whose children are itself would otherwise grow with every level."""
    path = write(tmp_path / "db", {b"%06d%s" % (i, b"k" * 400): b"" for i in range(2000)}, per_commit=500)
    file = Path(path) / "data.mdb"
    data = bytearray(file.read_bytes())
    for meta in (0, 4096):
        root = int.from_bytes(data[meta + 128 : meta + 136], "little")
        nodes = (int.from_bytes(data[root * 4096 + 12 : root * 4096 + 14], "little") - 16) // 2
        for n in range(nodes):
            at = root * 4096 + int.from_bytes(data[root * 4096 + 16 + 2 * n :][:2], "little")
            data[at : at + 6] = root.to_bytes(6, "little")
        data[meta + 88 + 6 : meta + 88 + 8] = (30).to_bytes(2, "little")
    file.write_bytes(data)
    with pytest.raises(DataError, match="damaged"):
        LmdbSource(path)


def record(i: int) -> bytes:
    if i % 4 == 3:
        return raw(np.arange(i, i + 6, dtype=np.uint8).reshape(2, 3, 1), i)
    return stored(made_images.png(i) if i % 4 == 2 else made_images.jpeg(i, 20 + i, 30, 1 if i % 4 == 1 else 3), i)


@pytest.fixture
def caffes(tmp_path):
    """An LMDB of JPEGs, grey ones, PNGs and pixels."""
    return write(tmp_path / "db", {b"%08d_%d.JPEG" % (i, i): record(i) for i in range(8)})


def test_the_side_file_of_an_lmdb_of_caffes(caffes):
    path = caffes
    assert index.load(path) is None
    steps: list[tuple[int, int]] = []
    built = build(path, lambda done, total: steps.append((done, total)), threads=3, classes=tuple("abcdefgh"))
    index.save(built, path)
    loaded = index.load(path)
    assert loaded is not None and loaded.facts == built.facts and steps[-1] == (8, 8)
    assert loaded.facts.classes == tuple("abcdefgh")
    assert dict(loaded.facts.kinds) == {"baseline JPEG": 2, "grey JPEG": 2, "PNG": 2, "raw": 2}
    data = (Path(path) / "data.mdb").read_bytes()
    for i in range(8):
        value = data[loaded.offsets[i] : loaded.offsets[i] + loaded.lengths[i]]
        assert value == record(i) and index.digest_of(value) == loaded.digests[i]
        assert loaded.key(i) == b"%08d_%d.JPEG" % (i, i) and loaded.labels[i] == i
    assert loaded.heights.tolist()[:4] == [20, 21, 40, 2] and loaded.widths.tolist()[:4] == [30, 30, 56, 3]
    with pytest.raises(ValueError):
        loaded.labels[0] = 1


def test_the_mean_is_that_of_all_pixels(tmp_path):
    """Large images count more than small ones, and grey ones three times alike."""
    images = [made_images.picture(1, 10, 10), made_images.picture(2, 40, 30), made_images.picture(3, 20, 20, 1)]
    pixels = np.concatenate([np.broadcast_to(i, (*i.shape[:2], 3)).reshape(-1, 3) for i in images]).astype(float)
    for name, some, all_of in (("db", images, pixels), ("grey", images[2:], images[2].reshape(-1, 1))):
        path = write(tmp_path / name, {b"%d" % i: raw(image) for i, image in enumerate(some)})
        facts = build(path).facts
        assert facts.mean_bgr == pytest.approx(tuple(all_of.mean(axis=0)), abs=1e-9)
        assert facts.deviation_bgr == pytest.approx(tuple(all_of.std(axis=0)), rel=1e-12)
        facts = build(path, pixels=False).facts
        assert facts.mean_bgr == facts.deviation_bgr == ()


def test_a_side_file_without_the_deviation_is_still_read(tmp_path, monkeypatch):
    path = write(tmp_path / "db", {b"0": record(0)})
    made = build(path)
    older = {name: value for name, value in asdict(made.facts).items() if name != "deviation_bgr"}
    monkeypatch.setattr(index, "asdict", lambda facts: older)
    index.save(made, path)
    loaded = index.load(path)
    assert loaded is not None and loaded.facts == replace(made.facts, deviation_bgr=())


def test_any_changed_byte_of_the_side_file_is_noticed(caffes):
    path = caffes
    built = build(path)
    index.save(built, path)
    file = Path(path) / index.SIDE_FILE
    whole = file.read_bytes()
    rng = random.Random(1)
    for at in [*range(100), *(rng.randrange(len(whole)) for _ in range(400))]:
        # Replaced, not written into: an earlier one is still mapped.
        file.unlink()
        file.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :])
        try:
            loaded = index.load(path)
        except DataError:
            continue
        # Only blanks around the header's JSON are nobody's.
        assert loaded is not None and loaded.facts == built.facts and (loaded.offsets == built.offsets).all()
    for length in (0, 7, 8, 100, len(whole) - 1):
        file.unlink()
        file.write_bytes(whole[:length])
        with pytest.raises(DataError, match="damaged"):
            index.load(path)


@pytest.mark.parametrize(("number", "kind"), [(errno.EACCES, PermissionDenied), (errno.ENOSPC, StorageError)])
def test_a_folder_that_may_not_be_written_is_said(caffes, monkeypatch, number, kind):
    def fail(fd: int) -> None:
        raise OSError(number, os.strerror(number))

    built, before = build(caffes), sorted(os.listdir(caffes))
    with monkeypatch.context() as patch, pytest.raises(kind):
        patch.setattr(os, "fsync", fail)
        index.save(built, caffes)
    assert sorted(os.listdir(caffes)) == before


def test_the_side_file_of_another_lmdb_is_refused(tmp_path):
    """Made in the same way, of as many bytes in as many transactions: only the records differ."""
    one, other = (
        write(tmp_path / name, {b"%08d" % i: raw(np.full((8, 8, 1), first + i, np.uint8), i) for i in range(9)})
        for name, first in (("one", 0), ("other", 1))
    )
    index.save(build(one), one)
    (Path(other) / index.SIDE_FILE).write_bytes((Path(one) / index.SIDE_FILE).read_bytes())
    assert LmdbSource(one).index is not None
    for opened in (index.load, LmdbSource):
        with pytest.raises(DataError, match="belongs to another LMDB") as error:
            opened(other)
        assert "stagerun data verify --index" in error.value.hint
    assert "belongs to another LMDB" in info(other) and "up to date" in info(one)
    assert len(mistakes(other)) == 9


def test_a_side_file_that_is_written_over_while_it_is_used(caffes):
    """`cp` empties the old file first: mapped, the next look at it would end the process."""
    path = caffes
    index.save(build(path), path)
    source = LmdbSource(path)
    (Path(path) / index.SIDE_FILE).write_bytes(b"")
    assert source.key(7) == b"00000007_7.JPEG" and source.get(7)[1] == record(7)
    assert source.index is not None and source.index.labels.tolist() == list(range(8))


def info(path: str) -> str:
    return contract.stagerun(["data", "info", path], Path(path)).stdout


def mistakes(path: str, *words: str) -> list[str]:
    """The keys of the records that `data verify` complains of."""
    done = contract.stagerun(["data", "verify", path, *words], Path(path))
    return re.findall("^record `(.*?)`", done.stdout, re.MULTILINE)


def unusable(folder: Path) -> str:
    """Four whole records of ten, and of those that can't be used each kind."""
    whole, png = made_images.jpeg(0), made_images.png(0)
    changed, gif = png[:60] + bytes([png[60] ^ 255]) + png[61:], b"GIF89a" + bytes(20)
    bad = [b"\xff\xff", stored(whole[:-50], 3), stored(png[:-20], 3), stored(gif), stored(changed), stored(whole, -2)]
    return write(folder, {b"%02d" % i: value for i, value in enumerate([*map(record, range(4)), *bad])})


def test_a_side_file_with_some_records_that_cannot_be_used(tmp_path):
    path = unusable(tmp_path / "db")
    with pytest.raises(DataError, match=r"record `04`: .*6 mistakes") as error:
        build(path)
    assert "--max-bad" in error.value.hint
    bad = [f"{i:02}" for i in range(4, 10)]
    assert mistakes(path, "--index", "--max-bad", "5") == bad and index.load(path) is None
    assert mistakes(path, "--index", "--max-bad", "6") == bad
    made = index.load(path)
    assert made is not None
    assert made.heights.tolist()[4:] == made.widths.tolist()[4:] == [0] * 6
    assert dict(made.facts.kinds)["unusable"] == 6
    assert made.labels.tolist() == [0, 1, 2, 3, -1, 3, 3, 0, 0, -1]
    whole = write(tmp_path / "whole", {b"%d" % i: record(i) for i in range(4)})
    assert made.facts.mean_bgr == build(whole).facts.mean_bgr
    assert "classes       4, 1 to 3 images each" in info(path)
    assert mistakes(path) == mistakes(path, "--decode") == bad


def test_everyone_judges_as_the_loader_does(tmp_path):
    """Index, verify and loader: of arithmetic coding too, which OpenCV decodes, and of a PNG that ends early."""
    whole, png = made_images.jpeg(0, 20, 30), made_images.png(0)
    damaged = bytearray(whole)
    damaged[whole.index(b"\xff\xc4") + 5 : whole.index(b"\xff\xc4") + 21] = b"\xff" * 16
    lossless = whole.replace(b"\xff\xc0", b"\xff\xc3")
    values = {"whole": whole, "arithmetic": arithmetic(), "lossless": lossless, "damaged": bytes(damaged)}
    values |= {"png": png, "truncated": png[:-13], "empty": png[:8], "no end": png[:-12]}
    records = {name.encode(): stored(value) for name, value in values.items()}
    path = write(tmp_path / "db", records)
    refused = set()
    for name, record in records.items():
        try:
            made_images.decoded(record, 3, 10)
        except DataError:
            refused.add(name.decode())
    assert refused == {"lossless", "damaged", "truncated", "empty", "no end"}
    assert set(mistakes(path, "--decode")) == refused
    assert set(mistakes(path, "--index", "--max-bad", "7")) == refused
    made = index.load(path)
    assert made is not None and "unusual grey JPEG" in dict(made.facts.kinds)


def arithmetic() -> bytes:
    """An arithmetic-coded JPEG of 16 x 16 grey pixels, all alike: a scan that is empty decodes to zeros."""
    tables = b"\xff\xdb\0\x43\0" + b"\x10" * 64
    frame = b"\xff\xc9\0\x0b\x08\0\x10\0\x10\x01\x01\x11\0"
    return b"\xff\xd8" + tables + frame + b"\xff\xda\0\x08\x01\x01\0\0\x3f\0" + b"\0" * 8 + b"\xff\xd9"


def test_which_images_an_lmdb_holds_is_known_without_its_side_file(tmp_path):
    """By a sample, whose cost does not grow with the LMDB; a side file adds the fingerprint of all, and nothing is another set for it."""
    content = {b"%08d" % i: bytes([i % 251]) * (i % 9000) for i in range(700)}  # in the page, and in pages of their own
    pictures = dict.fromkeys(content, raw(np.ones((1, 4, 1), np.uint8), 1))
    first, again = (write(tmp_path / name, content, per_commit) for name, per_commit in (("a", 7), ("b", 700)))
    assert set_of(first) == set_of(again) and re.fullmatch(r"700 records, sample [0-9a-f]{16}", set_of(first))
    for other in (content | {b"00000000": b"x"}, content | {b"00000699": b"x"}, dict([*content.items()][:-1])):
        assert set_of(write(tmp_path / str(len(os.listdir(tmp_path))), other)) != set_of(first)
    source = write(tmp_path / "pictures", pictures)
    sample = set_of(source)
    made = build(source)
    index.save(made, source)
    assert set_of(source) == f"{sample}, index {made.facts.fingerprint[:16]}"
    assert b"prepared_from" not in Path(source, index.SIDE_FILE).read_bytes(), "the bytes of before"
    with lmdb.open(source, map_size=1 << 26) as env, env.begin(write=True) as txn:
        txn.put(b"00000351", b"x")
    assert same_set(set_of(source), sample), "the side file is of another state, and the sample doesn't see that record"


def test_what_is_no_lmdb_or_a_damaged_one_has_no_set(tmp_path):
    assert set_of(str(tmp_path)) == set_of(str(tmp_path / "missing")) == ""
    source = write(tmp_path / "a", {b"%08d" % i: b"x" * 3000 for i in range(300)})
    whole = Path(source, "data.mdb").read_bytes()
    rng = random.Random(1)
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(rng.choice((1, 40, 2000))):
            at = rng.randrange(len(damaged))
            damaged[at] = rng.randrange(256)
        Path(source, "data.mdb").write_bytes(damaged)
        assert isinstance(set_of(source), str)
