"""CSVs of images with several labels, and LMDBs whose Datums have them."""

from collections.abc import Callable
from pathlib import Path

import pytest
from facade import (
    DataError,
    Datum,
    ImportOptions,
    ImportWork,
    LmdbSource,
    SourceOptions,
    Transform,
    open_source,
)

from stagerun.data import datum
from stagerun.data.importing.engine import Job, run
from stagerun.data.index import load
from stagerun.data.indexing import build
from stagerun.data.pictures import Pictures
from stagerun.tools.data.index import verify_lmdb as verify
from stagerun.tools.data.sources import format_of
from tests.help import made_images


@pytest.fixture
def table(tmp_path: Path) -> Callable[[str], str]:
    for name in "abc":
        (tmp_path / f"{name}.jpg").write_bytes(made_images.jpeg(ord(name)))

    def write(text: str) -> str:
        (tmp_path / "labels.csv").write_text(text)
        return str(tmp_path / "labels.csv")

    return write


def labels(path: str) -> tuple[tuple[str, ...], dict[str, tuple[int, ...] | None]]:
    source = open_source(path, SourceOptions())
    items = [source.item(i) for i in range(len(source))]
    return source.classes, {item.name: item.several for item in items}


@pytest.mark.parametrize(
    ("text", "classes", "found"),
    [
        ("image,labels\na.jpg,3 1\nb.jpg,\nc.jpg,2;2\n", (), [(1, 3), (), (2,)]),
        ("image,tags\r\na.jpg,dog cat\r\nb.jpg,\r\n\r\nc.jpg,dog\r\n", ("cat", "dog"), [(0, 1), (), (1,)]),
        ('path,tags\na.jpg,"sea|sky"\nb.jpg,sea\nc.jpg,7\n', ("7", "sea", "sky"), [(1, 2), (1,), (0,)]),
        ("image,dog,cat\na.jpg,1,1\nb.jpg,0,0\nc.jpg, 0 ,1\n", ("dog", "cat"), [(0, 1), (), (1,)]),
    ],
)
def test_the_forms_of_a_table(
    table: Callable[[str], str], text: str, classes: tuple[str, ...], found: list[tuple[int, ...]]
) -> None:
    path = table(text)
    assert format_of(path, SourceOptions()).name == "csv"
    assert labels(path) == (classes, dict(zip(("a.jpg", "b.jpg", "c.jpg"), found, strict=True)))


@pytest.mark.parametrize("raw", [False, True])
def test_the_import_writes_them_as_floats_and_no_label(table: Callable[[str], str], tmp_path: Path, raw: bool) -> None:
    path = table("image,labels\na.jpg,3 1\nb.jpg,\nc.jpg,2\n")
    work = ImportWork(open_source(path, SourceOptions()), path, ImportOptions(seed=None, raw=raw))
    run(work, str(tmp_path / "lmdb"), Job(threads=2))
    records = LmdbSource(str(tmp_path / "lmdb"))
    stored = [records.get(i)[1] for i in range(3)]
    assert [list(Datum.FromString(record).float_data) for record in stored] == [[1, 3], [], [2]]
    assert [Datum.FromString(record).label for record in stored] == [-1, -1, -1], "0 would be a class"
    fields = [datum.parse(record) for record in stored]
    assert [(one.floats, one.several) for one in fields] == [((1.0, 3.0), True), ((), True), ((2.0,), True)]
    index = load(str(tmp_path / "lmdb"))
    assert index is not None and set(index.labels.tolist()) == {-1}
    assert verify(str(tmp_path / "lmdb"), decode=True).mistakes == ()
    assert build(str(tmp_path / "lmdb")).labels.tolist() == [-1, -1, -1], "as the import said"
    pictures = Pictures(records, Transform(), 3, 10)
    for i in (0, 1):
        with pytest.raises(DataError, match="has several labels, or none, in float_data") as caught:
            pictures.open(i)
        assert 'labels: "float_data"' in caught.value.hint
    numbered = Pictures(records, Transform(), 3, 10, numbered=True)
    assert [numbered.open(i)[1] for i in range(3)] == [0, 1, 2]


def test_another_labelling_is_another_source(table: Callable[[str], str]) -> None:
    one = open_source(table("image,labels\na.jpg,3 1\nb.jpg,2\n"), SourceOptions()).signature
    assert one == open_source(table("image,labels\na.jpg,1 3\nb.jpg,2\n"), SourceOptions()).signature
    assert one != open_source(table("image,labels\na.jpg,1\nb.jpg,3 2\n"), SourceOptions()).signature
