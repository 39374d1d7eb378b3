"""Collecting: a line's results are on the disk before the server forgets them, whatever state they are in."""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from pipeline.batch.store import BatchStore, DoneLine, line_request_id
from pipeline.connect import open_transport
from pipeline.messages import Terminal
from pipeline.wire import pack
from tests.ops.answering import HANG_WORD
from tests.pipeline.batch.files import disk_of
from tests.stages.jobs.bench import POOL, JobsBench, chat, ids_in, records_in, write_lines

Leftovers = Callable[[], Awaitable[list[str]]]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "in.jsonl", [chat(f"id-{number}") for number in range(8)])


async def answered(bench: JobsBench, batch_id: str, num: int) -> None:
    """Let the stages answer while nobody collects."""
    async with bench.answering():
        await bench.holds(lambda: is_long(bench, bench.keys.batch_done(batch_id), num))


async def is_long(bench: JobsBench, stream: str, num: int) -> bool:
    return await bench.raw.xlen(stream) == num


async def in_flight(bench: JobsBench, source: Path) -> str:
    """A batch that was fed and of which nothing was collected, without a jobs process."""
    batch_id = await bench.submit(source)
    async with bench.jobs() as jobs:
        await bench.drive(jobs, batch_id, until=lambda record: record.state == "in_progress")
    async with bench.working():
        await bench.sees(batch_id, lambda record: record.cursor == record.total)
    return batch_id


async def test_results_that_are_gone_or_damaged_are_errors_of_their_lines(
    bench: JobsBench, source: Path, tmp_path: Path, leftovers: Leftovers
) -> None:
    batch_id = await in_flight(bench, source)
    await answered(bench, batch_id, 8)
    await bench.raw.delete(bench.keys.results(line_request_id(batch_id, 1)))
    await bench.raw.xdel(bench.keys.results(line_request_id(batch_id, 3)), "0-1")
    damaged = bench.keys.results(line_request_id(batch_id, 5))
    await bench.raw.delete(damaged)
    await bench.raw.xadd(damaged, {"p": b"no message of ours"}, id="1-0")
    async with bench.working():
        record = await bench.ended(batch_id)
    assert (record.state, record.succeeded, record.failed) == ("completed", 5, 3)
    assert ids_in(tmp_path / "out.jsonl") == [f"id-{number}" for number in (0, 2, 4, 6, 7)]
    assert [line["error"]["code"] for line in records_in(tmp_path / "out.errors.jsonl")] == [
        *("result_lost", "result_damaged", "result_damaged"),
    ]
    assert await leftovers() == []


async def test_a_line_that_somebody_cancelled_is_an_error_of_its_own(
    bench: JobsBench, source: Path, tmp_path: Path
) -> None:
    batch_id = await in_flight(bench, source)
    transport = await open_transport(bench.settings, pool_id=POOL)
    await transport.cancel(line_request_id(batch_id, 2), pack(Terminal(finish_reason="cancelled")))
    await transport.close()
    async with bench.answering(), bench.working():
        record = await bench.ended(batch_id)
    assert (record.state, record.succeeded, record.failed) == ("completed", 7, 1)
    [error] = records_in(tmp_path / "out.errors.jsonl")
    assert (error["custom_id"], error["error"]["code"]) == ("id-2", "cancelled")


async def test_lines_that_the_end_of_the_batch_cut_off_are_told_from_others_in_every_order(
    bench: JobsBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch is cancelled, and its lines with it, right before their results are read."""
    source = write_lines(tmp_path / "in.jsonl", [chat("hangs", HANG_WORD), chat("hangs too", HANG_WORD)])
    batch_id = await in_flight(bench, source)
    read = BatchStore.results
    async with bench.jobs() as jobs:
        terminal = pack(Terminal(finish_reason="cancelled"))
        await jobs.transport.cancel(line_request_id(batch_id, 0), terminal)

        async def cancel_first(store: BatchStore, batch_id: str, lines: Sequence[DoneLine]) -> object:
            await store.cancel(batch_id)
            await jobs.transport.cancel(line_request_id(batch_id, 1), terminal)
            return await read(store, batch_id, lines)

        monkeypatch.setattr(BatchStore, "results", cancel_first)
        record = await bench.drive(jobs, batch_id, until=lambda record: record.is_over)
    assert (record.state, record.failed) == ("cancelled", 2)
    assert [line["error"]["code"] for line in records_in(tmp_path / "out.errors.jsonl")] == ["batch_cancelled"] * 2


@pytest.mark.parametrize("room", [0, 1000])
async def test_a_disk_that_is_full_stops_the_batch_and_once_it_is_not_the_batch_goes_on(
    bench: JobsBench, source: Path, tmp_path: Path, leftovers: Leftovers, room: int
) -> None:
    batch_id = await in_flight(bench, source)
    await answered(bench, batch_id, 8)
    async with bench.jobs() as jobs:
        with disk_of(room):
            record = await bench.drive(jobs, batch_id, until=lambda record: record.is_over)
    assert (record.state, "File too large" in record.error) == ("failed", True)
    assert f"its files are in {record.directory}" in record.error
    assert not (tmp_path / "out.jsonl").exists()
    assert [line for line in await leftovers() if "holds" in line or ":batch" in line] == []
    prepared = bench.prepare(source)
    assert prepared.num_finished < 8
    async with bench.working():  # the stages are not needed: results are there
        assert await bench.submit(source) == batch_id
        record = await bench.sees(batch_id, lambda record: record.state == "completed")
    assert (record.succeeded, record.failed, record.admitted) == (8, 0, 8 - prepared.num_finished)
    assert ids_in(tmp_path / "out.jsonl") == [f"id-{number}" for number in range(8)]
    assert await leftovers() == []


async def test_results_of_a_batch_that_was_given_up_do_not_come_among_those_of_its_successor(
    bench: JobsBench, source: Path, tmp_path: Path, leftovers: Leftovers
) -> None:
    batch_id = await in_flight(bench, source)
    await answered(bench, batch_id, 8)
    again = bench.prepare(source, restart=True)  # and the command was killed before it could say so
    async with bench.working():
        record = await bench.ended(batch_id)
        assert (record.state, "gave it up" in record.error) == ("failed", True)
        assert not again.directory.finished_lines.exists()
        assert await bench.submit(source) == again.manifest.batch_id
        async with bench.answering():
            record = await bench.ended(again.manifest.batch_id)
    assert (record.state, record.admitted) == ("completed", 8)
    assert {line["id"].rpartition("-")[0] for line in records_in(tmp_path / "out.jsonl")} == {
        f"batch_req_{again.manifest.batch_id.removeprefix('batch_')}"
    }
    assert await leftovers() == []


async def test_lines_that_end_while_a_failed_batch_is_taken_up_again_count_once(
    bench: JobsBench, source: Path, tmp_path: Path, leftovers: Leftovers
) -> None:
    batch_id = await in_flight(bench, source)
    await bench.store.move(batch_id, ["in_progress"], "failed")
    assert await bench.submit(source) == batch_id
    async with bench.answering():
        await bench.holds(lambda: is_long(bench, bench.keys.finished(), 8))
    async with bench.working():
        record = await bench.ended(batch_id)
    assert (record.state, record.admitted, record.collected, record.succeeded) == ("completed", 8, 8, 8)
    assert ids_in(tmp_path / "out.jsonl") == [f"id-{number}" for number in range(8)]
    assert await leftovers() == []
