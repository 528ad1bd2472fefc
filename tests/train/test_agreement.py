"""What workers compare when they have met, on threads: which of them is odd, and that nobody is left waiting."""

from dataclasses import replace

import pytest
from engine_help import ThreadComm, Threads

from stagerun.base.errors import StagerunError
from stagerun.launch.facts import Facts, Images, host_facts
from stagerun.system.lmdb_file import Glance
from stagerun.train.agreement import ToldByAnother, _agree

HERE = host_facts(None)
SEEN = Images(role="train", path="/x", seen=Glance(records=9, size=4096, fingerprint="f" * 64, ends="e" * 32))


def met(said: list[tuple[str, Facts, str]]) -> list[StagerunError | None]:
    """What each rank of `said` raises: (what it compares, its facts, the part that it knows alone)."""

    def one(comm: ThreadComm) -> StagerunError | None:
        mine, facts, part = said[comm.rank]
        try:
            _agree(comm, mine, lambda: facts, part)
        except StagerunError as error:
            return error
        return None

    return Threads(len(said)).run(one)


def test_workers_that_are_alike_go_on() -> None:
    assert met([("s images", HERE, ""), ("s", HERE, "s"), ("s images", HERE, "")]) == [None] * 3


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_the_odd_host_is_named_by_rank_0_alone(odd: int) -> None:
    hosts = [replace(HERE, host=f"node{n}") for n in range(3)]
    hosts[odd] = replace(hosts[odd], versions={**HERE.versions, "torch": "1.0.0"})
    ended = met([("other" if n == odd else "same", host, "") for n, host in enumerate(hosts)])
    assert [error.exit_code for error in ended if error] == [64] * 3
    assert ended[0] is not None and f"node{odd}: torch: 1.0.0; " in ended[0].render()
    assert isinstance(ended[1], ToldByAnother) and isinstance(ended[2], ToldByAnother)


def test_images_that_one_worker_of_a_host_has_looked_at_are_the_hosts() -> None:
    other = replace(SEEN, seen=replace(SEEN.seen, fingerprint="0" * 64))
    node1 = replace(HERE, host="node1", settings="s")
    node2 = replace(HERE, host="node2", settings="s")
    ended = met(
        [
            ("s a", replace(node1, images=(SEEN,)), ""),
            ("s", node1, "s"),
            ("s b", replace(node2, images=(other,)), ""),
            ("s", node2, "s"),
        ]
    )
    assert [error.exit_code for error in ended if error] == [65] * 4
    text = ended[0].render() if ended[0] else ""
    assert "train images (/x): " in text and "on node1" in text and "on node2" in text and "rank" not in text


def test_a_difference_that_refuses_nothing_is_passed_over() -> None:
    """A build of torch's is a matter of bits, which is told elsewhere."""
    other = replace(HERE, versions={**HERE.versions, "torch": HERE.versions["torch"].partition("+")[0] + "+other"})
    assert met([("a", HERE, ""), ("b", other, "")]) == [None] * 2


def test_facts_that_have_other_fields_are_those_of_another_stagerun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The very case that this is for: no traceback, but the odd host."""
    hosts = [replace(HERE, host=f"node{n}", code=("d" if n == 1 else "c") * 64) for n in range(3)]
    whole = Facts.as_json
    monkeypatch.setattr(Facts, "as_json", lambda self: {**whole(self), **({"more": 1} if self.host == "node1" else {})})
    ended = met([(host.code, host, "") for host in hosts])
    assert [error.exit_code for error in ended if error] == [64] * 3
    assert ended[0] is not None and "node1: stagerun: " in ended[0].render()
