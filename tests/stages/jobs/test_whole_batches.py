"""Whole batches on a real server and arq: what comes out, whatever goes in and whatever happens meanwhile."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis

from pipeline.batch.figures import BatchSummary
from pipeline.batch.submit import submit
from pipeline.settings import Settings
from stages.jobs import turn
from tests.ops.answering import FAIL_WORD, HANG_WORD
from tests.servers import ServerOptions, running_server
from tests.stages.jobs.bench import DEADLINE_S, JobsBench, chat, ids_in, names_in, records_in, write_lines

Leftovers = Callable[[], Awaitable[list[str]]]


def many(num_lines: int, text: str = "a b c") -> list[str]:
    return [chat(f"id-{number}", text) for number in range(num_lines)]


def ids(num_lines: int) -> list[str]:
    return [f"id-{number}" for number in range(num_lines)]


async def test_results_are_in_the_order_of_the_input_and_errors_apart(
    bench: JobsBench, tmp_path: Path, leftovers: Leftovers
) -> None:
    lines = [chat("one"), "{", chat("two", f"please {FAIL_WORD}"), "", chat("three", "d"), chat("one", "again")]
    async with bench.answering(), bench.working():
        record = await bench.ended(await bench.submit(write_lines(tmp_path / "in.jsonl", lines)))
    assert (record.state, record.total, record.admitted, record.collected) == ("completed", 5, 5, 5)
    assert (record.succeeded, record.failed, record.output_tokens, record.prompt_tokens) == (2, 3, 4, 6)
    results, errors = records_in(tmp_path / "out.jsonl"), records_in(tmp_path / "out.errors.jsonl")
    assert [line["custom_id"] for line in results] == ["one", "three"]
    assert results[0]["response"]["body"]["choices"][0]["message"]["content"] == "A B C seed 1"
    assert results[0]["response"]["body"]["usage"]["completion_tokens"] == 3
    assert all(line["error"] is None for line in results)
    assert [(line["custom_id"], line["error"]["code"], line["error"]["line"]) for line in errors] == [
        (None, "invalid_json", 2),
        ("two", "invalid_request", 3),
        ("one", "duplicate_custom_id", 6),
    ]
    assert all(line["response"] is None for line in errors)
    summary = BatchSummary.model_validate_json(record.summary)
    assert (summary.num_lines, summary.num_succeeded, summary.num_failed) == (5, 2, 3)
    assert [row.custom_id for row in summary.rows] == ["one", None, "two", "three", "one"]
    assert names_in(tmp_path) == {"in.jsonl", "out.jsonl", "out.errors.jsonl", "batches"}
    assert names_in(bench.batches) == {".lock"}
    assert await leftovers() == []


async def test_errors_can_stand_among_the_results(bench: JobsBench, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [chat("one"), "{", chat("two", FAIL_WORD), chat("three")])
    async with bench.answering(), bench.working():
        await bench.ended(await bench.submit(source, errors=tmp_path / "out.jsonl"))
    assert ids_in(tmp_path / "out.jsonl") == ["one", None, "two", "three"]
    assert not (tmp_path / "out.errors.jsonl").exists()


async def test_without_errors_there_is_no_file_of_them(bench: JobsBench, tmp_path: Path) -> None:
    (tmp_path / "out.errors.jsonl").write_text("of the batch before\n")
    async with bench.answering(), bench.working():
        await bench.ended(await bench.submit(write_lines(tmp_path / "in.jsonl", many(1))))
    assert ids_in(tmp_path / "out.jsonl") == ids(1)
    assert not (tmp_path / "out.errors.jsonl").exists()


async def test_lines_that_are_all_wrong_are_all_said_so(bench: JobsBench, tmp_path: Path, leftovers: Leftovers) -> None:
    source = write_lines(tmp_path / "in.jsonl", ["{"] * 300)
    async with bench.working():  # no other stage is needed
        record = await bench.ended(await bench.submit(source, window=8))
    assert (record.state, record.succeeded, record.failed) == ("completed", 0, 300)
    assert (tmp_path / "out.jsonl").read_bytes() == b""
    errors = records_in(tmp_path / "out.errors.jsonl")
    assert [line["error"]["line"] for line in errors] == list(range(1, 301))
    assert await leftovers() == []


async def test_a_file_of_another_editor_is_read_as_it_is_meant(bench: JobsBench, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(["", chat("one"), "  ", chat("ü", "ä"), chat("last")]).encode())
    async with bench.answering(), bench.working():
        record = await bench.ended(await bench.submit(source))
    assert (record.state, record.failed) == ("completed", 0)
    assert ids_in(tmp_path / "out.jsonl") == ["one", "ü", "last"]


async def test_lines_in_flight_stay_within_the_window(bench: JobsBench, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", many(40))
    async with bench.working():
        batch_id = await bench.submit(source, window=5)
        await bench.sees(batch_id, lambda record: record.cursor == 5)
        highest = 0
        async with bench.answering():
            while not (record := await bench.store.read(batch_id)).is_over:
                highest = max(highest, record.admitted - record.collected)
    assert 1 <= highest <= 10  # five in flight, and as many that wait for the disk
    assert ids_in(tmp_path / "out.jsonl") == ids(40)


async def test_turns_follow_one_another_without_a_pause(
    bench: JobsBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn, "SLICE_S", 0.1)
    monkeypatch.setattr(turn, "STEP_GRACE_S", 50.0)  # whoever waited for it would be too late
    async with bench.answering(), bench.working():
        record = await bench.ended(await bench.submit(write_lines(tmp_path / "in.jsonl", many(300))))
    assert record.admitted == 300
    assert ids_in(tmp_path / "out.jsonl") == ids(300)
    numbers = await bench.raw.hmget(bench.keys.batch(record.id), "feed_number", "collect_number")
    assert min(int(number) for number in numbers) >= 4, "there was one turn after the other"


async def test_two_jobs_processes_share_the_work_and_double_nothing(
    bench: JobsBench, tmp_path: Path, leftovers: Leftovers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn, "SLICE_S", 0.1)
    sources = [write_lines(tmp_path / f"in{number}.jsonl", many(150)) for number in range(2)]
    async with bench.answering(), bench.working(), bench.working():
        batch_ids = [
            await bench.submit(source, tmp_path / f"out{number}.jsonl") for number, source in enumerate(sources)
        ]
        records = [await bench.ended(batch_id) for batch_id in batch_ids]
    for number, record in enumerate(records):
        assert (record.state, record.admitted, record.collected, record.succeeded) == ("completed", 150, 150, 150)
        assert ids_in(tmp_path / f"out{number}.jsonl") == ids(150)
    assert await leftovers() == []


async def test_more_batches_than_jobs_at_a_time_all_come_to_their_end(
    bench: JobsBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn, "SLICE_S", 0.1)
    monkeypatch.setattr("stages.jobs.worker.MAX_JOBS", 2)
    source = write_lines(tmp_path / "in.jsonl", many(5))
    async with bench.answering(), bench.working():
        batch_ids = [await bench.submit(source, tmp_path / f"out{number}.jsonl") for number in range(6)]
        for batch_id in batch_ids:
            assert (await bench.ended(batch_id)).admitted == 5


async def test_without_anything_of_arq_the_reconciler_drives_it_on(bench: JobsBench, tmp_path: Path) -> None:
    """All that arq keeps is lost again and again: the record alone says what is next."""
    source = write_lines(tmp_path / "in.jsonl", many(30))
    num_dropped = 0

    async def drop() -> None:
        nonlocal num_dropped
        pattern = f"arq:*{bench.keys.namespace}:*"
        while True:
            names = [key async for key in bench.raw.scan_iter(match=pattern, count=1000)]
            num_dropped += await bench.raw.delete(bench.keys.arq(), *names)
            await asyncio.sleep(0.1)

    async with bench.answering(), bench.working():
        dropping = asyncio.create_task(drop())
        record = await bench.ended(await bench.submit(source, window=4))
        dropping.cancel()
    assert num_dropped > 0
    assert (record.state, record.admitted) == ("completed", 30)
    assert ids_in(tmp_path / "out.jsonl") == ids(30)


async def test_told_to_stop_it_stops_soon_and_the_next_one_goes_on(bench: JobsBench, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [*many(20), chat("hangs", HANG_WORD)])
    async with bench.answering():
        async with bench.working():
            batch_id = await bench.submit(source)
            await bench.sees(batch_id, lambda record: record.num_finished == 20)
            stopped_at = time.monotonic()
        assert time.monotonic() - stopped_at < 3
    before = bench.prepare(source).directory.finished_lines.read_bytes()
    async with bench.working():
        await bench.store.cancel(batch_id)
        record = await bench.ended(batch_id)
    assert (record.state, record.admitted) == ("cancelled", 21)
    assert sorted((tmp_path / "out.jsonl").read_bytes().splitlines()) == sorted(before.splitlines())


# Interrupted


@asynccontextmanager
async def bench_on_its_own_server(directory: Path, tmp_path: Path) -> AsyncIterator[JobsBench]:
    settings = Settings(redis_url=f"unix://{directory}/server.sock", namespace="t", home=tmp_path / "home")
    raw = Redis.from_url(str(settings.redis_url), protocol=2)
    async with JobsBench(settings, tmp_path, raw) as bench:
        yield bench
    await raw.aclose()


async def test_a_server_that_is_killed_and_comes_back_is_found_again(
    short_directory: Path, tmp_path: Path, short_waits: None
) -> None:
    options = ServerOptions(appendonly="yes", appendfsync="always")
    source = write_lines(tmp_path / "in.jsonl", [*many(60), chat("hangs", HANG_WORD)])
    async with bench_on_its_own_server(short_directory, tmp_path) as bench:
        with running_server(short_directory, options=options):
            batch_id = await bench.submit(source)
            working = asyncio.create_task(until_stopped(bench, stop := asyncio.Event()))
            async with bench.answering():
                await bench.sees(batch_id, lambda record: record.num_finished >= 60)
        journal = bench.prepare(source).directory.finished_lines.read_bytes()
        await asyncio.sleep(0.2)  # it calls in vain meanwhile
        with running_server(short_directory, options=options):
            await bench.store.cancel(batch_id)
            record = await bench.ended(batch_id)
            stop.set()
            await asyncio.wait_for(working, DEADLINE_S)
    assert (record.state, record.admitted, record.succeeded, record.failed) == ("cancelled", 61, 60, 1)
    assert sorted((tmp_path / "out.jsonl").read_bytes().splitlines()) == sorted(journal.splitlines())


async def until_stopped(bench: JobsBench, stop: asyncio.Event) -> None:
    async with bench.working():
        await stop.wait()


async def test_after_the_loss_of_all_data_only_what_is_missing_is_done_again(
    short_directory: Path, tmp_path: Path, short_waits: None
) -> None:
    hanging = [chat(f"hangs-{number}", HANG_WORD) for number in range(3)]
    source = write_lines(tmp_path / "in.jsonl", [*many(30), "{", *hanging])
    with running_server(short_directory):
        async with bench_on_its_own_server(short_directory, tmp_path) as bench, bench.working():
            prepared = bench.prepare(source)
            async with bench.answering():
                batch_id = await submit(bench.store, prepared)
                await bench.sees(batch_id, lambda record: record.num_finished == 31 and record.cursor == 34)
            before = prepared.directory.finished_lines.read_bytes()
            await bench.raw.flushall()
            assert await submit(bench.store, bench.prepare(source)) == batch_id
            record = await bench.sees(batch_id, lambda record: record.cursor == 34)
            assert (record.recovered, record.num_finished, record.admitted) == (True, 31, 3)
            await bench.store.cancel(batch_id)
            record = await bench.ended(batch_id)
    assert (record.state, record.succeeded, record.failed) == ("cancelled", 30, 4)
    assert ids_in(tmp_path / "out.jsonl") == ids(30)
    assert sorted((tmp_path / "out.jsonl").read_bytes().splitlines()) == sorted(
        line for line in before.splitlines() if json.loads(line)["error"] is None
    )
    assert [line["error"]["code"] for line in records_in(tmp_path / "out.errors.jsonl")] == [
        "invalid_json",
        *["batch_cancelled"] * 3,
    ]


async def test_lost_data_and_a_lost_client_are_the_same_command_again(
    short_directory: Path, tmp_path: Path, short_waits: None
) -> None:
    source = write_lines(tmp_path / "in.jsonl", many(400))
    with running_server(short_directory):
        async with bench_on_its_own_server(short_directory, tmp_path) as bench, bench.answering(), bench.working():
            for _ in range(4):  # each time in the middle
                batch_id = await bench.submit(source, window=32)
                seen = await bench.store.read(batch_id)
                await bench.sees(batch_id, lambda record, seen=seen: record.num_finished >= seen.num_finished + 40)
                await bench.raw.flushall()
            record = await bench.ended(await bench.submit(source, window=32))
    assert (record.state, record.recovered, record.succeeded) == ("completed", True, 400)
    assert record.admitted <= 400 - 160
    assert ids_in(tmp_path / "out.jsonl") == ids(400)


async def test_a_server_that_stands_still_for_longer_than_a_lease_costs_nothing_but_time(
    short_directory: Path, tmp_path: Path, short_waits: None
) -> None:
    source = write_lines(tmp_path / "in.jsonl", many(80))
    with running_server(short_directory) as server:
        async with (
            bench_on_its_own_server(short_directory, tmp_path) as bench,
            bench.answering(),
            bench.working(),
            bench.working(),
        ):
            batch_id = await bench.submit(source, window=8)
            await bench.sees(batch_id, lambda record: record.num_finished >= 20)
            server.freeze()
            await asyncio.sleep(0.6)  # a lease is 0.4 s
            server.thaw()
            record = await bench.ended(batch_id)
    assert (record.state, record.admitted, record.collected, record.succeeded) == ("completed", 80, 80, 80)
    assert ids_in(tmp_path / "out.jsonl") == ids(80)
