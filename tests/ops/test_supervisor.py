"""The supervisor, on stand-in processes: readiness, restarts, giving up, and an end that leaves nobody."""

import asyncio
import os
import signal
import sys
from collections.abc import Set
from pathlib import Path

import pytest

from ops.supervision.crashes import CrashRecord, RestartPolicy, StageFailed
from pipeline.errors import ServerUnreachable
from tests.ops.supervised import make_supervisor, pids, ready, started
from tests.ops.waiting import DEADLINE_S, holds, wait_for_end

SUPERVISOR = """
import asyncio, sys
from pathlib import Path
from tests.ops.supervised import make_supervisor

async def main():
    supervisor = make_supervisor(Path(sys.argv[1]), ["a: steady", "b: stubborn"])
    await supervisor.start()
    await supervisor.wait_ready()
    print(*[state.pid for state in supervisor.states()], file=sys.stderr)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_every_replica_runs_with_a_name_a_log_and_the_environment(tmp_path: Path) -> None:
    echoed: list[tuple[str, str]] = []
    supervisor = make_supervisor(tmp_path, ["a: steady", "b: steady"], {"b": 2}, echoed=echoed)
    async with started(supervisor):
        await ready(supervisor)
        states = supervisor.states()
        assert [(state.name, state.ready, state.num_restarts) for state in states] == [
            ("a", True, 0),
            ("b", True, 0),
            ("b-2", True, 0),
        ]
        assert len(set(pids(supervisor))) == 3
        await holds(lambda: len(echoed) == 3)
    assert sorted(echoed) == [(name, "hello steady") for name in ("a", "b", "b-2")]
    assert (tmp_path / "logs" / "b-2.log").read_text() == "hello steady\n"


async def test_stop_ends_all_processes(tmp_path: Path) -> None:
    supervisor = make_supervisor(tmp_path, ["a: steady", "b: steady"])
    async with started(supervisor):
        await ready(supervisor)
        running = pids(supervisor)
    assert len(running) == 2
    for pid in running:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_process_that_ignores_the_request_to_stop_is_killed_with_its_children(tmp_path: Path) -> None:
    supervisor = make_supervisor(tmp_path, ["a: stubborn"])
    await supervisor.start()
    await ready(supervisor)
    running = pids(supervisor)
    await supervisor.stop(grace_s=0.1)
    wait_for_end(running[0])
    wait_for_end(int((tmp_path / "grandchild").read_text()))


async def test_death_before_readiness_ends_the_wait_with_the_last_lines(tmp_path: Path) -> None:
    supervisor = make_supervisor(tmp_path, ["a: steady", "b: broken"])
    async with started(supervisor):
        with pytest.raises(StageFailed) as failure:
            await ready(supervisor)
    assert failure.value.name == "b"
    assert failure.value.problem == "ended with code 1"
    assert failure.value.last_lines == ("reading the model", "the model has a hole")
    assert str(failure.value).endswith("b.log:\n  reading the model\n  the model has a hole")


async def test_command_that_does_not_exist_is_reported(tmp_path: Path) -> None:
    supervisor = make_supervisor(tmp_path, ["a: no-such-command"], stand_in=False)
    async with started(supervisor):
        with pytest.raises(StageFailed, match="cannot run no-such-command: No such file"):
            await ready(supervisor)


async def test_process_that_never_gets_ready_is_ended_and_reported(tmp_path: Path) -> None:
    policy = RestartPolicy(ready_timeout_s=0.5)
    supervisor = make_supervisor(tmp_path, ["a: mute"], policy=policy)
    async with started(supervisor):
        with pytest.raises(StageFailed, match="a was not ready after 0 s") as failure:
            await ready(supervisor)
    assert failure.value.last_lines in {(), ("hello mute",)}  # a slow machine may not have got so far


async def test_killed_process_is_started_again(tmp_path: Path) -> None:
    supervisor = make_supervisor(tmp_path, ["a: steady", "b: steady"])
    async with started(supervisor):
        await ready(supervisor)
        first, other = pids(supervisor)
        os.kill(first, signal.SIGKILL)
        await holds(lambda: supervisor.states()[0].num_restarts == 1)
        await ready(supervisor)
        again, still = pids(supervisor)
    assert again != first
    assert still == other


async def test_process_that_cannot_come_back_fails_the_stack(tmp_path: Path) -> None:
    supervisor = make_supervisor(tmp_path, ["a: flawed"])
    async with started(supervisor):
        await ready(supervisor)
        failed = asyncio.ensure_future(supervisor.wait_failed())
        os.kill(pids(supervisor)[0], signal.SIGKILL)
        failure = await asyncio.wait_for(failed, DEADLINE_S)
    assert failure.problem == "ended with code 1, 4 times in a row"
    assert failure.last_lines[-1] == "the model has a hole"


async def test_process_that_is_killed_before_anybody_sees_it_ready_does_not_end_the_stack(tmp_path: Path) -> None:
    """As by a message that kills its reader: it waits for the reader, and may be faster than who looks."""
    supervisor = make_supervisor(tmp_path, ["a: poisoned"])
    async with started(supervisor):
        await ready(supervisor)
        os.kill(pids(supervisor)[0], signal.SIGKILL)
        await holds(lambda: supervisor.states()[0].num_restarts == 6)
        await ready(supervisor)
        failed = asyncio.ensure_future(supervisor.wait_failed())
        assert not failed.done()
        failed.cancel()


async def test_unknown_readiness_is_not_a_death(tmp_path: Path) -> None:
    supervisor = make_supervisor(tmp_path, ["a: steady"])
    list_ready = supervisor._list_ready
    num_asked = 0

    async def unreachable_at_first() -> Set[int]:
        nonlocal num_asked
        num_asked += 1
        if num_asked < 3:
            raise ServerUnreachable("unix://nowhere", "is away")
        return await list_ready()

    supervisor._list_ready = unreachable_at_first
    async with started(supervisor):
        await ready(supervisor)
    assert num_asked >= 3


async def test_error_that_nobody_foresaw_ends_the_wait(tmp_path: Path) -> None:
    supervisor = make_supervisor(tmp_path, ["a: steady"])

    async def broken() -> Set[int]:
        raise ZeroDivisionError

    supervisor._list_ready = broken
    async with started(supervisor):
        with pytest.raises(ZeroDivisionError):
            await ready(supervisor)


async def test_processes_die_with_a_killed_supervisor(tmp_path: Path) -> None:
    supervisor = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SUPERVISOR, str(tmp_path), stderr=asyncio.subprocess.PIPE
    )
    assert supervisor.stderr is not None
    line = await asyncio.wait_for(supervisor.stderr.readline(), DEADLINE_S)
    supervisor.kill()
    await supervisor.wait()
    running = [int(pid) for pid in line.split()]
    assert len(running) == 2
    for pid in running:
        wait_for_end(pid)
    os.kill(int((tmp_path / "grandchild").read_text()), signal.SIGKILL)  # its own parent's to guard


def test_replicas_of_an_unknown_stage_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no line of the Procfile is named c"):
        make_supervisor(tmp_path, ["a: steady"], {"c": 2})


def test_delays_grow_and_calm_clears_the_record() -> None:
    record = CrashRecord(RestartPolicy(first_delay_s=1, max_delay_s=3, calm_s=10, max_in_a_row=100))
    assert [record.died(was_ready=True, ready_s=1) for _ in range(4)] == [1, 2, 3, 3]
    assert record.died(was_ready=True, ready_s=10) == 1


def test_deaths_without_readiness_are_few_and_deaths_with_it_are_many() -> None:
    policy = RestartPolicy(max_unready=3, max_in_a_row=5)
    unready, crashing = CrashRecord(policy), CrashRecord(policy)
    assert [unready.died(was_ready=False, ready_s=0) is None for _ in range(3)] == [False, False, True]
    deaths = [crashing.died(was_ready=True, ready_s=0) is None for _ in range(5)]
    assert deaths == [False, False, False, False, True]
