"""Feeding: which requests lines become, and what happens where the queue or the input is not as it was."""

import asyncio
from pathlib import Path

import pytest
from redis.asyncio import Redis

from pipeline.batch.store import line_request_id
from pipeline.connect import open_transport
from pipeline.messages import GenerateRequest
from pipeline.settings import Settings
from pipeline.wire import unpack
from stages.jobs import feed
from tests.pipeline.benches import take
from tests.servers import ServerOptions, server_of_its_own
from tests.stages.jobs.bench import POOL, JobsBench, chat, ids_in, write_lines


async def fed(bench: JobsBench, source: Path, num: int) -> list[GenerateRequest]:
    """What the tokenizer gets of a batch."""
    batch_id = await bench.submit(source)
    transport = await open_transport(bench.settings, pool_id=POOL)
    try:
        async with bench.working():
            requests = [
                unpack(delivery.payload, GenerateRequest) for delivery in await take(transport, "tokenizer", num)
            ]
            await bench.store.cancel(batch_id)
            await bench.ended(batch_id)
    finally:
        await transport.close()
    assert [request.request_id for request in requests] == [line_request_id(batch_id, index) for index in range(num)]
    return requests


async def test_lines_become_requests(bench: JobsBench, tmp_path: Path) -> None:
    lines = [chat("one", "hello", seed=7, temperature=0.5, speculate=False), chat("two", "hi")]
    first, second = await fed(bench, write_lines(tmp_path / "in.jsonl", lines), 2)
    assert (first.params.seed, first.params.temperature, first.speculate) == (7, 0.5, False)
    assert (second.priority, second.model, second.speculate) == ("batch", "tiny", True)
    assert [message.content for message in second.messages or ()] == ["hi"]
    assert len(second.stamps) == 1
    assert second.attempt * 1_000_000 <= second.stamps[0].at_us < (second.attempt + 60) * 1_000_000  # the time


async def test_a_line_without_a_seed_has_the_same_one_however_often_it_is_fed(bench: JobsBench, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [chat(str(number), seed=None) for number in range(3)])
    prepared = bench.prepare(source)
    seeds = [request.params.seed for request in await fed(bench, source, 3)]
    assert len(set(seeds)) == 3
    await bench.raw.delete(bench.keys.batch(prepared.manifest.batch_id))
    lost = bench.prepare(source)  # its output is in place, so this is another batch
    assert lost.manifest.batch_id != prepared.manifest.batch_id
    assert [request.params.seed for request in await fed(bench, source, 3)] != seeds


async def test_seeds_survive_the_loss_of_the_servers_data(bench: JobsBench, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [chat(str(number), seed=None) for number in range(3)])
    transport = await open_transport(bench.settings, pool_id=POOL)
    found: list[list[int | None]] = []
    async with bench.working():
        for _ in range(2):
            await bench.submit(source)
            deliveries = await take(transport, "tokenizer", 3)
            found.append([unpack(delivery.payload, GenerateRequest).params.seed for delivery in deliveries])
            names = [key async for key in bench.raw.scan_iter(match=f"{bench.keys.namespace}:*")]
            await bench.raw.delete(*names)
    assert found[0] == found[1]
    await transport.close()


async def test_a_full_queue_is_waited_for(bench: JobsBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "ADMIT_RETRY_S", 0.02)
    bench.settings = bench.settings.model_copy(update={"max_queue": 2})
    source = write_lines(tmp_path / "in.jsonl", [chat(str(number)) for number in range(12)])
    async with bench.working():
        batch_id = await bench.submit(source)
        await bench.sees(batch_id, lambda record: record.cursor == 2)
        await asyncio.sleep(0.1)
        assert (await bench.store.read(batch_id)).cursor == 2
        async with bench.answering():
            assert (await bench.ended(batch_id)).succeeded == 12


async def test_a_line_that_was_changed_during_the_run_stops_it_and_nothing_finished_is_done_again(
    bench: JobsBench, tmp_path: Path
) -> None:
    source = write_lines(tmp_path / "in.jsonl", [chat(f"id-{number}") for number in range(30)])
    data = source.read_bytes()
    async with bench.answering(), bench.working():
        prepared = bench.prepare(source, window=4)
        source.write_bytes(data)
        batch_id = await bench.submit(source, window=4)
        await bench.sees(batch_id, lambda record: record.num_finished >= 4)
        source.write_bytes(data.replace(b'"id-29"', b'"id-XX"'))
        record = await bench.ended(batch_id)
        assert (record.state, "(line 30)" in record.error) == ("failed", True)
        assert record.num_finished >= 4
        finished = prepared.directory.finished_lines.read_bytes()
        assert not (tmp_path / "out.jsonl").exists()
        source.write_bytes(data)
        await bench.submit(source, window=4)
        record = await bench.sees(batch_id, lambda record: record.state == "completed")
    assert 0 < record.admitted <= 30 - len(finished.splitlines())  # the collector may have been at work on more
    assert ids_in(tmp_path / "out.jsonl") == [f"id-{number}" for number in range(30)]
    assert set(finished.splitlines()) <= set((tmp_path / "out.jsonl").read_bytes().splitlines())


async def test_drafts_can_be_turned_off_for_all_lines(bench: JobsBench, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [chat("one")])
    batch_id = await bench.submit(source, speculate=False)
    transport = await open_transport(bench.settings, pool_id=POOL)
    async with bench.working():
        [delivery] = await take(transport, "tokenizer")
        assert unpack(delivery.payload, GenerateRequest).speculate is False
        await bench.store.cancel(batch_id)
    await transport.close()


async def test_a_line_with_a_time_limit_is_given_it_when_it_is_fed(bench: JobsBench, tmp_path: Path) -> None:
    lines = [chat("one", timeout_s=60), chat("two")]
    batch_id = await bench.submit(write_lines(tmp_path / "in.jsonl", lines))
    async with bench.working():
        await bench.sees(batch_id, lambda record: record.cursor == 2)
        [(request_id, deadline_ms)] = await bench.raw.zrange(bench.keys.deadlines(), 0, -1, withscores=True)
        seconds, _ = await bench.raw.time()
        assert request_id.decode() == line_request_id(batch_id, 0)
        assert 30 < deadline_ms / 1000 - seconds <= 61
        await bench.store.cancel(batch_id)
        await bench.ended(batch_id)
    assert await bench.raw.exists(bench.keys.deadlines()) == 0


async def test_lines_that_are_to_be_on_the_disk_wait_for_it_a_page_at_a_time(tmp_path: Path) -> None:
    num_lines = 3 * feed.PAGE
    with server_of_its_own("valkey", ServerOptions(appendonly="yes", appendfsync="everysec")) as server:
        settings = Settings(redis_url=server.url, durability="strict")
        async with Redis.from_url(server.url, protocol=2) as raw, JobsBench(settings, tmp_path, raw) as bench:
            source = write_lines(tmp_path / "in.jsonl", [chat(str(number)) for number in range(num_lines)])
            batch_id = await bench.submit(source, window=num_lines)
            async with bench.working():
                await bench.sees(batch_id, lambda record: record.cursor == num_lines)
                waits = (await raw.info("commandstats"))["cmdstat_waitaof"]["calls"]
                async with bench.answering():
                    assert (await bench.ended(batch_id)).succeeded == num_lines
    assert num_lines // feed.PAGE <= waits < num_lines // 4
