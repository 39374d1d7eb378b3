"""Scaling and draining, on stand-in processes: who comes, who goes, in which order, and who is left alone."""

import asyncio
import itertools
import os
import signal
from pathlib import Path

import pytest

from ops.supervision.crashes import RestartPolicy, StageFailed
from ops.supervision.supervisor import MAX_REPLICAS, NotScalable, Supervisor
from pipeline.errors import InvalidRequest
from tests.ops.supervised import make_supervisor, pids, ready, started
from tests.ops.waiting import DEADLINE_S, holds, wait_for_end


def names(supervisor: Supervisor) -> list[str]:
    return [state.name for state in supervisor.states()]


def states(supervisor: Supervisor) -> dict[str, str]:
    return {state.name: state.state for state in supervisor.states()}


def pid_of(supervisor: Supervisor, name: str) -> int:
    [pid] = [state.pid for state in supervisor.states() if state.name == name]
    assert pid is not None
    return pid


async def scale(supervisor: Supervisor, **replicas: int) -> None:
    """Change the numbers and wait until that is done."""
    supervisor.scale(replicas)
    assert await supervisor.wait_settled(replicas.keys(), DEADLINE_S)


def when(directory: Path, what: str, pid: int) -> int:
    """When a held stand-in was asked to leave, or left."""
    return int((directory / what / str(pid)).read_text())


def was_asked(directory: Path, pid: int) -> bool:
    return (directory / "asked" / str(pid)).exists()


async def test_more_processes_are_started_beside_those_that_run(tmp_path: Path) -> None:
    supervisor = make_supervisor(tmp_path, ["a: steady", "b: steady", "c: steady"])
    async with started(supervisor):
        await ready(supervisor)
        before = pids(supervisor)
        await scale(supervisor, b=3)
        assert states(supervisor) == dict.fromkeys(("a", "b", "b-2", "b-3", "c"), "ready")
        assert [pid_of(supervisor, name) for name in "abc"] == before
        assert [state.num_restarts for state in supervisor.states()] == [0] * 5
        assert (tmp_path / "logs" / "b-3.log").read_text() == "hello steady\n"


async def test_of_fewer_processes_the_highest_numbered_go(tmp_path: Path) -> None:
    supervisor = make_supervisor(tmp_path, ["a: steady", "b: steady"], {"a": 3})
    async with started(supervisor):
        await ready(supervisor)
        first, second, third, other = pids(supervisor)
        await scale(supervisor, a=1)
        assert pids(supervisor) == [first, other]
        assert names(supervisor) == ["a", "b"]
        for pid in (second, third):
            wait_for_end(pid)


async def test_of_fewer_processes_the_one_that_works_stays(tmp_path: Path) -> None:
    policy = RestartPolicy(first_delay_s=600, max_delay_s=600, ready_timeout_s=DEADLINE_S)
    supervisor = make_supervisor(tmp_path, ["a: steady"], {"a": 2}, policy)
    async with started(supervisor):
        await ready(supervisor)
        working = pid_of(supervisor, "a-2")
        os.kill(pid_of(supervisor, "a"), signal.SIGKILL)
        await holds(lambda: states(supervisor)["a"] == "backing_off")
        await scale(supervisor, a=1)
        assert states(supervisor) == {"a-2": "ready"}
        assert pids(supervisor) == [working]


async def test_a_stage_that_is_not_needed_has_no_process(tmp_path: Path) -> None:
    supervisor = make_supervisor(tmp_path, ["a: steady", "b: steady"], {"a": 0})
    async with started(supervisor):
        await ready(supervisor)
        assert names(supervisor) == ["b"]


async def test_several_stages_are_scaled_at_once(tmp_path: Path) -> None:
    supervisor = make_supervisor(tmp_path, ["a: steady", "b: steady"], {"a": 2})
    async with started(supervisor):
        await ready(supervisor)
        await scale(supervisor, a=1, b=2)
        assert names(supervisor) == ["a", "b", "b-2"]


async def test_wait_says_when_time_is_up_and_the_change_goes_on(tmp_path: Path) -> None:
    supervisor = make_supervisor(tmp_path, ["a: held"], {"a": 2})
    async with started(supervisor):
        await ready(supervisor)
        leaving = pid_of(supervisor, "a-2")
        supervisor.scale({"a": 1})
        assert not await supervisor.wait_settled({"a"}, 0.05)
        assert states(supervisor) == {"a": "ready", "a-2": "stopping"}
        (tmp_path / "go").touch()
        assert await supervisor.wait_settled({"a"}, DEADLINE_S)
        assert names(supervisor) == ["a"]
        assert when(tmp_path, "left", leaving)


async def test_process_that_does_not_leave_is_killed_after_its_grace(tmp_path: Path) -> None:
    supervisor = make_supervisor(tmp_path, ["a: stubborn"], {"a": 2}, leave_grace_s=0.1)
    async with started(supervisor):
        await ready(supervisor)
        leaving = pid_of(supervisor, "a-2")
        await scale(supervisor, a=1)
        assert names(supervisor) == ["a"]
        wait_for_end(leaving)
        await supervisor.stop(grace_s=0.1)


async def test_process_that_is_leaving_keeps_its_name_from_new_ones(tmp_path: Path) -> None:
    supervisor = make_supervisor(tmp_path, ["a: held"], {"a": 2})
    async with started(supervisor):
        await ready(supervisor)
        supervisor.scale({"a": 1})
        supervisor.scale({"a": 2})
        await holds(lambda: states(supervisor) == {"a": "ready", "a-2": "stopping", "a-3": "ready"})
        (tmp_path / "go").touch()
        assert await supervisor.wait_settled({"a"}, DEADLINE_S)
        assert names(supervisor) == ["a", "a-3"]
        await scale(supervisor, a=3)
        assert names(supervisor) == ["a", "a-2", "a-3"]


async def test_new_process_that_cannot_start_is_given_up_alone(tmp_path: Path) -> None:
    supervisor = make_supervisor(tmp_path, ["a: flawed", "b: steady"])
    async with started(supervisor):
        await ready(supervisor)
        before = pids(supervisor)
        failed = asyncio.ensure_future(supervisor.wait_failed())
        supervisor.scale({"a": 2})
        with pytest.raises(StageFailed, match="a-2 ended with code 1, 3 times in a row") as failure:
            await supervisor.wait_settled({"a"}, DEADLINE_S)
        assert failure.value.last_lines[-1] == "the model has a hole"
        assert pids(supervisor) == before
        assert names(supervisor) == ["a", "b"]
        assert not failed.done()
        failed.cancel()


async def test_added_process_that_dies_later_is_started_again(tmp_path: Path) -> None:
    supervisor = make_supervisor(tmp_path, ["a: steady"])
    async with started(supervisor):
        await ready(supervisor)
        await scale(supervisor, a=2)
        os.kill(pid_of(supervisor, "a-2"), signal.SIGKILL)
        await holds(lambda: [state.num_restarts for state in supervisor.states()] == [0, 1])
        assert await supervisor.wait_settled({"a"}, DEADLINE_S)


async def test_process_that_waits_for_its_restart_goes_at_once(tmp_path: Path) -> None:
    policy = RestartPolicy(first_delay_s=600, max_delay_s=600, ready_timeout_s=DEADLINE_S)
    supervisor = make_supervisor(tmp_path, ["a: steady"], {"a": 2}, policy)
    async with started(supervisor):
        await ready(supervisor)
        os.kill(pid_of(supervisor, "a-2"), signal.SIGKILL)
        await holds(lambda: states(supervisor)["a-2"] == "backing_off")
        await scale(supervisor, a=1)
        assert names(supervisor) == ["a"]


async def test_process_that_is_starting_can_be_taken_back(tmp_path: Path) -> None:
    supervisor = make_supervisor(tmp_path, ["a: steady"])
    async with started(supervisor):
        await ready(supervisor)
        supervisor.scale({"a": 3})
        await scale(supervisor, a=1)
        assert names(supervisor) == ["a"]


@pytest.mark.parametrize(
    ("replicas", "problem"),
    [
        ({"b": 2, "c": 2}, "c: is no stage of this stack; there are a, b"),
        ({"b": 2, "a": 0}, f"a: 0 processes; a stage has at least 1 and at most {MAX_REPLICAS}"),
        ({"b": 2, "a": MAX_REPLICAS + 1}, f"a: 65 processes; a stage has at least 1 and at most {MAX_REPLICAS}"),
    ],
)
async def test_wrong_number_or_stage_is_refused_and_nothing_changes(
    tmp_path: Path, replicas: dict[str, int], problem: str
) -> None:
    supervisor = make_supervisor(tmp_path, ["a: steady", "b: steady"])
    async with started(supervisor):
        await ready(supervisor)
        with pytest.raises(InvalidRequest) as refusal:
            supervisor.scale(replicas)
        assert str(refusal.value) == problem
        assert names(supervisor) == ["a", "b"]


async def test_stack_is_scaled_only_between_its_start_and_its_end(tmp_path: Path) -> None:
    supervisor = make_supervisor(tmp_path, ["a: steady"])
    async with started(supervisor):
        with pytest.raises(NotScalable, match="the stack is starting"):
            supervisor.scale({"a": 2})
        await ready(supervisor)
    with pytest.raises(NotScalable, match="the stack is stopping"):
        supervisor.scale({"a": 2})


async def test_those_that_are_leaving_count_against_the_most_there_may_be(tmp_path: Path) -> None:
    supervisor = make_supervisor(tmp_path, ["a: held"], {"a": 2})
    async with started(supervisor):
        await ready(supervisor)
        supervisor.scale({"a": 1})
        with pytest.raises(NotScalable, match="1 processes of a are still stopping, and 64 is the most"):
            supervisor.scale({"a": MAX_REPLICAS})
        (tmp_path / "go").touch()


async def test_status_says_what_each_process_is_and_how_old(tmp_path: Path) -> None:
    supervisor = make_supervisor(tmp_path, ["a: steady", "b: mute"])
    async with started(supervisor):
        await holds(lambda: [state.state for state in supervisor.states()] == ["ready", "starting"])
        first, second = supervisor.states()
        assert (first.stage, first.pid, first.num_restarts) == ("a", pid_of(supervisor, "a"), 0)
        assert first.uptime_s is not None
        assert second.uptime_s is not None
        assert 0 <= second.uptime_s <= DEADLINE_S


async def test_stages_stop_in_order_each_when_the_one_before_has_ended(tmp_path: Path) -> None:
    supervisor = make_supervisor(tmp_path, ["last: held", "second: held", "first: held"], {"second": 2})
    async with started(supervisor):
        await ready(supervisor)
        by_name = {state.name: state.pid for state in supervisor.states() if state.pid is not None}
        stopping = asyncio.create_task(supervisor.stop(4 * DEADLINE_S, ["first", "second"]))
        await holds(lambda: was_asked(tmp_path, by_name["first"]))
        assert not any(was_asked(tmp_path, pid) for name, pid in by_name.items() if name != "first")
        (tmp_path / "go").touch()
        await stopping
    groups = [["first"], ["second", "second-2"], ["last"]]
    for before, after in itertools.pairwise(groups):
        all_left = max(when(tmp_path, "left", by_name[name]) for name in before)
        assert all(when(tmp_path, "asked", by_name[name]) > all_left for name in after)


async def test_stage_that_uses_its_share_up_leaves_the_others_theirs(tmp_path: Path) -> None:
    supervisor = make_supervisor(tmp_path, ["a: stubborn", "b: held"])
    (tmp_path / "go").touch()
    await supervisor.start()
    await ready(supervisor)
    stubborn, held = pids(supervisor)
    await supervisor.stop(3.0, ["a", "b"])
    assert when(tmp_path, "left", held)
    wait_for_end(stubborn)


async def test_stage_that_used_its_share_up_may_still_finish_while_the_next_ones_do(tmp_path: Path) -> None:
    supervisor = make_supervisor(tmp_path, ["a: held", "b: held", "c: held"])
    await supervisor.start()
    await ready(supervisor)
    first, second, third = pids(supervisor)
    stopping = asyncio.create_task(supervisor.stop(9.0, ["a", "b"]))  # a third for each: six seconds are left then
    await holds(lambda: was_asked(tmp_path, second))
    assert not (tmp_path / "left" / str(first)).exists()
    assert not was_asked(tmp_path, third)
    (tmp_path / "go").touch()
    await stopping
    assert when(tmp_path, "left", first) > when(tmp_path, "asked", second)
    assert when(tmp_path, "left", second)
    assert when(tmp_path, "left", third)


async def test_end_of_the_stack_does_not_hurry_who_is_leaving(tmp_path: Path) -> None:
    supervisor = make_supervisor(tmp_path, ["a: held"], {"a": 2})
    await supervisor.start()
    await ready(supervisor)
    staying, leaving = pids(supervisor)
    supervisor.scale({"a": 1})
    await holds(lambda: was_asked(tmp_path, leaving))
    stopping = asyncio.create_task(supervisor.stop(DEADLINE_S))
    await holds(lambda: was_asked(tmp_path, staying))
    (tmp_path / "go").touch()
    await stopping
    assert when(tmp_path, "left", leaving)
    assert when(tmp_path, "left", staying)


async def test_end_that_is_interrupted_leaves_nobody(tmp_path: Path) -> None:
    supervisor = make_supervisor(tmp_path, ["a: held", "b: held"])
    await supervisor.start()
    await ready(supervisor)
    running = pids(supervisor)
    stopping = asyncio.create_task(supervisor.stop(DEADLINE_S, ["a", "b"]))
    await holds(lambda: was_asked(tmp_path, running[0]))
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    for pid in running:
        wait_for_end(pid)
