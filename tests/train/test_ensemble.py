"""Ensembles without a run: the arithmetic, what is read and refused, and when one is evaluated."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from engine_help import CPU, SOLVER, Batch, ConvNet, Threads, arithmetic, cut, dataset
from facade import EnsembleRule, EnsembleTested, Normalise, Precision, Schedule, read_recipe
from test_plan import finished, inventory, schedule
from torch import Tensor

from stagerun.comm import Comm, SoloComm, runs_of
from stagerun.engine.averages import BatchStatistics
from stagerun.engine.ensemble import (
    Member,
    WeightMean,
    batch_norm_names,
    log_mean_probability,
    take_statistics,
    together,
)
from stagerun.engine.evaluate import score
from stagerun.language import canonical
from stagerun.plan import make_plan
from stagerun.plan.ensembles import (
    EnsembleState,
    PlannedEnsemble,
    ensembles_text,
    made_from,
    plan_ensembles,
)

# ---- the mean of answers


def test_a_probability_that_no_number_holds_has_a_loss_all_the_same() -> None:
    """exp(-2000) is 0, and its logarithm would be no number."""
    hopeless = torch.tensor([[[-2000.0, 0.0]], [[-2000.0, 0.0]]], dtype=torch.float64)
    assert float(log_mean_probability(hopeless)[0, 0]) == -2000.0


def net(seed: int) -> ConvNet:
    """With weights and statistics of its own."""
    model = ConvNet().double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator, dtype=torch.float64) + 0.1)
    return model


def member(model: ConvNet) -> Member:
    return Member(model, Normalise(SOLVER.transform, 1, CPU, torch.float64, False), Precision.FP64)


def scored(rule: EnsembleRule, *models: ConvNet, comm: Comm | None = None) -> tuple[int, float, float, float]:
    comm, data = comm or SoloComm(), dataset(21)
    pieces = [(n, cut(data, 4 * n, 4 * n + 4)) for n in range(6)]
    mine = [pieces[n] for n in runs_of(6, comm.size)[comm.rank]]
    members = [member(model) for model in models]
    found = score(together(members, rule), mine, 6, members[0].normalise, comm, lambda: False)
    assert found is not None
    return found.images, found.top1, found.top5, found.loss


@pytest.mark.parametrize("size", [2, 4, 5])
@pytest.mark.parametrize("rule", [EnsembleRule.MEAN_PROBABILITY, EnsembleRule.MEAN_LOGIT])
def test_any_number_of_workers_gives_the_same_digits(rule: EnsembleRule, size: int) -> None:
    alone = scored(rule, net(1), net(2))
    for found in Threads(size).run(lambda comm: scored(rule, net(1), net(2), comm=comm)):
        assert found == alone


def test_members_of_two_precisions_each_compute_in_their_own() -> None:
    single = ConvNet()
    single.load_state_dict(net(2).state_dict())
    half = Member(single, Normalise(SOLVER.transform, 1, CPU, torch.float32, True), Precision.BF16)
    data = dataset(4)
    double = member(net(1))
    with torch.no_grad():
        both = together([double, half], EnsembleRule.MEAN_LOGIT)(data)
        parts = [double.logits(data), half.logits(data)]
    assert both.dtype == torch.float64 and torch.equal(both, torch.stack(parts).mean(0))


# ---- the mean of weights


def test_the_mean_of_equal_weights_is_these_weights() -> None:
    weights = net(3).float().state_dict()
    mean = WeightMean(net(1))
    for _ in range(3):
        mean.add(weights)
    for name, tensor in mean.mean().items():
        assert torch.equal(tensor.to(weights[name].dtype), weights[name]), name


def test_whole_numbers_have_no_mean_but_batch_norms_counts_are_passed_over() -> None:
    mean = WeightMean(net(1))
    mean.add({"bn1.num_batches_tracked": torch.tensor(3), "table": torch.tensor([1, 2])})
    mean.add({"bn1.num_batches_tracked": torch.tensor(5), "table": torch.tensor([1, 2])})
    with pytest.raises(ValueError, match="`table` holds whole numbers"):
        mean.add({"table": torch.tensor([1, 3])})


ITERATIONS, LOGICAL, SIZE = 3, 5, 4


def taken(comm: Comm, stop_at: int | None = None) -> tuple[dict[str, Tensor], bool]:
    """BatchNorm's statistics of a net with dropout after ITERATIONS of LOGICAL device batches, and whether it came to the end."""
    model = ConvNet(dropout=0.3).double()
    model.load_state_dict(net(4).state_dict())
    statistics = BatchStatistics(model)
    solver = replace(SOLVER, batch_size=LOGICAL * SIZE, device_batch_size=SIZE)
    run, data = runs_of(LOGICAL, comm.size)[comm.rank], dataset(ITERATIONS * LOGICAL * SIZE)
    asked = 0

    def batches() -> Iterator[Batch]:
        for i in range(ITERATIONS):
            for worker in run:
                first = (i * LOGICAL + worker) * SIZE
                yield cut(data, first, first + SIZE)

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return comm.rank == comm.size - 1 and asked == stop_at

    done = take_statistics(model, statistics, (), batches(), ITERATIONS, run, arithmetic(solver), comm, stop)
    return {name: model.state_dict()[name].clone() for name in batch_norm_names(model)}, done


@pytest.mark.parametrize("size", [2, 3, 5])
def test_statistics_have_the_same_bits_for_any_number_of_workers(size: int) -> None:
    alone, _ = taken(SoloComm())
    for found, done in Threads(size).run(taken):
        assert done and all(torch.equal(found[name], alone[name]) for name in alone)


# ---- the files

TREE = """
name: "tree"
model { name: "resnet_small" num_classes: 10 }
data { train { source: "/d/train" images: 1000 } val { source: "/d/val" images: 100 } }
solver { batch_size: 100 device_batch_size: 50 transform_param { crop_size: 28 } }
stage { name: "trunk" }
stage { name: "long" }
stage { name: "collapse" from: "long" }
stage { name: "early" from: "trunk" }
"""
PLAIN = 'base_lr: 0.1\nlr_policy: "fixed"\nmax_iter: 5\n'


def with_ensembles(*blocks: str, shared: str = TREE, **stages: str) -> Schedule:
    return schedule(shared=shared + "\n".join(f"ensemble {{ {block} }}" for block in blocks), **stages)


def test_what_is_written_is_read_back() -> None:
    before = with_ensembles('name: "all" members: ["early", "collapse"] rule: WEIGHT_AVERAGE batch_norm_iter: 7')
    after = read_recipe(canonical(before))
    assert canonical(after) == canonical(before)
    assert after.ensembles == tuple(replace(e, span=after.ensembles[0].span) for e in before.ensembles)


def test_an_ensemble_makes_no_stage_stale() -> None:
    assert [s.identity for s in with_ensembles('name: "x" members: ["early", "long"]').stages] == [
        s.identity for s in schedule(shared=TREE).stages
    ]


# ---- the plan

BOTH = 'name: "both" members: ["collapse", "early"]'


def outcome(of: Schedule, ends: dict[str, str] | None = None, **changes: object) -> EnsembleTested:
    """The result of the first ensemble."""
    (ensemble, *_), refs = of.ensembles, {ref.stage: ref for ref in finished(of)}
    found = EnsembleTested(
        name=ensemble.name, images=100, top1=0.75, top5=0.9, loss=0.5, seconds=1.0, best="early", best_top1=0.7,
        mean_top1=0.65, **made_from(of, ensemble, [refs[name] for name in ensemble.members]),
    )  # fmt: skip
    return replace(found, **changes)  # type: ignore[arg-type]


def planned(of: Schedule, *gone: str, result: EnsembleTested | None = None) -> PlannedEnsemble:
    plan = make_plan(of, inventory(*(ref for ref in finished(of) if ref.stage not in gone)))
    (found, *_) = plan_ensembles(plan, {} if result is None else {result.name: result})
    return found


def test_an_ensemble_waits_for_its_members_is_ready_and_is_done() -> None:
    s = with_ensembles(BOTH)
    assert planned(s, "collapse", "early").why == "for collapse and early"
    waiting = planned(s, "early")
    assert (waiting.state, waiting.why) == (EnsembleState.WAITING, "for early")
    ready = planned(s)
    assert ready.state is EnsembleState.READY and [ref.stage for ref in ready.members] == ["collapse", "early"]
    done = planned(s, result=outcome(s))
    assert done.state is EnsembleState.DONE and done.result is not None
    assert done.result.gain == pytest.approx(0.05) and done.result.gain_over_mean == pytest.approx(0.1)
    text = ensembles_text([waiting, done])
    assert "waiting for early" in text and "done, top-1 75.00 % (+5.00 against early)" in text
    assert "the weights of 2 networks are in each worker's memory at a time" in text


@pytest.mark.parametrize("now, why", [
    (BOTH.replace('"early"', '"long"'), "other members and other weights"),
    (BOTH + " rule: MEAN_LOGIT", "another rule"),
])  # fmt: skip
def test_a_changed_ensemble_is_evaluated_again(now: str, why: str) -> None:
    found = planned(with_ensembles(now), result=outcome(with_ensembles(BOTH)))
    assert (found.state, found.why) == (EnsembleState.READY, f"evaluated with {why}")


def test_other_images_at_the_same_path_are_another_evaluation_and_unknown_ones_are_not() -> None:
    now = replace(with_ensembles(BOTH), sets={"/d/val": "100 records, sample aa"})
    states = {
        images: planned(now, result=outcome(now, tested_set=images)).state
        for images in ("", "100 records, sample aa", "100 records, sample bb")
    }
    assert [*states.values()] == [EnsembleState.DONE, EnsembleState.DONE, EnsembleState.READY]
