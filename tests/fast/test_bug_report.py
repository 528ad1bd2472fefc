"""The report of an exception that no user should meet."""

from stagerun.command.ending import bug_report


def test_a_path_in_it_need_not_be_utf8(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = bug_report(ValueError(b"\xff.caffemodel".decode(errors="surrogateescape")))
    (file,) = tmp_path.glob("stagerun-bug-*.txt")
    assert str(file) in said and b"\xff.caffemodel" in file.read_bytes()
