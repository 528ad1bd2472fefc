"""A page that follows a real run, until that is killed and after. What a page shows of other runs: tests/fast/test_view_page.py."""

import http.client
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import processes
import small
import tiny

LIMIT_S = 120.0


class Page:
    """Reads what `stagerun view` sends; `sections` by id, as the page would show them."""

    def __init__(self, *words: str, folder: Path) -> None:
        command = [sys.executable, "-m", "stagerun", "view", *words]
        self.process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        found = re.match(r"http://([^/]+)(/[^/]+/)\n", self.process.stdout.readline())
        assert found, self.process.communicate()
        self.address, self.path = found[1], found[2]
        self.sections: dict[str, str] = {}
        self.version = "none"

    def get(self, path: str) -> str:
        connection = http.client.HTTPConnection(self.address, timeout=LIMIT_S)
        connection.request("GET", self.path + path)
        text = connection.getresponse().read().decode()
        connection.close()
        return text

    def until(self, holds: Callable[[dict[str, str]], bool]) -> None:
        end = time.monotonic() + LIMIT_S
        while not (self.sections and holds(self.sections)):
            assert time.monotonic() < end, self.sections.get("head")
            self.version, new = json.loads(self.get(f"sections/{self.version}.json"))
            self.sections |= new
            time.sleep(0.1)

    def end(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGINT)
        _, said = self.process.communicate(timeout=20)
        return self.process.returncode, said


def test_a_page_follows_a_run_that_is_killed(tmp_path):
    tiny.make_data(tmp_path)
    small.make_schedule(tmp_path / "dir", tmp_path)
    page = Page("dir", folder=tmp_path)
    try:
        page.get("")
        page.until(lambda found: "nothing has been run yet" in found["head"])
        run = processes.Run(["run", "dir", "--nproc", "1", "--threads", "1", *small.ENDLESS]).start(
            ["env", "-C", str(tmp_path)]
        )
        page.until(
            lambda found: "running" in found["head"] and "no iteration" not in found["run"] and "<dd>" in found["run"]
        )
        processes.until(run, lambda: list(tmp_path.glob("out/*/snapshots/init-*")))
        processes.kill_all(run.pids())
        run.wait()
        page.until(lambda found: "killed, or ended without a word" in found["head"])
        began = time.monotonic()
        code, said = page.end()
        assert code == 0 and "Traceback" not in said and "ssh -N -L" in said
        assert time.monotonic() - began < 5
    finally:
        page.process.kill()
    (out,) = (tmp_path / "out").iterdir()
    command = [sys.executable, "-m", "stagerun", "view", str(out), "--save", "page.html"]
    assert subprocess.run(command, cwd=tmp_path).returncode == 0, "a snapshot doesn't say where settings were written"
    assert "collapse" in (tmp_path / "page.html").read_text()
