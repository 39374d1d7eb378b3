"""Turns: who works, what becomes of a step that fails, and files that stay open for as long as a thread uses them."""

import asyncio
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from pipeline.batch.errors import BatchLocked
from pipeline.batch.record import BatchRecord
from pipeline.errors import ServerUnreachable
from stages.jobs import turn
from stages.jobs.turn import Jobs, Turn, take_turn
from tests.stages.jobs.bench import DEADLINE_S, JobsBench, chat, write_lines


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "in.jsonl", [chat("one")])


async def begun(bench: JobsBench, jobs: Jobs, source: Path) -> tuple[str, int]:
    """A batch that waits to be validated, and the number of its next turn."""
    batch_id = await bench.submit(source)
    number = await bench.store.revive(batch_id, "validate")
    assert number is not None
    return batch_id, number


async def never(_: Turn) -> None:
    raise AssertionError("it was not this job's turn")


async def nothing(_: Turn) -> None:
    return


async def test_a_stale_job_does_not_work(bench: JobsBench, source: Path) -> None:
    async with bench.jobs() as jobs:
        batch_id, number = await begun(bench, jobs, source)
        await take_turn(jobs, "validate", nothing, batch_id, number)
        for stale in (number, number - 1, number + 7):
            await take_turn(jobs, "validate", never, batch_id, stale)
        await take_turn(jobs, "collect", never, batch_id, 0)  # not in this state
        await take_turn(jobs, "validate", never, "batch_unknown", 0)


async def test_while_one_works_no_other_does(bench: JobsBench, source: Path) -> None:
    async with bench.jobs() as jobs:
        batch_id, number = await begun(bench, jobs, source)

        async def meet(_: Turn) -> None:
            await take_turn(jobs, "validate", never, batch_id, number)
            await asyncio.sleep(1.0)  # longer than a lease: it is renewed meanwhile
            assert await bench.store.revive(batch_id, "validate") is None

        await take_turn(jobs, "validate", meet, batch_id, number)


async def test_whoever_lost_its_turn_hears_of_it(bench: JobsBench, source: Path) -> None:
    async with bench.jobs() as jobs:
        batch_id, number = await begun(bench, jobs, source)

        async def lose(mine: Turn) -> None:
            assert not mine.is_over
            await bench.raw.hset(bench.keys.batch(batch_id), "validate_number", number + 1)

            async def is_over() -> bool:
                return mine.is_over

            await bench.holds(is_over)
            mine.check()
            raise AssertionError

        await take_turn(jobs, "validate", lose, batch_id, number)
    assert (await bench.store.read(batch_id)).state == "validating"


async def test_told_to_stop_a_turn_is_over(bench: JobsBench, source: Path) -> None:
    async with bench.jobs() as jobs:
        batch_id, number = await begun(bench, jobs, source)

        async def stop(mine: Turn) -> None:
            jobs.stopping.set()
            mine.check()
            raise AssertionError

        await take_turn(jobs, "validate", stop, batch_id, number)
        assert await bench.store.revive(batch_id, "validate") is not None  # at once, by somebody else


async def after(bench: JobsBench, source: Path, error: BaseException) -> BatchRecord:
    """The record after a step that raised."""
    async with bench.jobs() as jobs:
        batch_id, number = await begun(bench, jobs, source)

        async def fail(_: Turn) -> None:
            raise error

        await take_turn(jobs, "validate", fail, batch_id, number)
    return await bench.store.read(batch_id)


async def test_a_step_that_cannot_be_done_fails_the_batch_with_the_reason(bench: JobsBench, source: Path) -> None:
    record = await after(bench, source, PermissionError(13, "Permission denied", "/data/out"))
    assert (record.state, record.error) == ("failed", "[Errno 13] Permission denied: '/data/out'")
    assert record.ended_ms > 0


async def test_a_turn_that_was_lost_fails_nothing(bench: JobsBench, source: Path) -> None:
    async with bench.jobs() as jobs:
        batch_id, number = await begun(bench, jobs, source)

        async def fail(_: Turn) -> None:
            await bench.raw.hset(bench.keys.batch(batch_id), "validate_number", number + 1)
            raise FileNotFoundError(2, "somebody else has moved it")

        await take_turn(jobs, "validate", fail, batch_id, number)
    assert (await bench.store.read(batch_id)).state == "validating"


async def test_our_own_mistakes_are_told_too_without_what_they_were_about(bench: JobsBench, source: Path) -> None:
    with capture_logs() as lines:
        record = await after(bench, source, ValueError("the prompt is a secret"))
    assert (record.state, record.error) == ("failed", "validate broke with ValueError; see the log of jobs")
    [broke] = [line for line in lines if line["event"] == "step_broke"]
    assert broke["error"] == "ValueError"
    assert "test_turn.py" in broke["place"]
    assert "secret" not in str(lines)


@pytest.mark.parametrize("error", [ServerUnreachable("x", "away"), BatchLocked(Path("/x"))])
async def test_what_passes_by_itself_is_tried_again(bench: JobsBench, source: Path, error: Exception) -> None:
    record = await after(bench, source, error)
    assert record.state == "validating"
    assert await bench.store.revive(record.id, "validate") is None  # in a while

    async def is_revived() -> bool:
        return await bench.store.revive(record.id, "validate") is not None

    await bench.holds(is_revived)


async def test_a_record_that_is_deleted_meanwhile_ends_the_turn(bench: JobsBench, source: Path) -> None:
    async with bench.jobs() as jobs:
        batch_id, number = await begun(bench, jobs, source)

        async def delete(_: Turn) -> None:
            await bench.raw.delete(bench.keys.batch(batch_id))
            raise OSError("and so it cannot be done")

        await take_turn(jobs, "validate", delete, batch_id, number)
    assert not await bench.raw.exists(bench.keys.batch(batch_id))


async def test_a_turn_that_is_cancelled_waits_for_its_thread(
    bench: JobsBench, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a file would be closed, and a lock given up, under a thread that writes."""
    monkeypatch.setattr(turn, "RENEWALS_PER_LEASE", 0.01)
    entered, may_end, events = threading.Event(), threading.Event(), list[str]()

    def write() -> None:
        entered.set()
        may_end.wait(DEADLINE_S)
        events.append("thread ended")

    async def step(mine: Turn) -> None:
        try:
            await mine.in_thread(write)
        finally:
            events.append("step ended")
            assert mine.is_over

    async with bench.jobs() as jobs:
        batch_id, number = await begun(bench, jobs, source)
        working = asyncio.create_task(take_turn(jobs, "validate", step, batch_id, number))
        await asyncio.to_thread(entered.wait, DEADLINE_S)
        working.cancel()
        await asyncio.sleep(0)
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await working
    assert events == ["thread ended", "step ended"]


async def test_renewals_end_with_the_turn_also_where_a_cancellation_is_lost(
    bench: JobsBench, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call may return instead of raising when it is cancelled in the moment of its answer (redis_calls.py)."""
    swallowed = asyncio.Event()
    async with bench.jobs() as jobs:
        batch_id, number = await begun(bench, jobs, source)
        begin, num_calls = jobs.store.begin, 0

        async def begin_and_swallow(one: turn.StepTurn) -> str:
            nonlocal num_calls
            num_calls += 1
            if num_calls == 1:
                return await begin(one)
            swallowed.set()
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(DEADLINE_S)
            return "ok"

        monkeypatch.setattr(jobs.store, "begin", begin_and_swallow)

        async def work(_: Turn) -> None:
            await swallowed.wait()

        await asyncio.wait_for(take_turn(jobs, "validate", work, batch_id, number), 5)
    assert num_calls == 2
