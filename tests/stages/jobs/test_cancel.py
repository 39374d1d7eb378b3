"""Cancelling and expiry: finished lines are kept, the others say what cut them off, and nothing is left in flight."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.batch.record import BatchRecord
from pipeline.batch.store import line_request_id
from pipeline.connect import open_transport
from pipeline.messages import GenerateRequest
from pipeline.transport import Transport
from pipeline.wire import unpack
from tests.ops.answering import answer_one, commit, emit
from tests.pipeline.benches import take
from tests.stages.jobs.bench import POOL, JobsBench, chat, ids_in, records_in, write_lines

Leftovers = Callable[[], Awaitable[list[str]]]
NUM_LINES = 10
WINDOW = 6


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "in.jsonl", [*(chat(f"id-{number}") for number in range(NUM_LINES - 1)), "{"])


@pytest.fixture
async def stage(bench: JobsBench) -> AsyncIterator[Transport]:
    transport = await open_transport(bench.settings, pool_id=POOL)
    yield transport
    await transport.close()


async def in_every_stage(bench: JobsBench, stage: Transport, source: Path) -> str:
    """A batch whose lines are everywhere: two collected, one ended, one half out, one held, more queued, some unfed."""
    batch_id = await bench.submit(source, window=WINDOW)
    async with bench.working():
        deliveries = await take(stage, "tokenizer", 3)
        for delivery in deliveries[:2]:
            await answer_one(stage, delivery)
        record = await bench.sees(batch_id, lambda record: record.num_finished == 2 and record.cursor == WINDOW + 2)
    await answer_one(stage, deliveries[2])
    [half, _held] = await take(stage, "tokenizer", 2)
    await commit(stage, half, unpack(half.payload, GenerateRequest), (emit(0, "A"),), ack=False)
    assert record.state == "in_progress"
    return batch_id


async def is_cut_off(bench: JobsBench, record: BatchRecord, tmp_path: Path, code: str, finished: list[int]) -> None:
    assert (record.succeeded, record.failed) == (len(finished), NUM_LINES - len(finished))
    assert record.admitted == record.collected
    assert ids_in(tmp_path / "out.jsonl") == [f"id-{number}" for number in finished]
    errors = records_in(tmp_path / "out.errors.jsonl")
    assert [line["error"]["line"] for line in errors] == [n + 1 for n in range(NUM_LINES) if n not in finished]
    assert {line["error"]["code"] for line in errors[:-1]} == {code}
    assert errors[-1]["error"]["code"] == "invalid_json"
    assert errors[0]["error"]["retryable"] is True


async def nothing_runs(bench: JobsBench, stage: Transport, leftovers: Leftovers) -> None:
    """What is left in a queue goes when a stage takes it, which finds that it is over."""
    num_left = await stage.queue_length("tokenizer", "batch")
    await bench.raw.delete(
        *[key async for key in bench.raw.scan_iter(match=f"{bench.keys.namespace}:stream:tokenizer:batch:claims")]
        or ["none"]
    )
    fresh = await open_transport(bench.settings.model_copy(update={"lease_s": 0.05}), pool_id=POOL)
    for delivery in await take(fresh, "tokenizer", num_left):
        await answer_one(fresh, delivery)
    await fresh.close()
    assert await leftovers() == []


@pytest.mark.parametrize("ending", ["cancelled", "expired"])
async def test_with_lines_in_every_stage(
    bench: JobsBench, stage: Transport, source: Path, tmp_path: Path, leftovers: Leftovers, ending: str
) -> None:
    batch_id = await in_every_stage(bench, stage, source)
    if ending == "cancelled":
        assert await bench.store.cancel(batch_id)
        assert await bench.store.cancel(batch_id)
    else:
        await bench.store.move(batch_id, ["in_progress"], None, {"deadline_ms": 1})
    async with bench.working():
        record = await bench.ended(batch_id)
    assert record.state == ending
    await is_cut_off(bench, record, tmp_path, f"batch_{ending}", finished=[0, 1, 2])
    assert not await bench.store.cancel(batch_id)
    await nothing_runs(bench, stage, leftovers)


async def test_cancelled_before_it_was_validated_it_feeds_nothing(
    bench: JobsBench, stage: Transport, source: Path, tmp_path: Path, leftovers: Leftovers
) -> None:
    batch_id = await bench.submit(source)
    assert await bench.store.cancel(batch_id)
    async with bench.answering(), bench.working():
        record = await bench.ended(batch_id)
    assert (record.state, record.admitted, record.cursor) == ("cancelled", 0, 0)
    await is_cut_off(bench, record, tmp_path, "batch_cancelled", finished=[])
    assert await stage.finished(10) == []
    assert await leftovers() == []


async def test_cancelled_while_it_is_finalized_it_completes(bench: JobsBench, source: Path, tmp_path: Path) -> None:
    async with bench.jobs() as jobs:
        batch_id = await bench.submit(source)
        async with bench.answering():
            await bench.drive(jobs, batch_id, until=lambda record: record.state == "finalizing")
        assert not await bench.store.cancel(batch_id)
        record = await bench.drive(jobs, batch_id, until=lambda record: record.is_over)
    assert (record.state, record.succeeded) == ("completed", NUM_LINES - 1)
    assert len(ids_in(tmp_path / "out.jsonl")) == NUM_LINES - 1


async def test_time_that_is_over_before_it_begins_expires_it(
    bench: JobsBench, source: Path, tmp_path: Path, leftovers: Leftovers
) -> None:
    batch_id = await bench.submit(source, timeout_s=60)
    await bench.store.move(batch_id, ["validating"], None, {"deadline_ms": 1})
    async with bench.working():
        record = await bench.ended(batch_id)
    assert record.state == "expired"
    await is_cut_off(bench, record, tmp_path, "batch_expired", finished=[])


async def test_time_that_is_not_over_expires_nothing(bench: JobsBench, source: Path) -> None:
    async with bench.answering(), bench.working():
        record = await bench.ended(await bench.submit(source, timeout_s=3600))
    assert record.state == "completed"
    assert record.deadline_ms - record.created_ms >= 3_600_000


async def test_a_turn_that_ends_in_the_middle_is_taken_up_again(
    bench: JobsBench, stage: Transport, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = await in_every_stage(bench, stage, source)
    assert await bench.store.cancel(batch_id)
    async with bench.jobs() as jobs:
        cancel = jobs.transport.cancel

        async def be_told_to_stop(request_id: str, terminal: bytes) -> bool:
            if cancelled := await cancel(request_id, terminal):
                jobs.stopping.set()
            return cancelled

        monkeypatch.setattr(jobs.transport, "cancel", be_told_to_stop)
        await bench.drive(jobs, batch_id, until=lambda _: jobs.stopping.is_set())
    assert await bench.raw.xlen(bench.keys.batch_done(batch_id)) == 2  # the one that had ended, and one more
    async with bench.working():
        record = await bench.ended(batch_id)
    await is_cut_off(bench, record, tmp_path, "batch_cancelled", finished=[0, 1, 2])


async def test_an_expired_line_is_no_longer_worked_on(
    bench: JobsBench, stage: Transport, source: Path, tmp_path: Path
) -> None:
    batch_id = await in_every_stage(bench, stage, source)
    await bench.store.move(batch_id, ["in_progress"], "expiring")
    async with bench.working():
        await bench.ended(batch_id)
    states: list[Any] = [
        await bench.raw.hget(bench.keys.request(line_request_id(batch_id, index)), "state")
        for index in range(3, WINDOW + 2)
    ]
    assert set(states) == {b"cancelled"}
