"""Pages in a real browser: what is shown where a pointer or a finger rests."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import made_schedules
import pytest
from made_up_runs import report
from test_plots import BRANCHES as BRANCHES
from test_plots import both as both
from test_plots import data_of as data_of
from test_plots import other_data as other_data
from test_plots import page as page
from test_report_formats import three as three

from stagerun.drawing.picture import Unit
from stagerun.schedule import make_knobs

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


DRIVE = """<script>addEventListener("load", () => {
  const svg = document.querySelector("#picture svg"), found = [];
  for (const [x, y] of PLACES) {
    const at = new DOMPoint(x, y).matrixTransform(svg.getScreenCTM());
    svg.dispatchEvent(new PointerEvent("pointermove", {clientX: at.x, clientY: at.y, bubbles: true}));
    const rows = [...document.querySelectorAll("#values tr")].map(r => [...r.cells].map(c => c.textContent));
    found.push([document.querySelector("#values b").textContent, Object.fromEntries(rows)]);
  }
  const result = document.body.appendChild(document.createElement("pre"));
  result.id = "result";
  result.textContent = JSON.stringify(found);
});</script></body>"""


def hovered(whole: str, places: list[list[float]], folder: Path) -> list[tuple[str, dict[str, str]]]:
    """What a real browser shows at each place of the picture: a title, and values by their names."""
    (folder / "page.html").write_text(whole.replace("</body>", DRIVE.replace("PLACES", json.dumps(places))))
    done = subprocess.run(
        [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile", "--dump-dom",
         f"file://{folder}/page.html"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    result = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.DOTALL)
    assert result, done.stderr
    found: list[tuple[str, dict[str, str]]] = json.loads(result.group(1))
    return found


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
def test_hovering_shows_the_epochs_of_the_side(tmp_path: Path) -> None:
    steps = made_schedules.steps()
    picture = both(steps, other_data(steps, 500))
    whole = page(picture)
    data = data_of(whole)
    lane = data["stages"][2]["lane"]
    row = next(r for r in data["rows"] if r[0] == lane)  # type: ignore[index]
    point = next(p for p in data["stages"][2]["points"] if p[0] == 60)  # type: ignore[attr-defined]
    ((title, shown),) = hovered(whole, [[point[1], (row[1] + row[2]) / 2]], tmp_path)  # type: ignore[index, operator]
    assert (title, shown["iteration"], shown["epoch"]) == ("B main", "60 of 120", "12.0000")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
def test_hovering_shows_the_values_of_the_plan(tmp_path: Path) -> None:
    """In a real browser: over a branch's curve, over the trunk's, and over a branch's line in the bands."""
    whole = page(BRANCHES)
    data = data_of(whole)
    stages = {str(s["name"]): s for s in data["stages"]}
    points: dict[str, list[list[float]]] = {name: s["points"] for name, s in stages.items()}  # type: ignore[misc]
    a = points["cool_a"][len(points["cool_a"]) // 2]
    main = points["main"][len(points["main"]) // 2]
    b = points["cool_b"][-1]
    rows: list[list[float]] = data["rows"]  # type: ignore[assignment]
    row = next(r for r in rows if r[0] == 1)
    places = [[a[1], a[2] + 1], [main[1], main[2] - 2], [b[1], (row[1] + row[2]) / 2]]
    of = made_schedules.branches()
    wanted = [
        ("cool_a, leaves main at 400", "cool_a", a),
        ("main", "main", main),
        ("cool_b, leaves main at 700", "cool_b", b),
    ]
    for (title, shown), (expected, name, point) in zip(hovered(whole, places, tmp_path), wanted, strict=True):
        solver, iter = of.stage(name).solver, int(point[0])
        at = make_knobs(solver)(iter)
        assert title == expected
        assert shown["iteration"] == f"{iter} of {solver.max_iter}"
        assert (shown["learning rate"], shown["weight decay"]) == (f"{at.lr:.6g}", f"{at.weight_decay:.6g}")
        assert shown["epoch"] == f"{BRANCHES.stage(name).x(iter, Unit.EPOCHS):.4f}"
        assert (shown["momentum"], shown["batch"], shown["image size"]) == ("0.9", "100", "28")


LOOK = """<iframe style="width: 360px; height: 3000px; border: 0"></iframe><script>
const frame = document.querySelector("iframe");
frame.addEventListener("load", () => {
  const page = frame.contentDocument, data = JSON.parse(page.getElementById("data").textContent);
  const svg = page.querySelector(".narrow svg"), [, x, y] = data.panels[1][1];
  const [, , epoch, , loss] = data.points[3];
  const place = (axis, value) => axis[0] + (value - axis[2]) / (axis[3] - axis[2]) * (axis[1] - axis[0]);
  const at = new DOMPoint(place(x, epoch), place(y, loss)).matrixTransform(svg.getScreenCTM());
  svg.dispatchEvent(new PointerEvent("pointerdown", {clientX: at.x, clientY: at.y, bubbles: true}));
  const rows = [...page.querySelectorAll("#values tr")].map(r => [...r.cells].map(c => c.textContent));
  const result = {beyond: page.documentElement.scrollWidth - page.documentElement.clientWidth, shown: Object.fromEntries(rows)};
  document.body.appendChild(document.createElement("pre")).textContent = JSON.stringify(result);
});
frame.srcdoc = PAGE;</script>"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
def test_a_phone_needs_no_scrolling_sideways_and_a_touch_shows_values(three: list[Path], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    whole = report(*three, "--format", "html").stdout
    (tmp_path / "look.html").write_text(LOOK.replace("PAGE", json.dumps(whole).replace("<", "\\u003c")))
    done = subprocess.run(
        [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile", "--dump-dom",
         f"file://{tmp_path}/look.html"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    result = re.search(r"<pre>(.*?)</pre>", done.stdout)
    assert result, done.stderr
    found = json.loads(html.unescape(result[1]))
    assert found["beyond"] == 0
    assert found["shown"] == {"iteration": "4", "epoch": "1", "training loss": "1.6", "learning rate": "0.025"}
