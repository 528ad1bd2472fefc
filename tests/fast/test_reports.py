"""`stagerun report`, and `status`, on folders of runs that `made_up_runs` writes, whose numbers can be checked by hand: what each command
says of a folder stands in tests/cases/reports/NAME.txt."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import contract
import log_help
import pytest
from facade import Event, Failed, JsonLines, PieceStarted, Retraced, RunFinished, SnapshotWritten, StageStarted, Stopped
from log_help import evaluated, finished, iterated, stage_started
from made_up_runs import STAGES, Story, killed_and_resumed, three_seeds

# a and b start at main's end, cut at main@3
TREE = {"main": (6, 0.1), "a": (2, 0.01), "b": (2, 0.02), "cut": (2, 0.03)}
ALONE = {"main": 0.5, "a": 0.6, "b": 0.7, "cut": 0.4}
DENSE = 1_000_000


stages = partial(patch.dict, STAGES, clear=True)  # in the place of those that `made_up_runs` has


def train(story: Story, stage: str, parent: str | None, before: int, top1: float) -> None:
    story.start(stage, parent)
    story.train(stage, 1, STAGES[stage][0], before)
    story.end(stage, parent, top1)


def done(story: Story, **more: object) -> None:
    story.write(RunFinished(trained=True, seconds=1, **more))


def trunk(story: Story, top1: float = 0.5, tested: int = 3) -> None:
    """With the snapshot at 3 and an evaluation."""
    story.start("main", None)
    story.train("main", 1, 3, 0)
    story.test("main", tested, 0.3)
    story.snapshot("main", 3, None, f"half{story.life}{story.seed}")
    story.train("main", 4, 6, 0)
    story.end("main", None, top1)


def whole(story: Story, better: float = 0.0, tested: int = 3) -> Story:
    """One life of the whole tree, and its two ensembles."""
    story.begin(ensembles=("both", "three"))
    trunk(story, ALONE["main"] + better, tested)
    for stage, parent, before in (("a", "main", 6), ("b", "main", 6), ("cut", "main@3", 3)):
        train(story, stage, parent, before, ALONE[stage] + better)
    story.results()
    story.ensemble("both", "a", "b", top1=0.75 + better)
    story.ensemble("three", "a", "b", "cut", top1=0.8 + better, rule="MEAN_LOGIT")
    done(story)
    return story


def log_lines(out: Path, change: Callable[[dict], dict | None]) -> None:
    """The log once more, with each line changed, or left out."""
    log, kept = out / "log.jsonl", []
    for text in log.read_text().splitlines():
        record = json.loads(text) if text.endswith("}") else None
        changed = change(record) if record else None
        kept += [text] if record is None else [json.dumps(changed)] if changed else []
    log.write_text("\n".join(kept) + "\n")


# -- the folders


def killed(folder: Path) -> None:
    story = killed_and_resumed(folder / "out")
    shutil.copytree(folder / "out", folder / "swallowed")
    with open(folder / "out" / "log.jsonl", "ab") as file:
        file.write(b'[]\n{"time": 1, "event": "Iterated"}\n\xff\xfe\n{"time": 1e999, "event": "RunFinished"}\n')
        file.write(b'{"time": 1, "event": "Renamed", "stage": "a", "snapshots": []}\n')  # of an older version
        file.write(b'{"time": 1, "event": "FromTheFuture"}\n{"time": 3001, "event": "Iter')
    log_lines(
        folder / "swallowed", lambda one: None if one["event"] == "StageFinished" or one.get("iter") == 2 else one
    )
    shutil.copytree(folder / "swallowed", folder / "found")
    (folder / "found" / "results").mkdir()
    result = folder / "found" / "results" / f"{story.ends['init']}.json"
    result.write_text(json.dumps(asdict(story.finished("init", 0.5))))


def ended(folder: Path) -> None:
    story = Story(folder / "out").begin()
    story.start("init", None)
    story.train("init", 1, 3, 0)
    story.write(Failed(code=79, text="the loss is nan\n  hint: lower base_lr"))
    story = Story(folder / "nothing_to_do").whole(0.5, 0.6, 0.7)
    story.begin()
    story.write(RunFinished(trained=False, seconds=0))


def started_over(folder: Path) -> None:
    story = Story(folder / "out").whole(0.5, 0.6, 0.7)
    story.begin()
    story.start("init", None)
    story.train("init", 1, 2, 0)
    shutil.copytree(folder / "out", folder / "midst")
    story.train("init", 3, 6, 0)
    story.end("init", None, 0.55)
    shutil.copytree(folder / "out", folder / "init_done")
    train(story, "cyc1", "init", 6, 0.65)


def other_stages(folder: Path) -> None:
    story = Story(folder / "out").begin()
    train(story, "init", None, 0, 0.5)
    story.start("cyc1", "init")
    story.train("cyc1", 1, 2, 6)
    story.begin(stages=["init", "collapse"])
    train(story, "collapse", "init", 6, 0.7)
    done(story)
    with stages(**TREE):
        story = whole(Story(folder / "disabled"))
        story.begin(["main", "b"], disabled=("a", "never"), ensembles=("both",))
        done(story)


def seeds(folder: Path) -> None:
    three_seeds(folder)
    Story(folder / "other", 4, workers=4, in_cyc1="0.07", now_torch="2.14").whole(0.6, 0.1, 0.1)
    half = Story(folder / "half", 4).begin()
    train(half, "init", None, 0, 0.7)
    half.start("cyc1", "init")
    half.train("cyc1", 1, 3, 6)
    half.write(Stopped(stage="cyc1", iter=3, reason="asked to stop"))
    shutil.copytree(folder / "seed1", folder / "bare")
    for manifest in (folder / "bare" / "snapshots").glob("*/MANIFEST.json"):
        manifest.unlink()
    for seed, ema in ((1, 0.95), (2, 0.97)):
        Story(folder / f"ema{seed}", seed).whole(0.6, 0.8, 0.9, ema=ema)


def versions(folder: Path) -> None:
    """A field that a snapshot is too old for has its default."""
    with stages(**TREE):
        whole(Story(folder / "old", 1))
        whole(
            Story(folder / "new", 2, solver__label_smoothing="0.0", solver__knot="[]", solver__decay_from="STAGE_START")
        )
        whole(Story(folder / "other", 3, solver__label_smoothing="0.1"))


def formats(folder: Path) -> None:
    Story(folder / "a|b<i>").whole(0.5, 0.7575, 0.75)
    (folder / "rehearsed").mkdir()
    (folder / "rehearsed" / "rehearsal.json").write_text("{}")
    (folder / "empty").mkdir()
    (folder / "empty" / "log.jsonl").write_text("\nnot JSON\n")
    for seed in (1, 2):
        Story(folder / f"seed{seed}", seed).whole(0.6, 0.8, 0.9)


def branches(folder: Path) -> None:
    """`early` beside `cyc1`; its first epoch is that in which `init` ends."""
    with stages(init=(6, 0.1), cyc1=(4, 0.05), early=(2, 0.01)):
        story = Story(folder / "out").begin()
        for stage, parent, before in (("init", None, 0), ("cyc1", "init", 6), ("early", "init", 6)):
            train(story, stage, parent, before, 0.5)


def tree(folder: Path) -> None:
    with stages(**TREE):
        whole(Story(folder / "out"))
        whole(Story(folder / "not_tested_there"), tested=2)
        whole(Story(folder / "seed2", 2), better=0.1)
        whole(Story(folder / "edited", 3, in_a="0.7"), better=0.2)


def members(folder: Path) -> None:
    """A member has become another; then an evaluation that its counters say is newer, by a clock that is wrong; then one is lost."""
    with stages(**TREE):
        story = whole(Story(folder / "piece"))
        story.begin(ensembles=("both", "three"))
        story.snapshot("a", 1, "main", "a piece")
        story = whole(Story(folder / "another"))
        story.recipe = {"in_a": "0.5"}
        story.begin(ensembles=("both", "three"))
        train(story, "a", "main", 6, 0.9)
        shutil.copytree(story.out, folder / "evaluated")
        file = folder / "evaluated" / "results" / "ensembles" / "both.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"attempt": story.life, "serial": 9}))
        os.utime(file, (1, 1))
        shutil.copytree(folder / "evaluated", folder / "lost")
        shutil.rmtree(folder / "lost" / "snapshots" / "b-00000002-a0001")


def earlier(folder: Path) -> None:
    """`main` once more, with another recipe; and its branch snapshot lost, and made again with the same bits, and with others."""
    with stages(**TREE):
        story = whole(Story(folder / "out"))
        story.life, story.recipe = 2, {"in_main": "0.2"}
        story.begin(ensembles=("both", "three"))
        trunk(story, 0.55)
        done(story, not_chosen=("a", "b", "cut"))


def pieces(folder: Path) -> None:
    """The first iterations of the trunk once more, for `cut`; and such a piece under way."""
    with stages(**TREE):
        for name, until in (("out", 3), ("begun", 200), ("under_way", 200), ("over", 200)):
            story = whole(Story(folder / name))
            story.begin(None if name == "out" else ["main", "a", "b", "cut"])
            story.write(
                PieceStarted(
                    stage="main", iter=0, until=until, start="seed 1", children=("cut",), iterations_left=until + 2
                )
            )
            for i in range(1, 1 + (3 if name == "out" else 0 if name == "begun" else 120)):
                story.clock += 2
                loss = 2 - 0.1 * i if name == "out" else i / 100
                slow = name != "out" and i < 61
                again = Retraced(
                    stage="main", iter=i, until=until, lr=0.1, loss=loss, images=25, seconds=9.0 if slow else 2.0
                )
                story.write(again)
            if name == "out":
                train(story, "cut", "main@3", 3, 0.4)
            if name == "over":
                start = StageStarted(
                    stage="cut", number=4, iter=0, max_iter=2, start="main-00000003-a0002", batch_size=25, device_batch_size=5
                )  # fmt: skip
                story.write(start)


def many_ends(folder: Path) -> None:
    names = [f"end{n:02}" for n in range(20)]
    with stages(main=(6, 0.1), **{name: (1, 0.01 * (n + 1)) for n, name in enumerate(names)}):
        story = Story(folder / "out").begin(["main", *names], ensembles=[f"pair{n}" for n in range(9)])
        trunk(story)
        for n, name in enumerate(names):
            train(story, name, "main", 6, 0.6 + 0.01 * (7 * n % 20))  # 0.60 to 0.79, each once
        story.results()
        for n in range(9):
            story.ensemble(f"pair{n}", *names[n : n + 2], top1=0.8 + 0.01 * n)
        done(story)


def side_by_side(folder: Path) -> None:
    """`run --parallel` logs a start for its stages, and one for the ensembles. A later run is another life."""
    with stages(**TREE):
        story = Story(folder / "out").begin(side_by_side=2)
        trunk(story)
        for stage in ("a", "b"):
            train(story, stage, "main", 6, ALONE[stage])
        story.results()
        done(story)
        story.begin(ensembles=("both",), rest=True)
        story.clock += 5
        story.ensemble("both", "a", "b", top1=0.75)
        done(story)
        shutil.copytree(story.out, folder / "later")
        story.out = folder / "later"
        story.begin()
        done(story)


def effects(folder: Path) -> None:
    """Two seeds of three pairs that differ in the policy alone, and then in what they start from."""
    policies = {"keep": '"fixed"', "drop": '"poly"', "keep_late": '"fixed"', "drop_late": '"poly"'}
    found = {"1": (0.60, 0.70, 0.70, 0.74), "2": (0.60, 0.72, 0.70, 0.74), "same": (0.60, 0.70, 0.70, 0.74)}
    with stages(main=(6, 0.1), **dict.fromkeys(policies, (2, 0.01))):
        for name, top1 in found.items():
            story = Story(folder / f"run{name}", 1 if name == "same" else int(name)).begin()
            trunk(story)
            for (stage, policy), value in zip(policies.items(), top1, strict=True):
                story.recipe = {"solver__lr_policy": policy} | ({"solver__power": "2"} if "poly" in policy else {})
                late = stage.endswith("late")
                train(story, stage, "main" if late else "main@3", 6 if late else 3, value)
            done(story)


def gradients(folder: Path) -> None:
    """Stale, compressed and seldom met ones, and the same run without a word of them."""
    story = Story(folder / "plain").whole(0.6, 0.8, 0.9)
    story = Story(folder / "sent").whole(0.6, 0.8, 0.9)

    def sent(one: dict) -> dict:
        if one["event"] == "StageStarted" and one["stage"] == "init":
            return one | {"dense_bytes": DENSE}
        if one["event"] != "Iterated":
            return one
        return one | {"sent_bytes": 10_000 * one["iter"] if one["stage"] == "init" else 2 * DENSE}

    log_lines(story.out, sent)


def tools(folder: Path) -> None:
    """A trunk and its collapse, displayed every second iteration; `killed` once after 6 iterations, to go on from 4."""

    def written(name: str, *events: Event | Iterator[Event]) -> None:
        (folder / name).mkdir(exist_ok=True)
        with JsonLines(folder / name / "log.jsonl", print) as log:
            log_help.feed(log, *events)

    def started(stage: str, iter: int = 0, **changes: object) -> Event:
        parts = {} if stage == "trunk" else {"max_iter": 4, "start": "trunk-00000008-a0001"}
        return stage_started(stage, iter, **{"display": 2, **parts, **changes})

    trunk = [iterated("trunk", i, epoch=i / 5) for i in range(1, 9)]
    collapse = [iterated("collapse", i, epoch=1.6 + i / 5) for i in range(1, 5)]
    early = [iterated("early", i, epoch=0.8 + i / 5) for i in range(1, 5)]
    trunk[1] = replace(trunk[1], sent_bytes=20_000)
    begun, end = log_help.run_started(), RunFinished(trained=True, seconds=1)
    saved = SnapshotWritten(stage="trunk", iter=4, name="trunk-00000004-a0001", bytes=1, blocked_seconds=0, seconds=0.1)
    again = [*(replace(one, loss=9.0) for one in trunk[4:6]), begun, started("trunk", 4, train_seconds=4 * 36.0)]
    for name, display in (("out", 2), ("killed", 2), ("silent", 0), ("branch", 2)):
        written(name, begun, started("trunk", display=display), *trunk[:4], evaluated("trunk", 4, 0.25), saved)
        written(name, *(again if name == "killed" else []), *trunk[4:], evaluated("trunk", 8, 0.5))
        written(name, finished("trunk", 8, 0.5, 8 * 36.0), started("collapse", display=display))
        written(name, *collapse, evaluated("collapse", 4, 0.75))
        written(name, finished("collapse", 4, 0.75, 4 * 36.0), end)
    stop = Stopped(stage="trunk", iter=2, reason="asked to stop")
    written("stopped", begun, started("trunk"), *trunk[:2], evaluated("trunk", 2, 0.5, ema=True), stop)
    written("branch", replace(begun, stages=("trunk", "collapse", "early")), started("early", start=saved.name))
    written("branch", *early[:2], evaluated("early", 2, 0.1, images=10), *early[2:])
    written("branch", evaluated("early", 4, 0.6), evaluated("early", 4, 0.7, ema=True))
    written("branch", finished("early", 4, 0.6, 4 * 36.0, ema_top1=0.7, ema_top5=0.95))


STORIES = {
    one.__name__: one
    for one in (
        killed, ended, started_over, other_stages, seeds, versions, formats, branches, tree, members, earlier, pieces, many_ends,
        side_by_side, effects, gradients, tools,
    )
}  # fmt: skip
FOLDER = contract.CASES / "reports"


def tell(name: str, folder: Path) -> None:
    STORIES[name](folder)


@pytest.mark.parametrize("name", STORIES)
def test_what_is_said(name, tmp_path):
    contract.check(FOLDER / f"{name}.txt", tmp_path, prepare=tell)


if __name__ == "__main__":
    contract.rewrite([FOLDER / f"{name}.txt" for name in STORIES], prepare=tell)
