"""The page of `stagerun view`: what it shows of schedules and runs, who gets it, and that nothing in it runs."""

import asyncio
import base64
import hashlib
import json
import re
import shutil
import socket
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner
from facade import StageStarted, duration
from made_up_runs import Story, killed_and_resumed

from stagerun import store
from stagerun.cli import main
from stagerun.drawing.picture import Unit
from stagerun.tools.view.app import hosts_of, make_app
from stagerun.tools.view.hub import Hub
from stagerun.tools.view.looking import Looker, asked

TOKEN = "a-token"
SOLVERS = Path(__file__).parents[2] / "solvers"
EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'`&{}"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: str


def hub_of(*paths: Path) -> Hub:
    return Hub(Looker(asked([str(path) for path in paths])), Unit.EPOCHS)


async def ask(
    hub: Hub, path: str, method: str = "GET", host: str = "127.0.0.1:8000", server: str = "127.0.0.1"
) -> Answer:
    """`path`: below the token, or with a `/` of its own. `server`: the address that was connected to."""
    app = make_app(hub, TOKEN, hosts_of("127.0.0.1"))
    whole = path if path.startswith("/") else f"/{TOKEN}/{path}"
    sent: list[dict[str, Any]] = []
    gone = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if not sent:
            return {"type": "http.request", "body": b"", "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", host.encode())] if host else []
    scope = {
        "type": "http", "method": method, "path": whole, "raw_path": whole.encode(), "query_string": b"", "root_path": "",
        "headers": headers, "scheme": "http", "server": (server, 8000), "client": ("127.0.0.1", 1), "http_version": "1.1",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
    }  # fmt: skip
    await app(scope, receive, send)
    body = b"".join(message.get("body", b"") for message in sent[1:]).decode()
    return Answer(sent[0]["status"], {k.decode(): v.decode() for k, v in sent[0]["headers"]}, body)


def asking(hub: Hub, *paths: str, **how: str) -> list[Answer]:
    """One after the other."""

    async def all_of_them() -> list[Answer]:
        return [await ask(hub, path, **how) for path in paths]

    return asyncio.run(all_of_them())


class Markup(HTMLParser):
    """What could run or load something: `risks`. `texts`: all that is shown."""

    LOADING = "script iframe object embed base form img image style foreignobject animate set".split()

    def __init__(self, html: str) -> None:
        super().__init__()
        self.risks: list[str] = []
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag in self.LOADING and dict(attributes) != {"src": "page.js", "defer": None}:
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
    whole, stage, css, script = asking(hub_of(folder), "", "stage/cyc2", "page.css", "page.js")
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
    hub = hub_of(folder)
    before, file = asking(hub, "")[0].body, folder / "cyc2.prototxt"
    file.write_text(file.read_text() + "max_itr: 5\nbase_lr: -1\n")
    after = Markup(asking(hub, "")[0].body).text
    assert "2 mistakes" in after and "max_itr" in after and "did you mean `max_iter`?" in after
    assert "stage cyc2" in after
    assert "what is below is the last version without any" in after
    assert "22610 iterations" in Markup(before).text and "22610 iterations" in after


# -- runs


def test_a_run_its_events_and_its_tables(out):
    before = sorted(out.rglob("*"))
    (whole,) = asking(hub_of(out), "")
    assert sorted(out.rglob("*")) == before, "nothing is written"
    shown = Markup(whole.body)
    assert "init" in shown.text and "75.00 %" in shown.text and "started again" in shown.text
    assert "killed, or ended without a word" in shown.text and shown.risks == []


def test_several_runs_and_one_that_cannot_be_read(out, tmp_path):
    shutil.copytree(out, tmp_path / "two")
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "log.jsonl").write_text("nonsense\n")
    shown = Markup(asking(hub_of(out, tmp_path / "two", empty), "")[0].body)
    assert "1 can't be read" in shown.text and "Ranking" in shown.text


def test_a_bug_is_said_in_the_page_and_ends_nothing(folder, monkeypatch, capsys):
    hub = hub_of(folder)
    asking(hub, "")
    with monkeypatch.context() as broken:
        broken.setattr("stagerun.tools.view.page.chart", lambda *_, **__: 1 / 0)
        assert "this is a bug of stagerun: ZeroDivisionError" in Markup(asking(hub, "")[0].body).text
    assert "Traceback" in capsys.readouterr().err
    assert "this is a bug" not in Markup(asking(hub, "")[0].body).text


# -- who gets it


CONNECTED = "192.0.2.7"  # a name of the server for who has connected to it there
REFUSED = {
    404: [{"path": path} for path in ("/", "/x/", "/a-toke/", "/a-tokenn/", "//", "/a-token%2F/", "/../a-token/", "/ä/", "/wrong/", "stage/nope")],
    400: [{"host": host} for host in ("evil.example", "127.0.0.1.evil.example", "", "localhost.evil:80", "[::2]:80", CONNECTED)]
    + [{"host": "evil.example", "server": CONNECTED}],
    200: [{"path": "page.js", "host": host} for host in ("127.0.0.1:1", "localhost:9", "LOCALHOST", "[::1]:80")]
    + [{"path": "page.js", "host": f"{CONNECTED}:80", "server": CONNECTED}],
    405: [{"path": path, "method": method} for path in ("", "events", "stage/init") for method in ("HEAD", "POST", "PUT", "DELETE", "OPTIONS")],
}  # fmt: skip


@pytest.mark.parametrize("status", REFUSED)
def test_who_lacks_the_token_comes_by_another_name_or_does_not_get_is_refused(folder, status):
    hub = hub_of(folder)
    for asked_for in REFUSED[status]:
        how = dict(asked_for)
        (answer,) = asking(hub, how.pop("path", ""), **how)
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
    (whole,) = asking(hub_of(folder), "")
    assert Markup(whole.body).risks == [] and "alert(1)" in Markup(whole.body).text
    file.write_text(f"# {EVIL}\n" + file.read_text().partition("\n")[2].partition("\n")[2])
    whole, stage = asking(hub_of(folder), "", "stage/cyc2")
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
    (whole,) = asking(hub_of(out), "")
    assert Markup(whole.body).risks == [] and "alert(1)" in Markup(whole.body).text


# -- one file


def test_the_saved_page_is_one_file_and_its_policy_names_its_script(folder):
    result = CliRunner().invoke(main, ["view", str(folder), "--save", "page.html"])
    assert result.exit_code == 0, result.output
    html = Path("page.html").read_text()
    assert not re.search(r'(?:src|href)="(?!#|data:,)', html)
    assert 'data-detail="cyc3"' in html and "data-version" not in html
    scripts, styles = (re.findall(rf"<{kind}>(.*?)</{kind}>", html, re.DOTALL) for kind in ("script", "style"))
    for kind, found in (("script", scripts), ("style", styles)):
        assert len(found) == 1
        digest = base64.b64encode(hashlib.sha256(found[0].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in html
    assert "default-src 'none'" in html


# -- the command


def test_a_port_that_is_taken(folder):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = CliRunner().invoke(main, ["view", str(folder), "--port", str(port)])
    assert result.exit_code == 64 and f"--port {port} can't be had" in result.stderr


def test_status_view_and_plan_say_one_time_left(tmp_path, monkeypatch):
    """With evaluations, of averaged weights too, and an ensemble: training alone takes a third of it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "schedule.prototxt").write_text("""
        name: "made_up" model { name: "resnet_small" num_classes: 10 }
        data { train { source: "t" images: 100 } val { source: "v" images: 100 } }
        solver { batch_size: 25 device_batch_size: 25 base_lr: 0.1 lr_policy: "fixed" transform_param { crop_size: 28 } test_interval: 2 }
        stage { name: "init" solver_param { max_iter: 6 } }
        stage { name: "cyc1" solver_param { max_iter: 4 } }
        stage { name: "collapse" solver_param { max_iter: 2 ema_decay: 0.9 } }
        ensemble { name: "both" members: "cyc1" members: "collapse" }
    """)
    story = Story(tmp_path / "out")
    story.clock = time.time()  # or it would be the log of a run before the one that holds the folder
    story.begin()
    story.start("init", None)
    story.train("init", 1, 6, 0)
    story.test("init", 2, 0.4)
    story.end("init", None, 0.5)
    start = StageStarted(
        stage="cyc1", number=2, iter=0, max_iter=4, start="", batch_size=25, device_batch_size=25, iterations_left=6
    )
    story.write(start)
    story.train("cyc1", 1, 1, 6)

    def said(*words: str) -> str:
        result = CliRunner().invoke(main, [*words, "--out", "out"] if words[0] != "view" else list(words))
        assert result.exit_code == 0, result.output
        return result.stdout

    now = json.loads(said("status", "dir", "--json"))["progress"]
    tested, written = 2.0, 0.1  # seconds that an evaluation and a snapshot took here
    cyc1 = 3 + tested + tested + written  # three iterations, evaluated in the midst and at the end
    assert now["seconds_left_in_stage"] == pytest.approx(cyc1)
    collapse = 2 + 2 * tested + written
    assert now["left"]["collapse"] == pytest.approx(collapse)
    assert now["seconds_left"] == pytest.approx(sum(now["left"].values())) and set(now["left"]) == {
        "cyc1",
        "collapse",
        "ensemble both",
    }
    assert f"{duration(cyc1)} left in stage, {duration(now['seconds_left'])} in all" in said("status", "dir")
    planned = {one["stage"]: one for one in json.loads(said("plan", "dir", "--json"))["time"]["stages"]}
    for name in ("collapse", "ensemble both"):
        assert planned[name]["in_all"] == pytest.approx(now["left"][name])
    with store.Lock(tmp_path / "out"):  # it runs
        said("view", "dir", "out", "--save", "page.html")
    page = Markup((tmp_path / "page.html").read_text()).text
    assert "left in all" + duration(now["seconds_left"]) in page and "left with 1 worker" not in page


def test_a_page_hears_of_a_file_that_is_saved(folder):
    hub, file = hub_of(folder), folder / "cyc2.prototxt"

    async def heard() -> bytes:
        await ask(hub, "")
        async for block in hub.events(hub.version):
            if block.startswith(b"retry"):  # someone watches
                asyncio.get_running_loop().call_later(0.3, file.write_text, "foo: 1\n")
            elif b"foo" in block:
                return block
        raise AssertionError("the stream has ended")

    assert b"Solver has no field" in asyncio.run(asyncio.wait_for(heard(), 60))
