"""Whose stack a command uses: that of other people's processes, but not one that another command has for itself."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack

import pytest

from ops import external
from ops.external import JOBS, OWN_STACK, ExternalStack, StackIncomplete, needed_stages
from ops.stack import Stack, choose_stack
from pipeline.connect import open_transport
from pipeline.keys import STAGES
from pipeline.settings import Settings
from tests.ops.waiting import DEADLINE_S

DEAD_PID = 2**22 + 1  # above any that Linux gives
TTL_S = 60.0


@pytest.fixture
def settings(stack_settings: Settings, valkey_url: str, namespace: str) -> Settings:
    return stack_settings.model_copy(update={"redis_url": valkey_url, "namespace": namespace})


class Processes:
    """Registrations of processes that are not there."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._exit = AsyncExitStack()

    async def register(self, stages: Sequence[str], consumer: str | None = None) -> None:
        for stage in stages:
            transport = await open_transport(self._settings, consumer=consumer)
            self._exit.push_async_callback(transport.close)
            await transport.register(stage, b"\x80", TTL_S)

    async def leave(self) -> None:
        await self._exit.aclose()


@pytest.fixture
async def processes(settings: Settings) -> AsyncIterator[Processes]:
    others = Processes(settings)
    yield others
    await others.leave()


async def test_a_complete_stack_at_the_server_is_used(settings: Settings, processes: Processes) -> None:
    warnings: list[str] = []
    await processes.register([*STAGES, JOBS])
    stack = await choose_stack(settings, {"decode": 2}, warnings.append)
    assert isinstance(stack, ExternalStack)
    assert warnings == ["the stack at SLUICE_REDIS_URL decides how many processes there are, not this command"]
    async with stack:
        assert len(await stack.transport.processes()) == len(STAGES) + 1


async def test_a_server_without_stages_gets_a_stack_for_the_command(settings: Settings) -> None:
    assert isinstance(await choose_stack(settings, {}), Stack)


async def test_half_a_stack_is_an_error_that_names_what_is_missing(settings: Settings, processes: Processes) -> None:
    await processes.register(["tokenizer", "prefill"])
    with pytest.raises(StackIncomplete, match="no process of compressor, decode, jobs at the moment"):
        await choose_stack(settings, {})


async def test_stages_of_another_command_are_not_used(settings: Settings, processes: Processes) -> None:
    await processes.register([*STAGES, OWN_STACK])
    assert isinstance(await choose_stack(settings, {}), Stack)


async def test_what_killed_processes_left_is_no_stack(settings: Settings, processes: Processes) -> None:
    await processes.register(STAGES, f"{socket.gethostname()}:{DEAD_PID}:aaaa")
    assert isinstance(await choose_stack(settings, {}), Stack)


async def test_a_batch_needs_a_jobs_process_and_a_single_request_does_not(
    settings: Settings, processes: Processes
) -> None:
    await processes.register(STAGES)
    with pytest.raises(StackIncomplete, match="no process of jobs at the moment"):
        await choose_stack(settings, {})
    assert isinstance(await choose_stack(settings, {}, with_jobs=False), ExternalStack)


async def test_a_jobs_process_that_died_is_missing(settings: Settings, processes: Processes) -> None:
    await processes.register(STAGES)
    await processes.register([JOBS], f"{socket.gethostname()}:{DEAD_PID}:aaaa")
    with pytest.raises(StackIncomplete, match="no process of jobs at the moment"):
        await choose_stack(settings, {})


@pytest.mark.parametrize(("with_jobs", "ends"), [(True, True), (False, False)])
async def test_only_a_batch_gives_up_when_the_jobs_process_stays_away(
    settings: Settings, processes: Processes, monkeypatch: pytest.MonkeyPatch, *, with_jobs: bool, ends: bool
) -> None:
    monkeypatch.setattr(external, "POLL_S", 0.01)
    monkeypatch.setattr(external, "MISSING_S", 0.05)
    await processes.register(STAGES)
    async with ExternalStack(settings, needed=needed_stages(with_jobs=with_jobs)) as stack:
        failed = asyncio.ensure_future(stack.wait_failed())
        done, _ = await asyncio.wait({failed}, timeout=DEADLINE_S if ends else 0.3)
        assert bool(done) == ends
        if ends:
            assert "no process of jobs has been there" in str(failed.result())
        failed.cancel()
