"""CSVs of images with several labels, and LMDBs whose Datums have them."""

import contract
import made_images
import pytest
from facade import DataError, Datum, LmdbSource, SourceOptions, Transform, index, open_source


@pytest.fixture
def table(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.jpg").write_bytes(made_images.jpeg(ord(name)))

    def write(text: str) -> str:
        (tmp_path / "labels.csv").write_text(text)
        return str(tmp_path / "labels.csv")

    return write


@pytest.mark.parametrize(
    ("text", "classes", "found"),
    [
        ("image,labels\na.jpg,3 1\nb.jpg,\nc.jpg,2;2\n", (), [(1, 3), (), (2,)]),
        ("image,tags\r\na.jpg,dog cat\r\nb.jpg,\r\n\r\nc.jpg,dog\r\n", ("cat", "dog"), [(0, 1), (), (1,)]),
        ('path,tags\na.jpg,"sea|sky"\nb.jpg,sea\nc.jpg,7\n', ("7", "sea", "sky"), [(1, 2), (1,), (0,)]),
    ],
)
def test_the_forms_of_a_table(table, text, classes, found):
    source = open_source(table(text), SourceOptions())
    assert (source.kind, source.classes) == ("csv", classes)
    items = [source.item(i) for i in range(len(source))]
    assert [(item.name, item.several) for item in items] == list(zip(("a.jpg", "b.jpg", "c.jpg"), found, strict=True))


@pytest.mark.parametrize("raw", [(), ("--raw",)])
def test_the_import_writes_them_as_floats_and_no_label(table, tmp_path, raw):
    table("image,labels\na.jpg,3 1\nb.jpg,\nc.jpg,2\n")
    for words in (["import", "labels.csv", "lmdb", "--no-shuffle", *raw], ["verify", "lmdb", "--decode"]):
        done = contract.stagerun(["data", *words], tmp_path)
        assert done.exit_code == 0, done.output
    records = LmdbSource(str(tmp_path / "lmdb"))
    stored = [Datum.FromString(records.get(i)[1]) for i in range(3)]
    assert [list(record.float_data) for record in stored] == [[1, 3], [], [2]]
    assert [record.label for record in stored] == [-1, -1, -1], "0 would be a class"
    for again in (False, True):
        if again:
            done = contract.stagerun(["data", "verify", "--index", "lmdb"], tmp_path)
            assert done.exit_code == 0, done.output
        made = index.load(str(tmp_path / "lmdb"))
        assert made is not None and set(made.labels.tolist()) == {-1}
    about = {"train": False, "channels": 3, "num_classes": 10, "seed": 1, "shuffle": False}
    for i in (0, 1):
        with pytest.raises(DataError, match="has several labels, or none, in float_data") as caught:
            made_images.loader(records, Transform(), **about).batch(i, 1)
        assert 'labels: "float_data"' in caught.value.hint
    numbered = made_images.loader(records, Transform(), numbered=True, **about)
    assert numbered.batch(0, 3).labels.tolist() == [0, 1, 2]


def test_another_labelling_is_another_source(table):
    one = open_source(table("image,labels\na.jpg,3 1\nb.jpg,2\n"), SourceOptions()).signature
    assert one == open_source(table("image,labels\na.jpg,1 3\nb.jpg,2\n"), SourceOptions()).signature
    assert one != open_source(table("image,labels\na.jpg,1\nb.jpg,3 2\n"), SourceOptions()).signature
