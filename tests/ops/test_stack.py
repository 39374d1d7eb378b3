"""A stack from start to end, with a real server and a stage that stands in for all: what it leaves is nothing."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from ops.leftovers import Leftovers
from ops.pool_share import PoolShare
from ops.running import Advert, AlreadyUp, AttachedStack, StackGone, UpLock
from ops.server.valkey import EmbeddedValkey, ValkeyFailed
from ops.serving import Serving
from ops.stack import DRAIN_ORDER, Stack, choose_stack, stage_environment
from ops.supervision.crashes import RestartPolicy, StageFailed
from ops.supervision.procfile import default_procfile, read_procfile
from pipeline.batch.results import Completion
from pipeline.client.asks import NewRequest
from pipeline.client.client import Client
from pipeline.connect import open_transport
from pipeline.errors import InvalidRequest
from pipeline.keys import STAGES
from pipeline.messages import Failure
from pipeline.params import SamplingParams
from pipeline.settings import Settings
from stages.gguf.model_files import ModelFileError
from tests.ops.answering import CRASH_WORD, HANG_WORD
from tests.ops.waiting import wait_for_end

CANCELLED = Failure(stage="client", code="cancelled", message="was cancelled", retryable=False)
QUICK = RestartPolicy(first_delay_s=0.02, max_delay_s=0.05, max_in_a_row=3)


def asking(prompt: str, model: str = "tiny") -> NewRequest:
    return NewRequest(model, prompt, None, SamplingParams(seed=1))


async def answer(client: Client, prompt: str) -> str:
    outcome = (await asyncio.wait_for(client.answer(asking(prompt), "batch"), 60)).outcome
    assert isinstance(outcome, Completion)
    return outcome.text


async def interrupted(stack: Serving) -> str:
    """Ask for what is never answered, stop waiting for it, and return its id."""
    client = stack.client()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.answer(asking(HANG_WORD), "batch"), 0.5)
    [request_id] = client.unanswered
    return request_id


def pids(stack: Stack) -> list[int]:
    assert stack.supervisor is not None
    return [state.pid for state in stack.supervisor.states() if state.pid is not None]


@asynccontextmanager
async def queues_of(settings: Settings) -> AsyncIterator[Leftovers]:
    """Look at the queues of a home when its stack is gone."""
    server = EmbeddedValkey(settings.home)
    share = PoolShare(settings.pool_dir, settings.kv_pool_bytes)
    leftovers = Leftovers(settings.model_copy(update={"redis_url": await server.start()}), share.pool_id)
    try:
        yield leftovers
    finally:
        await leftovers.close()
        share.close()
        await server.stop()


def blobs_in(pool_dir: Path) -> list[str]:
    return sorted(path.name for path in pool_dir.iterdir() if path.name not in {".pool-id", ".stacks"})


async def test_stack_answers_and_leaves_neither_processes_nor_entries(stack_settings: Settings, procfile: Path) -> None:
    warnings: list[str] = []
    async with Stack(stack_settings, {"tokenizer": 2}, procfile=procfile, warn=warnings.append) as stack:
        assert await answer(stack.client(), "a b") == "A B seed 1"
        assert stack.settings.redis_url == f"unix://{stack_settings.home}/valkey/server.sock"
        assert stack.startup_s > 0
        running = pids(stack)
    assert len(running) == 2
    for pid in running:
        wait_for_end(pid)
    async with queues_of(stack_settings) as queues:
        assert await queues.count(STAGES) == 0
    assert warnings == []


async def test_requests_that_nobody_waits_for_any_more_end_with_the_stack(
    stack_settings: Settings, procfile: Path
) -> None:
    warnings: list[str] = []
    async with Stack(stack_settings, procfile=procfile, warn=warnings.append) as stack:
        request_id = await interrupted(stack)
    async with queues_of(stack_settings) as queues:
        assert await queues.count(STAGES) == 0
    async with Stack(stack_settings, procfile=procfile, warn=warnings.append) as stack:
        assert (await stack.client().result(request_id)) == CANCELLED
    assert warnings == []


async def test_entries_of_others_are_kept_and_told(stack_settings: Settings, procfile: Path) -> None:
    warnings: list[str] = []
    async with Stack(stack_settings, procfile=procfile, warn=warnings.append) as stack:
        await stack.client().submit(asking(HANG_WORD), "batch")  # nobody said that it ends with this stack
    assert warnings == ["1 entries are left in the queues; the next start goes on with them"]
    async with queues_of(stack_settings) as queues:
        assert await queues.count(STAGES) == 1


async def test_blobs_that_were_left_are_swept_by_the_last_stack(
    stack_settings: Settings, procfile: Path, pool_dir: Path
) -> None:
    warnings: list[str] = []
    async with Stack(stack_settings, procfile=procfile, warn=warnings.append):
        for name in ("kv_lost_blob", ".tmp-lost"):
            (pool_dir / name).touch(mode=0o600)
    assert blobs_in(pool_dir) == []
    assert warnings == ["1 blobs were left in the pool, and are removed"]


async def test_pool_that_another_stack_uses_is_not_swept(
    stack_settings: Settings, procfile: Path, pool_dir: Path
) -> None:
    other = PoolShare(pool_dir, stack_settings.kv_pool_bytes)
    async with Stack(stack_settings, procfile=procfile):
        (pool_dir / "kv_theirs").touch(mode=0o600)
    assert blobs_in(pool_dir) == ["kv_theirs"]
    assert other.is_last()
    assert other.sweep().num_blobs == 1
    other.close()


async def test_crash_looping_stage_ends_the_work_with_its_last_lines(stack_settings: Settings, procfile: Path) -> None:
    stack_settings = stack_settings.model_copy(update={"lease_s": 0.3})
    async with Stack(stack_settings, procfile=procfile, policy=QUICK) as stack:
        client = stack.client()
        with pytest.raises(StageFailed, match="tokenizer was ended by SIGKILL, 3 times in a row"):
            await asyncio.wait_for(stack.watched(client.answer(asking(CRASH_WORD), "batch")), 60)


async def test_stage_that_cannot_start_is_told_and_what_had_started_is_stopped(
    stack_settings: Settings, tmp_path: Path
) -> None:
    procfile = tmp_path / "Procfile"
    procfile.write_text('tokenizer: python -c "raise SystemExit(chr(33) * 3)"\n')
    with pytest.raises(StageFailed, match="tokenizer ended with code 1") as failure:
        async with Stack(stack_settings, procfile=procfile):
            pass
    assert failure.value.last_lines == ("!!!",)
    assert not (stack_settings.home / "valkey" / "server.sock").exists()


async def test_missing_model_is_told_before_anything_starts(stack_settings: Settings, procfile: Path) -> None:
    settings = stack_settings.model_copy(update={"model": "smollm2-135m-instruct"})
    with pytest.raises(ModelFileError, match="run `sluice models pull smollm2-135m-instruct`"):
        async with Stack(settings, procfile=procfile):
            pass
    assert list(settings.home.iterdir()) == []


async def test_registration_of_a_dead_process_does_not_outlive_the_next_start(
    stack_settings: Settings, procfile: Path
) -> None:
    server = EmbeddedValkey(stack_settings.home)
    settings = stack_settings.model_copy(update={"redis_url": await server.start()})
    dead = await asyncio.create_subprocess_exec("true")
    await dead.wait()
    host = os.uname().nodename
    lost = await open_transport(settings, consumer=f"{host}:{dead.pid}:0000")
    await lost.register("decode", b"other bits", 600)
    async with Stack(stack_settings, procfile=procfile) as stack:
        assert [process.stage for process in await stack.transport.processes()] == ["tokenizer"]
    await lost.close()
    await server.stop()


async def test_given_server_is_used_and_none_is_embedded(
    stack_settings: Settings, procfile: Path, valkey_url: str, namespace: str
) -> None:
    settings = stack_settings.model_copy(update={"redis_url": valkey_url, "namespace": namespace})
    async with Stack(settings, procfile=procfile) as stack:
        assert await answer(stack.client(), "a") == "A seed 1"
    assert not (settings.home / "valkey").exists()


async def test_server_that_is_gone_for_good_ends_the_work(stack_settings: Settings, procfile: Path) -> None:
    warnings: list[str] = []
    async with Stack(stack_settings, procfile=procfile, warn=warnings.append) as stack:
        assert stack._valkey is not None
        stack._valkey.wait_failed = lambda: asyncio.sleep(0, ValkeyFailed("the server is gone"))
        with pytest.raises(ValkeyFailed, match="the server is gone"):
            await stack.watched(asyncio.sleep(600))


async def test_commands_use_the_stack_that_is_up(stack_settings: Settings, procfile: Path) -> None:
    lock = UpLock(stack_settings.home)
    async with Stack(stack_settings, procfile=procfile) as up:
        lock.announce(up.settings)
        warnings: list[str] = []
        stack = await choose_stack(stack_settings, {"decode": 2}, warnings.append)
        assert isinstance(stack, AttachedStack)
        assert "not this command" in warnings[0]
        async with stack:
            assert await answer(stack.client(), "a") == "A seed 1"
            request_id = await interrupted(stack)
            lock.release()
            with pytest.raises(StackGone, match="has ended"):
                await stack.watched(asyncio.sleep(600))
        assert (await up.client().result(request_id)) == CANCELLED  # when the command ended
        assert isinstance(await choose_stack(stack_settings, {}), Stack)


def test_second_up_of_a_home_is_refused(home: Path) -> None:
    lock = UpLock(home)
    with pytest.raises(AlreadyUp):
        UpLock(home)
    lock.release()
    UpLock(home).release()


def test_stack_that_is_up_with_another_model_is_refused(stack_settings: Settings) -> None:
    advert = Advert(pid=7, redis_url="unix:///x", namespace="sluice", model="other")
    with pytest.raises(InvalidRequest, match="process 7"):
        AttachedStack(stack_settings, advert)


def test_every_process_of_the_procfile_has_its_place_in_the_order_of_stopping() -> None:
    assert {line.stage for line in read_procfile(default_procfile())} == set(DRAIN_ORDER)


def test_stages_get_exactly_these_settings(stack_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_MODEL", "another")
    monkeypatch.setenv("SLUICE_ZSTD_KV", "true")
    environment = stage_environment(stack_settings)
    assert environment["SLUICE_MODEL"] == stack_settings.model
    assert environment["SLUICE_ZSTD_KV"] == str(stack_settings.zstd_kv)
    assert environment["PATH"] == os.environ["PATH"]
