"""`plan --workers N --link RATE`: the cost model, against its formula and against what was measured over real sockets."""

import json
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from test_cli_golden import ROOT
from test_rehearse import TREE, figures

from stagerun.base import units
from stagerun.base.recipe import Model, Precision
from stagerun.cli import main
from stagerun.comm import pieces_of
from stagerun.comm.reduce import FlatReducer
from stagerun.models import build
from stagerun.plan.prediction import (
    BACKWARD_SHARE,
    OVERLAP,
    Job,
    Link,
    hours_of,
    predict,
    render_prediction,
    ring,
    step,
)
from stagerun.tools.plan.command import _pieces


def test_ring_in_numbers():
    assert ring(100e6, 2, Link(125e6)) == pytest.approx(0.8)
    assert ring(100e6, 4, Link(125e6, 1e-3)) == pytest.approx(2 * 3 / 4 * 0.8 + 6e-3)
    assert ring(100e6, 1, Link(125e6, 1e-3)) == 0


# What a sum of gradients took over real TCP, on links held to that speed: of what the formula says, the line being what it is called.
MEASURED = [
    ([100e6], 1e9, 1.073),  # 100 MB over two hosts
    ([10e6], 100e6, 0.883),
    (None, 1e9, 0.491),  # resnet18 over two hosts, without overlap: what was left after backward
    (None, 100e6, 4.291),
]


@pytest.mark.parametrize("pieces, bits, measured", MEASURED)
def test_what_was_measured_lies_above_the_formula_by_what_tcp_leaves_of_a_line(pieces, bits, measured):
    """0.74 to 1 of the line's speed: nearer than that the formula doesn't come."""
    if pieces is None:
        with torch.device("meta"):
            pieces = pieces_of(build(Model(name="resnet18", num_classes=1000)))
        assert sum(pieces) == pytest.approx(46.8e6, rel=0.01)
    predicted = step(pieces, 2, Link(bits / 8), one_pass=0.0, passes=1, update=0.0)
    assert 0.74 <= predicted.exposed / measured <= 1


def test_backward_hides_what_fits_into_it_but_never_the_last_piece():
    link = Link(1e6)
    long = step([1e6, 1e6, 0.5e6], 2, link, one_pass=100.0, passes=3, update=1.0)
    assert (long.computing, long.communicating, long.exposed) == (301.0, pytest.approx(2.5), pytest.approx(0.5))
    short = step([1e6, 1e6, 0.5e6], 2, link, one_pass=1.0, passes=1, update=0.0)
    assert short.exposed == pytest.approx(2.5 - OVERLAP * BACKWARD_SHARE)
    alone = step([1e6], 1, link, one_pass=1.0, passes=4, update=0.5)
    assert (alone.total, alone.communicating) == (4.5, 0)


def test_pieces_are_those_that_are_sent():
    class Comm:
        rank, size = 0, 2

    model = build(Model(name="resnet_small", num_classes=10, channels=1))
    reducer = FlatReducer([p for p in model.parameters() if p.requires_grad], Comm())  # type: ignore[arg-type]
    tail, *gradients = pieces_of(model)
    assert gradients == [chunk.nbytes for chunk in reducer.chunks]
    channels = sum(m.num_features for m in model.modules() if hasattr(m, "running_mean"))
    assert tail == 8 * (2 * channels + 2)


@pytest.mark.parametrize(
    "text, bytes_per_second",
    [
        ("10Gbit/s", 1.25e9),
        ("100 Mbit/s", 12.5e6),
        ("1Gbps", 125e6),
        ("1.2GB/s", 1.2e9),
        ("8 bit/s", 1),
        ("1Gb/s", 125e6),
        ("100mbit/s", 12.5e6),
    ],
)
def test_bandwidths(text, bytes_per_second):
    assert units.bandwidth(text) == bytes_per_second


@pytest.mark.parametrize(
    "text", ["", "10", "10Gb", "0Gbit/s", "-1Gbit/s", "nanGbit/s", "1e9bit/s", "10 gb/s", "1Pbit/s"]
)
def test_what_is_no_bandwidth(text):
    with pytest.raises(ValueError, match="^" + text.replace("/", ".") + "$"):
        units.bandwidth(text)


def test_latencies():
    assert (units.short_seconds("50us"), units.short_seconds("0.2 ms"), units.short_seconds("0s")) == (5e-5, 2e-4, 0)
    for text in ("50", "5m", "us", "100s", "-1us"):
        with pytest.raises(ValueError):
            units.short_seconds(text)


def plan(*words: str):
    return CliRunner().invoke(main, ["plan", str(ROOT / "solvers/resnet50_72ep"), "--out", "no-such-folder", *words])


def test_plan_predicts():
    words = ["--workers", "128", "--link", "10Gbit/s", "--latency", "50us", "--images-per-second", "49", "--json"]
    answer = plan(*words)
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.stdout)["prediction"]
    stage = found["stages"][0]
    assert stage["step"]["computing"] == pytest.approx(32 / 49)
    # 25.6 million parameters in float32, and the statistics of 53 BatchNorms.
    assert stage["bytes"] == pytest.approx(4 * 25_557_096 + 16 * 26560 + 16, abs=300)
    expected = 2 * 127 / 128 * stage["bytes"] / 1.25e9 + stage["pieces"] * 2 * 127 * 50e-6
    assert stage["step"]["communicating"] == pytest.approx(expected)
    assert stage["iteration"] == stage["step"]["computing"] + stage["step"]["exposed"]
    assert stage["efficiency"] == pytest.approx(stage["step"]["computing"] / stage["iteration"])
    left = json.loads(answer.stdout)["time"]["left"]["training"]
    assert left == pytest.approx(22610 * stage["iteration"])


@pytest.mark.parametrize(
    "words, said",
    [
        (["--workers", "4"], "needs --link"),
        (["--link", "1Gbit/s"], "needs --workers"),
        (["--latency", "1ms"], "--latency without --link"),
        (["--workers", "4", "--link", "1Gbit/s"], "nothing was rehearsed here"),
        (["--workers", "129", "--link", "1Gbit/s", "--images-per-second", "1"], "129 workers are too many"),
        (["--workers", "4", "--link", "fast"], "not the speed of a link"),
    ],
)
def test_mistakes(words, said):
    answer = plan(*words)
    assert answer.exit_code == 64
    assert said in answer.output


def sent(how: str, *words: str) -> list[dict[str, float]]:
    answer = plan("--set", f"solver.compress_param={{{how}}}", "--link", "100Mbit/s", *words, "--json")
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.stdout)
    assert "prediction" not in found
    return found["gradients"]


def test_plan_says_what_compressed_gradients_send_without_knowing_any_speed():
    numbers, tail = 25_557_096, 16 * 26560 + 16  # the statistics of 53 BatchNorms, which are sent as they are
    one = sent("method: TOP_K ratio: 0.01", "--workers", "4")[0]
    assert one["dense"] == pytest.approx(2 * 3 / 4 * (4 * numbers + tail))
    # A number and a place of three bytes, of small tensors fewer, to each of the others.
    assert 0.95 * 3 * 7 * 0.01 * numbers < one["sent"] - 3 * tail < 3 * 7 * 0.01 * numbers
    assert one["dense_seconds"] == pytest.approx(one["dense"] / 12.5e6) and one["seconds"] < one["dense_seconds"] / 10
    assert one["pays_below"] == pytest.approx((one["dense"] - one["sent"]) / one["coding"])
    two = sent("method: BF16")[0]  # of two workers, the fewest that send
    assert two["sent"] == pytest.approx(2 * numbers + tail) and two["dense"] == pytest.approx(4 * numbers + tail)
    whole = sent("method: TOP_K ratio: 1 scope: ENTIRE_MODEL")[0]
    assert whole["pays_below"] == 0  # all numbers: as many bytes as dense


def test_plan_says_it_for_each_method_that_auto_may_choose():
    found = sent("method: AUTO allow: [QSGD, INT8, LOSSLESS]")
    first = [one for one in found if one["stage"] == found[0]["stage"]]
    assert [one["method"] for one in first] == ["QSGD of 255 states", "INT8", "LOSSLESS"]
    assert [one["about"] for one in first] == [True, False, True]
    words = ["--set", "solver.compress_param={method: THRESHOLD}", "--link", "10Gbit/s", "--latency", "1ms"]
    text = plan(*words).stdout
    assert "gradients of 2 workers over 10 Gbit/s, 1000 us" in text and "THRESHOLD at 0.001" in text


def test_a_rehearsal_gives_the_time_of_a_pass():
    rehearsed = figures(TREE)
    pieces = {stage.name: (1e5, 1e5) for stage in TREE.stages}
    job = Job(workers=2, link=Link(1e6), pieces=pieces, images_per_second=None, figures=rehearsed)
    found = predict(TREE, job)
    assert set(found) == {stage.name for stage in TREE.stages}
    trunk = found["trunk"]  # four device batches of 0.1 s, two for each worker, and an update of 0.05 s
    assert trunk.step.computing == pytest.approx(0.25)
    assert trunk.step.communicating == pytest.approx(0.2)
    assert trunk.step.exposed == pytest.approx(0.2 - OVERLAP * BACKWARD_SHARE * 0.1)
    assert trunk.efficiency == pytest.approx(0.45 / (2 * trunk.step.total))
    hours = hours_of(TREE, job, found)
    assert hours.speeds["trunk"].iteration == trunk.step.total
    text = render_prediction(job, found)
    assert "2 workers over 0.008 Gbit/s" in text and "summed in an iteration: 200.0 kB in 2 pieces\n" in text
    assert "speed that an all-reduce reaches" in text and "ELASTIC" not in text
    assert "ELASTIC" in render_prediction(replace(job, elastic=True), found)


def test_bytes_are_those_of_the_stages_precision():
    trunk, *others = TREE.stages
    twice = replace(trunk, solver=replace(trunk.solver, precision=Precision.FP64))
    (one, *_), (two, *_) = (_pieces(replace(TREE, stages=(first, *others))).values() for first in (trunk, twice))
    assert one[0] == two[0] and sum(two[1:]) == 2 * sum(one[1:])  # the tail is in float64 whatever the gradients are
