"""Batches as a program runs them: submitted, followed, interrupted, cancelled, and started over."""

import asyncio
import io
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from pipeline.batch.errors import BatchFailed, BatchMismatch, UnknownBatch
from pipeline.batch.record import BatchRecord
from pipeline.batch.store import line_request_id
from pipeline.client.batches import (
    Batches,
    batch_options,
    batches_dir,
    errors_path,
    prepare_in_thread,
    resolved,
    summary_of,
)
from pipeline.client.errors import Stalled
from pipeline.connect import open_transport
from pipeline.errors import InvalidRequest
from pipeline.settings import Settings
from tests.ops.answering import FAIL_WORD, HANG_WORD
from tests.stages.jobs.bench import DEADLINE_S, MODEL, POOL, JobsBench, chat, ids_in, names_in, write_lines
from tests.stages.jobs.conftest import shorten_waits

Leftovers = Callable[[], Awaitable[list[str]]]


@pytest.fixture
async def bench(
    valkey_url: str, namespace: str, raw_redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[JobsBench]:
    shorten_waits(monkeypatch)
    monkeypatch.setattr("pipeline.client.batches.POLL_S", 0.02)
    settings = Settings(redis_url=valkey_url, namespace=namespace, home=tmp_path / "home")
    async with JobsBench(settings, tmp_path, raw_redis) as bench:
        yield bench


@pytest.fixture
async def batches(bench: JobsBench) -> AsyncIterator[Batches]:
    transport = await open_transport(bench.settings, pool_id=POOL)
    async with Batches(transport, bench.settings) as batches:
        yield batches
    await transport.close()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "in.jsonl", [chat("one"), chat("two", FAIL_WORD), chat("three")])


async def test_a_file_is_run_to_its_end(bench: JobsBench, batches: Batches, source: Path, tmp_path: Path) -> None:
    seen: list[BatchRecord] = []
    async with bench.answering(), bench.working():
        summary = await batches.run(source, tmp_path / "out.jsonl", model=MODEL, on_change=seen.append)
    assert (summary.num_lines, summary.num_succeeded, summary.num_failed) == (3, 2, 1)
    assert [row.custom_id for row in summary.rows] == ["one", "two", "three"]
    assert (ids_in(tmp_path / "out.jsonl"), ids_in(tmp_path / "out.errors.jsonl")) == (["one", "three"], ["two"])
    assert seen[-1].state == "completed"
    assert len({record.id for record in seen}) == 1
    assert [record.id for record in await batches.all()] == [seen[-1].id]


async def test_the_errors_can_go_elsewhere(bench: JobsBench, batches: Batches, source: Path, tmp_path: Path) -> None:
    async with bench.answering(), bench.working():
        await batches.run(source, tmp_path / "out.jsonl", model=MODEL, errors=tmp_path / "wrong.jsonl")
    assert ids_in(tmp_path / "wrong.jsonl") == ["two"]


async def test_whoever_follows_may_leave_and_come_back(bench: JobsBench, batches: Batches, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [chat("one"), chat("two")])
    async with bench.working():
        run = asyncio.create_task(batches.run(source, tmp_path / "out.jsonl", model=MODEL))
        await bench.holds(lambda: has_batch(batches, lambda record: record.cursor == 2))
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        [record] = await batches.all()
        assert record.state == "in_progress"  # it goes on
        async with bench.answering():
            summary = await batches.run(source, tmp_path / "out.jsonl", model=MODEL)
    assert summary.num_succeeded == 2
    [record] = await batches.all()
    assert record.admitted == 2


async def has_batch(batches: Batches, condition: Callable[[BatchRecord], bool]) -> bool:
    return any(condition(record) for record in await batches.all())


async def test_two_who_want_the_same_follow_one_batch(
    bench: JobsBench, batches: Batches, source: Path, tmp_path: Path
) -> None:
    async with bench.answering(), bench.working():
        first, second = await asyncio.gather(
            *(batches.run(source, tmp_path / "out.jsonl", model=MODEL) for _ in range(2))
        )
    assert first == second
    [record] = await batches.all()
    assert record.admitted == 3


async def test_a_server_that_loses_its_data_meanwhile_is_told_again(
    bench: JobsBench, batches: Batches, tmp_path: Path
) -> None:
    source = write_lines(tmp_path / "in.jsonl", [chat("one"), chat("hangs", HANG_WORD)])
    target = tmp_path / "out.jsonl"
    async with bench.answering(), bench.working():
        options = batch_options(source, target, model=MODEL)
        prepared = await prepare_in_thread(options, batches_dir(bench.settings.home))
        following = asyncio.create_task(batches.follow(prepared))
        await bench.holds(lambda: has_batch(batches, lambda record: record.num_finished == 1 and record.cursor == 2))
        names = [key async for key in bench.raw.scan_iter(match=f"{bench.keys.namespace}:*")]
        await bench.raw.delete(*names)
        record = await bench.sees_soon(prepared.manifest.batch_id, lambda record: record.cursor == 2)
        assert (record.recovered, record.num_finished, record.admitted) == (True, 1, 1)
        assert await batches.cancel(record.id)
        record = await asyncio.wait_for(following, DEADLINE_S)
    assert (record.state, record.succeeded, record.failed) == ("cancelled", 1, 1)


async def test_what_differs_from_the_unfinished_batch_is_said(
    bench: JobsBench, batches: Batches, source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out.jsonl"
    await batches.submit(await prepare_in_thread(batch_options(source, target, model=MODEL), home_of(bench)))
    with pytest.raises(BatchMismatch, match="model 'tiny' instead of 'other'"):
        await batches.run(source, target, model="other")


def home_of(bench: JobsBench) -> Path:
    return batches_dir(bench.settings.home)


async def test_starting_over_ends_what_was_in_flight(
    bench: JobsBench, batches: Batches, tmp_path: Path, leftovers: Leftovers
) -> None:
    target = tmp_path / "out.jsonl"
    first = write_lines(tmp_path / "first.jsonl", [chat("old"), chat("older")])
    second = write_lines(tmp_path / "second.jsonl", [chat("new")])
    async with bench.working():
        batch_id = await batches.submit(
            await prepare_in_thread(batch_options(first, target, model=MODEL), home_of(bench))
        )
        await bench.sees(batch_id, lambda record: record.cursor == 2)
        async with bench.answering():
            # Answered only now: the lines of the first batch are over before a stage sees them.
            prepared = await prepare_in_thread(batch_options(second, target, model=MODEL), home_of(bench), restart=True)
            record = await batches.follow(prepared)
        old = await batches.read(batch_id)
    assert (record.state, record.succeeded) == ("completed", 1)
    assert ids_in(target) == ["new"]
    assert old.state in {"cancelled", "failed"}
    states = [await bench.raw.hget(bench.keys.request(line_request_id(batch_id, index)), "state") for index in range(2)]
    assert set(states) <= {b"cancelled", b"finished"}
    assert await leftovers() == []
    assert names_in(home_of(bench)) == {".lock"}


async def test_a_batch_that_fails_says_why(bench: JobsBench, batches: Batches, source: Path, tmp_path: Path) -> None:
    options = batch_options(source, tmp_path / "out.jsonl", model=MODEL)
    prepared = await prepare_in_thread(options, home_of(bench))
    write_lines(source, [chat("another")])
    async with bench.working():
        record = await batches.follow(prepared)
    with pytest.raises(BatchFailed, match="was changed after the batch was submitted") as error:
        summary_of(record)
    assert error.value.retryable


async def test_an_unknown_batch_cannot_be_read_waited_for_or_cancelled(batches: Batches) -> None:
    calls: list[Callable[[str], Awaitable[Any]]] = [batches.read, batches.wait, batches.cancel]
    for call in calls:
        with pytest.raises(UnknownBatch):
            await call("batch_nobody")
    assert await batches.all() == []


async def test_cancelling_says_whether_it_did(bench: JobsBench, batches: Batches, source: Path, tmp_path: Path) -> None:
    async with bench.working():
        options = batch_options(source, tmp_path / "out.jsonl", model=MODEL)
        batch_id = await batches.submit(await prepare_in_thread(options, home_of(bench)))
        assert await batches.cancel(batch_id)
        record = await batches.wait(batch_id)
        assert record.state == "cancelled"
        assert not await batches.cancel(batch_id)
    assert summary_of(record).num_failed == 3


async def test_a_batch_that_nobody_works_on_is_not_waited_for_for_ever(
    bench: JobsBench, source: Path, tmp_path: Path
) -> None:
    transport = await open_transport(bench.settings, pool_id=POOL)
    async with Batches(transport, bench.settings, stall_timeout_s=0.1) as batches:
        with pytest.raises(Stalled, match="is the jobs process of its stack running"):
            await batches.run(source, tmp_path / "out.jsonl", model=MODEL)
    await transport.close()


async def test_an_input_without_requests_is_refused(batches: Batches, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="has no requests"):
        await batches.run(write_lines(tmp_path / "in.jsonl", [""]), tmp_path / "out.jsonl", model=MODEL)


async def test_interrupted_while_it_reads_a_pipe_it_ends_at_once(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    options = batch_options(tmp_path / "unused", tmp_path / "out.jsonl", model=MODEL)
    num_threads = threading.active_count()
    with os.fdopen(reading, "rb") as pipe, os.fdopen(writing, "wb"):
        work = asyncio.create_task(prepare_in_thread(options, tmp_path / "batches", pipe))
        while threading.active_count() == num_threads:  # noqa: ASYNC110 - a thread tells nobody
            await asyncio.sleep(0.001)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        await asyncio.wait_for(asyncio.get_running_loop().shutdown_default_executor(), DEADLINE_S)
    assert names_in(tmp_path / "batches") == {".lock"}


async def test_what_is_read_from_a_pipe_is_what_is_run(bench: JobsBench, batches: Batches, tmp_path: Path) -> None:
    options = batch_options(tmp_path / "unused", tmp_path / "out.jsonl", model=MODEL)
    data = io.BytesIO(f"{chat('one')}\n".encode())
    async with bench.answering(), bench.working():
        await batches.follow(await prepare_in_thread(options, home_of(bench), data))
    assert ids_in(tmp_path / "out.jsonl") == ["one"]


def test_paths_mean_the_same_to_everybody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("elsewhere.jsonl")
    options = batch_options(Path("in.jsonl"), Path("link"), model="/models/small.gguf")
    assert (options.source, options.target) == (tmp_path / "in.jsonl", tmp_path / "elsewhere.jsonl")
    assert options.errors == tmp_path / "elsewhere.errors.jsonl"
    assert (options.model, options.stack_model) == ("small", "/models/small.gguf")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolved(Path("~/x")) == tmp_path / "x"


@pytest.mark.parametrize(
    ("target", "errors"), [("out.jsonl", "out.errors.jsonl"), ("out", "out.errors"), ("a.b.jsonl", "a.b.errors.jsonl")]
)
def test_errors_lie_beside_the_results(target: str, errors: str) -> None:
    assert errors_path(Path("/d") / target) == Path("/d") / errors


async def test_what_was_completed_unseen_is_told_and_not_done_again(
    bench: JobsBench, batches: Batches, source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out.jsonl"
    prepared = await prepare_in_thread(batch_options(source, target, model=MODEL), batches_dir(tmp_path / "home"))
    async with bench.answering(), bench.working():
        batch_id = await batches.submit(prepared)  # and whoever did leaves
        await bench.sees(batch_id, lambda record: record.state == "completed")
        first = target.read_bytes()
        summary = await batches.run(source, target, model=MODEL)
        assert (summary.num_lines, target.read_bytes()) == (3, first)
        assert [record.id for record in await batches.all()] == [batch_id]
        await batches.run(source, target, model=MODEL)  # its end was seen: now it is done again
    assert len(await batches.all()) == 2
    assert list(batches_dir(tmp_path / "home").glob("*/manifest.json")) == []
