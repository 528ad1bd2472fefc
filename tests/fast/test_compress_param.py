"""`compress_param` and `carry.residual`: what they come to, what depends on them, and what is said of them. Mistakes: golden/spec/compress."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from stagerun import language
from stagerun.base.compression import METHODS, settings_of
from stagerun.base.errors import RecipeError, UsageError
from stagerun.base.recipe import Compression, CompressionRule, Memory, Method, ParamKind, Schedule, Scope
from stagerun.base.snapshots import Inventory, SnapshotRef
from stagerun.cli import main
from stagerun.language.build import completed
from stagerun.language.stored import read_recipe
from stagerun.manual.fields import help_text
from stagerun.plan import make_plan
from stagerun.plan.render import render_json, render_text
from stagerun.train import first_look

SCHEDULE = """name: "made_up" model { name: "resnet_small" num_classes: 10 }
data { train { source: "/data" images: 100 } } stage { name: "a" } stage { name: "b" }
solver { batch_size: 20 device_batch_size: 4 base_lr: 0.1 lr_policy: "fixed" max_epoch: 10 }"""


def read(a: str = "", b: str = "", changes: tuple[str, ...] = ()) -> Schedule:
    texts = {"schedule.prototxt": SCHEDULE.encode(), "a.prototxt": a.encode(), "b.prototxt": b.encode()}
    return language.read(texts, "/s", changes)


def compression(text: str, changes: tuple[str, ...] = ()) -> Compression:
    found = read(f"compress_param {{ {text} }}", changes=changes).stage("a").solver.compress
    assert found is not None
    return found


RESIDUAL = {"TOP_K", "RANDOM_K", "THRESHOLD", "ADAPTIVE_THRESHOLD", "TWO_BIT", "SIGN", "POWER_SGD", "AUTO"}
SETTINGS = {
    "TOP_K": {"ratio": 0.01},
    "RANDOM_K": {"ratio": 0.01},
    "THRESHOLD": {"threshold": 0.001},
    "QSGD": {"qstates": 255},
    "POWER_SGD": {"rank": 4},
    "AUTO": {"ratio": 0.01, "qstates": 255},
}


@pytest.mark.parametrize("method", [method.value for method in Method])
def test_what_is_not_written_follows_from_the_method(method: str) -> None:
    found = compression(f"method: {method}")
    assert {n: v for n in ("ratio", "threshold", "qstates", "rank") if (v := getattr(found, n)) is not None} == (
        SETTINGS.get(method, {})
    )
    assert found.memory is (Memory.RESIDUAL if method in RESIDUAL else Memory.NONE)
    assert (found.scope, found.as_released, found.start_iter, found.param) == (Scope.LAYERWISE, False, 0, ())
    auto = (Method.TOP_K, Method.QSGD, Method.INT8, Method.BF16, Method.LOSSLESS)
    assert found.allow == (auto if method == "AUTO" else ())


def test_every_method_is_known_and_can_be_written() -> None:
    assert METHODS.keys() == set(Method)


def test_what_is_written_counts() -> None:
    text = "ratio: 0.25 scope: ENTIRE_MODEL memory: NONE as_released: true start_iter: 7"
    assert compression(f"method: TOP_K {text}") == Compression(
        method=Method.TOP_K, ratio=0.25, scope=Scope.ENTIRE_MODEL, memory=Memory.NONE, as_released=True, start_iter=7
    )
    assert compression("method: TOP_K as_released: true").memory is Memory.NONE
    assert compression("method: TOP_K as_released: true memory: RESIDUAL").memory is Memory.RESIDUAL
    found = compression("method: AUTO allow: [TWO_BIT, THRESHOLD, POWER_SGD] rank: 2")
    assert (found.ratio, found.threshold, found.rank) == (None, None, 2)  # each of the two has a threshold of its own
    assert settings_of(Method.THRESHOLD, found) == {"threshold": 0.001} and settings_of(Method.SIGN, found) == {}
    assert compression("method: AUTO allow: THRESHOLD").threshold == 0.001


def test_rules_have_what_is_written_around_them_then_the_default_of_their_method() -> None:
    rules = (
        'param { name: "fc*" kind: BIAS method: RANDOM_K } param { method: TOP_K ratio: 0.5 } param { method: TWO_BIT }'
    )
    assert compression(f"method: TOP_K ratio: 0.25 {rules}").param == (
        CompressionRule(name="fc*", kind=ParamKind.BIAS, method=Method.RANDOM_K, ratio=0.25, memory=Memory.RESIDUAL),
        CompressionRule(method=Method.TOP_K, ratio=0.5, memory=Memory.RESIDUAL),
        CompressionRule(method=Method.TWO_BIT, memory=Memory.RESIDUAL),
    )
    (rule,) = compression("method: THRESHOLD param { method: TWO_BIT }").param
    assert rule.threshold is None  # the default of THRESHOLD is not one of TWO_BIT
    (rule,) = compression("method: NONE memory: RESIDUAL param { method: QSGD }").param
    assert rule.qstates == 255


def test_a_start_in_epochs_and_a_change_of_it_in_the_other_unit() -> None:
    text = "method: SIGN start_epoch: 2.1"
    assert compression(text).start_iter == 11
    assert compression(text, ("a.compress_param.start_iter=3",)).start_iter == 3
    assert compression("method: SIGN start_iter: 3", ("a.compress_param.start_epoch=2",)).start_iter == 10
    assert compression(text, ("a.batch_size=40",)).start_iter == 5


def test_nothing_of_it_shows_where_it_is_not_written() -> None:
    plain, zero = read(), read("carry { residual: ZERO }")
    for schedule in (plain, zero):
        text = language.canonical(schedule)
        assert "compress" not in text and "residual" not in text
        for stage in schedule.stages:
            assert not [key for key in completed(stage.identity) if "compress" in key or "residual" in key]
    assert language.canonical(plain) == language.canonical(zero) and language.digest(plain) == language.digest(zero)


def test_what_is_written_is_part_of_the_identity() -> None:
    texts = (
        "",
        "method: QSGD",
        "method: QSGD qstates: 15",
        "method: QSGD start_iter: 1",
        "method: QSGD param { method: NONE }",
    )
    schedules = [read(f"compress_param {{ {text} }}" if text else "") for text in texts]
    schedules.append(read("compress_param { method: SIGN }", "compress_param { method: SIGN }"))
    schedules.append(
        read("compress_param { method: SIGN }", "compress_param { method: SIGN } carry { residual: KEEP }")
    )
    assert len({language.digest(schedule) for schedule in schedules}) == len(schedules)
    spelt = "method: QSGD qstates: 255 memory: NONE scope: LAYERWISE start_epoch: 0 as_released: false"
    assert language.digest(read(f"compress_param {{ {spelt} }}")) == language.digest(schedules[1])


def ref(schedule: Schedule, stage: str, parent: str = "") -> SnapshotRef:
    made = schedule.stage(stage)
    iter = made.solver.max_iter
    identity = made.identity
    return SnapshotRef(
        name=f"{stage}-{iter}", stage=stage, iter=iter, attempt=1, id=stage, parent=parent, identity=identity
    )


SIGN = "compress_param { method: SIGN }"


@pytest.mark.parametrize(
    "before, after, change",
    [
        ("", "", ""),
        ("carry { residual: ZERO }", "", ""),
        ("", "carry { residual: ZERO }", ""),
        (SIGN, SIGN + "carry { residual: KEEP }", "carry.residual ZERO -> KEEP (b.prototxt:1)"),
        (SIGN + "carry { residual: KEEP }", SIGN, "carry.residual KEEP -> ZERO (a default)"),
        (SIGN + "carry { residual: KEEP }", SIGN + "carry { residual: ZERO }", "carry.residual KEEP -> ZERO (b.prototxt:1)"),
        ("", SIGN, "compress_param.method (none) -> SIGN (b.prototxt:1)"),
        (SIGN, "", "compress_param.method SIGN -> (none) (a default)"),
    ],
)  # fmt: skip
def test_a_snapshot_is_stale_only_for_a_change_of_meaning(before: str, after: str, change: str) -> None:
    old, new = read(SIGN, before), read(SIGN, after)
    plan = make_plan(new, Inventory((ref(old, "a"), ref(old, "b", "a"))))
    assert [s.state.value for s in plan.stages] == ["done", "stale" if change else "done"]
    shown = [str(c) for c in plan.stages[1].changes]
    assert change in shown if change else not shown


def test_a_snapshot_of_an_older_version_still_counts() -> None:
    schedule = read()
    old = replace(
        ref(schedule, "a"), identity={k: v for k, v in schedule.stage("a").identity.items() if "ema" not in k}
    )
    assert make_plan(schedule, Inventory((old,))).stages[0].state.value == "done"


FIELDS = st.lists(
    st.sampled_from(
        [
            *("ratio: 0.5", "threshold: 2", "qstates: 3", "rank: 1", "scope: ENTIRE_MODEL", "memory: RESIDUAL", "memory: NONE"),
            *("as_released: true", "start_iter: 4", "start_epoch: 0.3", "start_epoch: 11", "allow: [INT8, TWO_BIT]", "allow: NONE"),
            *('param { name: "fc*" method: NONE }', "param { kind: NORM method: QSGD qstates: 7 }", "param { method: AUTO }"),
        ]
    ),
    max_size=5,
    unique_by=lambda text: text.split(":")[0].split(" {")[0],
)  # fmt: skip


@given(st.sampled_from(Method), FIELDS, st.sampled_from(["", "carry { residual: KEEP }"]))
def test_it_is_wrong_or_read_back_from_the_canonical_form(method: Method, fields: list[str], carry: str) -> None:
    text = f"compress_param {{ method: {method.value} {' '.join(fields)} }}"
    try:
        schedule = read(text, text + carry)
    except RecipeError as error:
        assert all(problem.span.path in ("a.prototxt", "b.prototxt") for problem in error.problems)
        return
    back = read_recipe(language.canonical(schedule))
    assert [s.solver for s in back.stages] == [s.solver for s in schedule.stages]
    assert schedule.stages[1].solver.carry_residual is bool(carry)
    for stage in schedule.stages:
        assert completed(stage.identity) == {**completed({}), **stage.identity}
        assert stage.solver.compress is not None and stage.identity["solver.compress_param.method"] == method.value
    render_text(make_plan(schedule, Inventory()))


# -- what is said of it


def lines(a: str, b: str = "") -> list[str]:
    text = render_text(make_plan(read(a, b), Inventory()))
    return [line.strip() for line in text.splitlines() if "gradients:" in line or "carried over" in line]


@pytest.mark.parametrize(
    "text, said",
    [
        ("method: TOP_K start_epoch: 2", "TOP_K 1 %, layer-wise, with a residual, from epoch 2"),
        ("method: TOP_K ratio: 0.5 as_released: true scope: ENTIRE_MODEL", "TOP_K 50 %, entire model, as released"),
        ("method: LOSSLESS", "LOSSLESS"),
        ("method: TWO_BIT threshold: 0.5 memory: NONE", "TWO_BIT at 0.5, layer-wise"),
        (
            'method: POWER_SGD param { name: "fc*" method: NONE } param { kind: NORM method: QSGD }',
            "POWER_SGD of rank 4, layer-wise, with a residual, fc*: dense, NORM *: QSGD of 255 states",
        ),
        (
            "method: AUTO allow: [TOP_K, INT8]",
            "AUTO of TOP_K 1 %, INT8 or dense, layer-wise, with a residual, two runs may choose differently",
        ),
    ],
)
def test_plan_says_how_gradients_are_compressed(text: str, said: str) -> None:
    assert lines(f"compress_param {{ {text} }}") == [
        f"gradients: {said}",
        "carried over from a: weights, BatchNorm statistics, momentum from zero, data from image 1000",
    ]


@pytest.mark.parametrize("carry, said", [("", "residual from zero"), ("carry { residual: KEEP }", "residual kept")])
def test_plan_says_what_becomes_of_the_residual(carry: str, said: str) -> None:
    assert said in lines(SIGN, SIGN + carry)[2]
    record = json.loads(render_json(make_plan(read(SIGN, SIGN + carry), Inventory())))
    assert said in record["stages"][1]["carried_over"]
    assert record["stages"][1]["compress_param"]["method"] == "SIGN"
    assert "compress_param" not in json.loads(render_json(make_plan(read(), Inventory())))["stages"][0]


def test_check_explain_diff_and_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, a in (("x", ""), ("y", "compress_param { method: TOP_K start_epoch: 2 }\n")):
        Path(folder).mkdir()
        for name, text in (("schedule", SCHEDULE), ("a", a), ("b", "")):
            Path(folder, f"{name}.prototxt").write_text(text)

    def said(*arguments: str) -> str:
        result = CliRunner().invoke(main, arguments, catch_exceptions=False)
        assert result.exit_code in (0, 1)
        return result.output

    assert said("check", "x").partition("digest")[0] == said("check", "y").partition("digest")[0]
    for name in ("a.compress_param.start_iter", "a.compress_param.start_epoch"):
        text = said("explain", "y", name)
        assert "a.compress_param.start_iter   10 = 2.00 epochs (start_epoch: 2)" in text and "y/a.prototxt:1:45" in text
        assert "See `start_epoch`: one of the two" in text
    assert "a default that follows from other fields" in said("explain", "y", "a.compress_param.memory")
    assert "not set" in said("explain", "x", "a.compress_param") and "RESIDUAL" in said("explain", "y", "a")
    assert "compress_param  none" in said("diff", "x", "y") and "train different things" in said("diff", "x", "y")
    assert "start_iter" in help_text("compress_param.start_epoch") and "arXiv" in help_text("CompressionRule.Method")
    for method in Method:
        assert f"    {method.value}\n" in help_text("compress_param.method")


def test_without_zstandard_a_run_says_so_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_look, "find_spec", lambda name: None)
    first_look.require_packages(read("compress_param { method: SIGN }"))
    with pytest.raises(UsageError, match="needs the package zstandard") as caught:
        first_look.require_packages(read(b="compress_param { method: LOSSLESS }"))
    assert "stagerun[lossless]" in caught.value.hint
