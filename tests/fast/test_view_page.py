"""The page of `stagerun view`: what it shows of schedules and runs, who gets it, and that nothing in it runs."""

import base64
import hashlib
import json
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner
from facade import Server, find_folders
from made_up_runs import killed_and_resumed

from stagerun.cli import main

TOKEN = "a-token"
SOLVERS = Path(__file__).parents[2] / "solvers"
EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'`&{}"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: str


@contextmanager
def served(*paths: Path, host: str = "127.0.0.1") -> Iterator[Any]:
    server = Server(find_folders([str(path) for path in paths]), TOKEN, host, 0)
    work = threading.Thread(target=server.serve_forever, args=(0.01,))
    work.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        work.join()


def ask(server: Any, path: str, method: str = "GET", host: str | None = None, to: str = "127.0.0.1") -> Answer:
    """`path`: below the token, or a whole one. `host`: of the header. `to`: the address that is connected to."""
    connection = HTTPConnection(to, server.server_address[1], timeout=60)
    connection.putrequest(method, path if path.startswith("/") else f"/{TOKEN}/{path}", skip_host=host is not None)
    if host:
        connection.putheader("host", host)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return Answer(answer.status, {name.lower(): value for name, value in answer.headers.items()}, body.decode())


def asking(server: Any, *paths: str) -> list[Answer]:
    return [ask(server, path) for path in paths]


class Markup(HTMLParser):
    """What could run or load something: `risks`. `texts`: all that is shown."""

    LOADING = "script iframe object embed base form img image style foreignobject animate set".split()

    def __init__(self, html: str) -> None:
        super().__init__()
        self.risks: list[str] = []
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag in self.LOADING and dict(attributes) != {"src": "page.js", "data-live": None, "defer": None}:
            self.risks.append(tag)
        for name, value in attributes:
            if name.startswith("on") or name == "style" or (value or "").strip().lower().startswith("javascript:"):
                self.risks.append(f"{tag} {name}")
            if name in ("href", "src", "action") and not (value or "").startswith(("#", "page.", "data:,")):
                self.risks.append(f"{tag} {name}={value}")

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).split())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(SOLVERS / "resnet50_72ep", tmp_path / "dir"))


@pytest.fixture
def out(tmp_path):
    """A run that was killed and went on, and came to its end."""
    story = killed_and_resumed(tmp_path / "out")
    story.start("cyc1", "init")
    story.train("cyc1", 1, 4, 6)
    story.end("cyc1", "init", 0.75)
    return tmp_path / "out"


# -- a schedule


def test_the_page_has_the_plan_the_picture_and_each_stage(folder):
    with served(folder) as server:
        whole, stage, css, script = asking(server, "", "stage/cyc2", "page.css", "page.js")
    shown = Markup(whole.body)
    assert "resnet50_72ep: 5 stages, 22610 iterations, 72.29 epochs" in shown.text
    assert "0.19 -> 0.07696" in shown.text and "there is no LMDB at /datasets/ilsvrc12_train_lmdb" in shown.text
    assert '<svg id="chart"' in whole.body and 'data-stage="collapse"' in whole.body
    assert shown.risks == []
    said = Markup(stage.body)
    assert "starts from cyc1" in said.text and "cyc2.prototxt:" in said.text and said.risks == []
    assert css.headers["content-type"].startswith("text/css") and not re.search(r"url\(|@import|https?:", css.body)
    assert script.headers["content-type"].startswith("text/javascript")
    assert not re.search(r"https?:|eval|Function\(|document\.write|insertAdjacentHTML", script.body)


def test_mistakes_stand_above_the_last_version_without_any(folder):
    with served(folder) as server:
        before, file = ask(server, "").body, folder / "cyc2.prototxt"
        file.write_text(file.read_text() + "max_itr: 5\nbase_lr: -1\n")
        after = Markup(ask(server, "").body).text
    assert "2 mistakes" in after and "max_itr" in after and "did you mean `max_iter`?" in after
    assert "what is below is the last version without any" in after
    assert "22610 iterations" in Markup(before).text and "22610 iterations" in after


# -- runs


def test_a_run_its_lives_and_its_tables(out):
    before = sorted(out.rglob("*"))
    with served(out) as server:
        whole = ask(server, "")
    assert sorted(out.rglob("*")) == before, "nothing is written"
    shown = Markup(whole.body)
    assert "init" in shown.text and "75.00 %" in shown.text and "Ranking" in shown.text
    assert "killed, or ended without a word" in shown.text and shown.risks == []


def test_several_runs_and_one_that_cannot_be_read(out, tmp_path):
    shutil.copytree(out, tmp_path / "two")
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "log.jsonl").write_text("nonsense\n")
    with served(out, tmp_path / "two", empty) as server:
        shown = Markup(ask(server, "").body)
    assert "empty: " in shown.text and "holds no event of a run" in shown.text and "Ranking" in shown.text


def test_a_bug_is_said_in_the_page_and_ends_nothing(folder, monkeypatch, capsys):
    with served(folder) as server:
        ask(server, "")
        with monkeypatch.context() as broken:
            broken.setattr("stagerun.look.page.chart", lambda *_: 1 / 0)
            (folder / "new.prototxt").write_text("# 1")
            assert "this is a bug of stagerun: ZeroDivisionError" in Markup(ask(server, "").body).text
        assert "Traceback" in capsys.readouterr().err
        (folder / "new.prototxt").unlink()
        assert "this is a bug" not in Markup(ask(server, "").body).text


# -- who gets it


REFUSED = {
    404: [{"path": path} for path in ("/", "/x/", "/a-toke/", "/a-tokenn/", "//", "/a-token%2F/", "/../a-token/", "/%C3%A4/", "/wrong/", "stage/nope")],
    400: [{"host": host} for host in ("evil.example", "127.0.0.1.evil.example", "", "localhost.evil:80", "[::2]:80", "127.0.0.2")]
    + [{"host": "evil.example", "to": "127.0.0.2"}],
    200: [{"path": "page.js", "host": host} for host in ("127.0.0.1:1", "localhost:9", "LOCALHOST", "[::1]:80")]
    + [{"path": "page.js", "host": "127.0.0.2:80", "to": "127.0.0.2"}],
    405: [{"path": path, "method": method} for path in ("", "sections/none.json", "stage/init") for method in ("HEAD", "POST", "PUT", "DELETE", "OPTIONS")],
}  # fmt: skip


@pytest.mark.parametrize("status", REFUSED)
def test_who_lacks_the_token_comes_by_another_name_or_does_not_get_is_refused(folder, status):
    with served(folder, host="0.0.0.0") as server:
        for asked_for in REFUSED[status]:
            answer = ask(server, **{"path": "", **asked_for})
            assert answer.status == status, asked_for
            assert answer.headers["content-security-policy"] == (
                "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self' data:; base-uri 'none'; "
                "form-action 'none'; frame-ancestors 'none'"
            )
            companions = ("x-content-type-options", "referrer-policy", "cache-control")
            assert [answer.headers[name] for name in companions] == ["nosniff", "no-referrer", "no-store"]


# -- what others have written


def test_nothing_runs_that_stands_in_solver_files(folder):
    schedule = folder / "schedule.prototxt"
    text = schedule.read_text()
    schedule.write_text(text.replace("resnet50_72ep", EVIL.replace('"', '\\"')))
    file = folder / "cyc2.prototxt"
    file.write_text(f"# {EVIL}\nfoo: '{EVIL.replace(chr(39), '')}' # {EVIL}\n" + file.read_text())
    with served(folder) as server:
        whole = ask(server, "")
        assert Markup(whole.body).risks == [] and "alert(1)" in Markup(whole.body).text
        file.write_text(f"# {EVIL}\n" + file.read_text().partition("\n")[2].partition("\n")[2])
        whole, stage = asking(server, "", "stage/cyc2")
    assert Markup(whole.body).risks == [] and Markup(stage.body).risks == []


def test_nothing_runs_that_stands_in_a_log(out):
    log = out / "log.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
    for line in lines:
        if line["event"] == "RunStarted":
            line |= dict.fromkeys(("device", "version", "schedule"), EVIL)
            line |= {"hosts": [EVIL, EVIL + "2"], "stages": ["init", "cyc1", EVIL]}
    lines.append({"time": 9e3, "event": "Note", "text": EVIL, "warning": True})
    lines.append({**lines[1], "stage": EVIL, "start": EVIL})
    lines.append({"time": 9e3, "event": "Failed", "code": 70, "text": EVIL})
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with served(out) as server:
        whole = ask(server, "")
    assert Markup(whole.body).risks == [] and "alert(1)" in Markup(whole.body).text


# -- one file


def test_the_saved_page_is_one_file_and_its_policy_names_its_script(folder):
    result = CliRunner().invoke(main, ["view", str(folder), "--save", "page.html"])
    assert result.exit_code == 0, result.output
    html = Path("page.html").read_text()
    assert not re.search(r'(?:src|href)="(?!#|data:,)', html)
    assert 'data-detail="cyc3"' in html and "data-live defer" not in html
    scripts, styles = (re.findall(rf"<{kind}>(.*?)</{kind}>", html, re.DOTALL) for kind in ("script", "style"))
    for kind, found in (("script", scripts), ("style", styles)):
        assert len(found) == 1
        digest = base64.b64encode(hashlib.sha256(found[0].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in html
    assert "default-src 'none'" in html


# -- the command


def test_a_page_hears_of_a_file_that_is_saved(folder):
    with served(folder) as server:
        version, sections = json.loads(ask(server, "sections/none.json").body)
        assert "chart" in sections["picture"]
        assert json.loads(ask(server, f"sections/{version}.json").body) == [version, {}]
        (folder / "cyc2.prototxt").write_text("foo: 1\n")
        now, sections = json.loads(ask(server, f"sections/{version}.json").body)
    assert now != version and "Solver has no field" in sections["mistakes"]
