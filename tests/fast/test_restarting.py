"""What comes after a life of a job on several hosts."""

from dataclasses import replace

import pytest

from stagerun.launch.restarting import Again, Ended, Finish, Policy, decide

ABC = ("a", "b", "c")
ALL = Policy(ABC, 3, 3)
TWO = Policy(ABC, 2, 3)
SHARED = frozenset(ABC)
LOST = Ended(code=69, text="c is gone", hosts=ABC, lost=("c",), answering=("a", "b"), sees_out=SHARED)


@pytest.mark.parametrize("code", [0, 64, 65, 70, 73, 74, 78, 79, 130])
def test_what_another_life_would_not_mend_ends_it(code: int) -> None:
    ended = Ended(code=code, text="so", hosts=ABC, answering=ABC, sees_out=SHARED)
    assert decide(ended, ALL) == Finish(code, "so")
    assert decide(replace(ended, lost=("c",), answering=("a", "b")), TWO) == Finish(code, "so")


def test_a_killed_worker_is_answered_with_another_life_so_many_times() -> None:
    ended = Ended(
        code=69, text="worker 1 on b was killed by SIGKILL\n  hint: x", hosts=ABC, answering=ABC, sees_out=SHARED
    )
    for before in range(3):
        step = decide(replace(ended, restarts=before), ALL)
        assert isinstance(step, Again) and step.hosts == ABC and step.failure
        assert step.says.startswith("worker 1 on b was killed by SIGKILL; going on with a, b and c")
        assert f"restart {before + 1} of at most 3" in step.says
    step = decide(replace(ended, restarts=3), ALL)
    assert isinstance(step, Finish) and step.code == 69 and "3 restarts were made before" in step.text
    assert decide(ended, replace(ALL, restarts=0)) == Finish(69, ended.text)


def test_ranks_that_differed_go_on_from_what_was_saved_so_many_times() -> None:
    ended = Ended(code=80, text="rank 1 has other bits\n  hint: x", hosts=ABC, answering=ABC, sees_out=SHARED)
    step = decide(ended, ALL)
    assert isinstance(step, Again) and step.hosts == ABC and step.failure and "rank 1 has other bits; " in step.says
    assert decide(replace(ended, restarts=3), replace(ALL, restarts=0)) == Finish(80, ended.text)


def test_whoever_asked_for_a_stop_gets_it() -> None:
    for code in (69, 75):
        assert decide(replace(LOST, code=code, asked=True), TWO) == Finish(code, "c is gone")
    stopped = Ended(code=75, text="stopped", hosts=ABC, answering=ABC, sees_out=SHARED)
    assert decide(stopped, TWO) == Finish(75, "stopped"), "somebody stopped the workers on their host"


def test_a_lost_host_is_left_out_where_that_is_allowed() -> None:
    step = decide(LOST, TWO)
    assert isinstance(step, Again) and step.hosts == ("a", "b") and step.failure
    assert step.says.startswith("c is gone; going on with a and b")
    step = decide(LOST, ALL)
    assert isinstance(step, Finish) and step.code == 69
    assert step.text.startswith("c is gone: 2 hosts left of at least 3") and "--min-nodes" in step.text
    # It only lost its connection with the launcher, so the others were asked to save.
    step = decide(replace(LOST, code=75), ALL)
    assert isinstance(step, Finish) and step.code == 75
    two = replace(LOST, lost=("b", "c"), answering=("a",))
    step = decide(two, TWO)
    assert isinstance(step, Finish) and step.text.startswith("b and c are gone: 1 host left of at least 2")
    assert "--min-nodes" not in step.text


def test_a_host_that_answers_at_once_is_not_left_out() -> None:
    step = decide(replace(LOST, answering=ABC), ALL)
    assert isinstance(step, Again) and step.hosts == ABC and step.failure


def test_the_first_host_lost() -> None:
    head = replace(LOST, lost=("a",), text="a is gone", answering=("b", "c"))
    step = decide(head, TWO)
    assert isinstance(step, Again) and step.hosts == ("b", "c")
    # The output folder is on it alone.
    step = decide(replace(head, sees_out=frozenset("a")), TWO)
    assert (
        isinstance(step, Finish)
        and step.code == 69
        and "no other host sees it" in step.text
        and "when a is back" in step.text
    )
    # Or on another besides: rank 0 moves there.
    step = decide(replace(head, sees_out=frozenset("ac")), TWO)
    assert isinstance(step, Again) and step.hosts == ("c", "b")


def test_a_host_comes_back() -> None:
    saved = Ended(code=75, text="stopped", hosts=("a", "b"), answering=ABC, sees_out=SHARED, restarts=3)
    step = decide(saved, TWO)
    assert step == Again(ABC, False, "c answers again: going on with it"), "that is no failure, and counts as none"
    # The first one, when rank 0 has moved: it may have come back without the file system.
    step = decide(replace(saved, hosts=("b", "c")), TWO)
    assert isinstance(step, Again) and step.hosts == ("b", "a", "c")


def test_rank_0_moves_to_a_host_that_was_there_all_the_time() -> None:
    ended = replace(LOST, lost=("a", "b"), answering=("b", "c"), text="a is gone")
    step = decide(ended, replace(TWO, least=1))
    assert isinstance(step, Again) and step.hosts == ("c", "b")


def test_an_output_folder_that_the_last_life_still_holds() -> None:
    held = Ended(code=73, text="node1 holds it\n  hint: x", hosts=ABC, answering=ABC, sees_out=SHARED, restarts=3)
    assert decide(held, ALL) == Finish(73, held.text)
    step = decide(replace(held, releasing=True), ALL)
    assert isinstance(step, Again) and step.hosts == ABC and not step.failure and step.wait > 0
    assert step.says.startswith("node1 holds it; it may be")


def test_a_launcher_that_was_stopped_itself_has_not_failed() -> None:
    slept = Ended(code=69, text="x", hosts=ABC, lost=ABC, answering=ABC, slept=40.0, restarts=3)
    step = decide(slept, ALL)
    assert isinstance(step, Again) and step.hosts == ABC and not step.failure and "stopped for 40 s" in step.says
    assert isinstance(decide(replace(slept, answering=("a",)), ALL), Finish)
