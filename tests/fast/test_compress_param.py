"""`compress_param` and `carry.residual`: what they come to, and what depends on them. What is said of them: cases/plan_rates. Mistakes:
golden/spec/compress and retired_values."""

import pytest
from facade import Compression, Memory, Method, ParamKind, Schedule, Scope, read_recipe, recipe

from stagerun import language

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


RESIDUAL = {"TOP_K", "RANDOM_K", "THRESHOLD", "POWER_SGD", "AUTO"}
SETTINGS = {
    "TOP_K": {"ratio": 0.01},
    "RANDOM_K": {"ratio": 0.01},
    "THRESHOLD": {"threshold": 0.001},
    "QSGD": {"qstates": 255},
    "POWER_SGD": {"rank": 4},
    "AUTO": {"ratio": 0.01, "qstates": 255},
}


@pytest.mark.parametrize("method", [method.value for method in Method])
def test_what_is_not_written_follows_from_the_method(method):
    found = compression(f"method: {method}")
    assert {n: v for n in ("ratio", "threshold", "qstates", "rank") if (v := getattr(found, n)) is not None} == (
        SETTINGS.get(method, {})
    )
    assert found.memory is (Memory.RESIDUAL if method in RESIDUAL else Memory.NONE)
    assert (found.scope, found.start_iter, found.param) == (Scope.LAYERWISE, 0, ())
    auto = (Method.TOP_K, Method.QSGD, Method.BF16)
    assert found.allow == (auto if method == "AUTO" else ())


def test_rules_have_what_is_written_around_them_then_the_default_of_their_method():
    rules = 'param { name: "fc*" kind: BIAS method: RANDOM_K } param { method: TOP_K ratio: 0.5 } param { method: THRESHOLD }'
    assert compression(f"method: TOP_K ratio: 0.25 {rules}").param == (
        recipe.CompressionRule(
            name="fc*", kind=ParamKind.BIAS, method=Method.RANDOM_K, ratio=0.25, memory=Memory.RESIDUAL
        ),
        recipe.CompressionRule(method=Method.TOP_K, ratio=0.5, memory=Memory.RESIDUAL),
        recipe.CompressionRule(method=Method.THRESHOLD, threshold=0.001, memory=Memory.RESIDUAL),
    )
    (rule,) = compression("method: NONE memory: RESIDUAL param { method: QSGD }").param
    assert rule.qstates == 255


def test_what_is_written_is_part_of_the_identity():
    texts = "qstates: 255", "qstates: 15", "start_iter: 1", "param { method: NONE }"
    schedules = [read(), *(read(f"compress_param {{ method: QSGD {text} }}") for text in texts)]
    schedules.append(read("compress_param { method: THRESHOLD }", "compress_param { method: THRESHOLD }"))
    assert len({language.digest(schedule) for schedule in schedules}) == len(schedules)
    spelt = "method: QSGD qstates: 255 memory: NONE scope: LAYERWISE start_epoch: 0"
    assert language.digest(read(f"compress_param {{ {spelt} }}")) == language.digest(schedules[1])


@pytest.mark.parametrize(
    "now, then", [("as_released: false", "as_released: true"), ("method: TOP_K", "method: TWO_BIT")]
)
def test_a_snapshot_that_used_what_was_retired_is_refused_by_name(now, then):
    text = language.canonical(read("compress_param { method: TOP_K }"))
    assert now in text, "unwritten, the retired field stands in the stored form as it always did"
    with pytest.raises(ValueError, match=f"`{then.split(':')[0]}.*was retired"):
        read_recipe(text.replace(now, then))
