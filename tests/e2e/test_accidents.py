"""One stack of real processes on a tiny model, and what must not show in its results: kill -9 at any time."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kv_store.pool import FilePool
from ops.stack import Stack, stage_environment
from pipeline.client.asks import NewRequest
from pipeline.keys import PRIORITIES
from pipeline.messages import Delta
from tests.e2e.stacks import (
    DEADLINE_S,
    all_ready,
    ask,
    holds,
    num_restarts,
    pids_of,
    pool_of,
    results_of,
    running_stack,
)

ROOT = Path(__file__).parents[2]
LEASE_S = 1.0
NUM_TRIES = 5
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(caches: Path, tiny_models: tuple[Path, Path]) -> AsyncIterator[Stack]:
    async with running_stack(
        caches, model=str(tiny_models[0]), chunk_tokens=64, lease_s=LEASE_S, kv_pool_bytes=2 * 1024**2, engine_threads=1
    ) as stack:
        yield stack


def long_answers(stack: Stack) -> list[NewRequest]:
    """Requests that decode is busy with for seconds."""
    return [
        ask(stack, f"{number} and then " * number, 500, seed=number, temperature=0.8, logprobs=2, frequency_penalty=0.1)
        for number in range(1, 5)
    ]


def kill(stack: Stack, *names: str) -> None:
    pids = pids_of(stack)
    for name in names or pids:
        os.kill(pids[name], signal.SIGKILL)


async def test_decode_killed_in_mid_answer_changes_nothing(stack: Stack) -> None:
    asks = long_answers(stack)
    expected = await results_of(stack, asks)
    before, seen = num_restarts(stack)["decode"], 0

    def kill_once(delta: Delta) -> None:
        nonlocal seen
        seen += len(delta.token_ids)
        if seen >= 40 and not killed.is_set():
            kill(stack, "decode")
            killed.set()

    killed = asyncio.Event()
    results = asyncio.create_task(results_of(stack, asks, kill_once))
    await asyncio.wait_for(killed.wait(), DEADLINE_S)
    assert seen < sum(len(result.token_ids) for result in expected) / 2, "too late to interrupt anything"
    assert await results == expected
    await all_ready(stack)
    assert num_restarts(stack)["decode"] == before + 1


async def kill_in_mid_prompt(stack: Stack, pool: FilePool) -> bool:
    """Kill prefill as soon as its first chunk is there; whether that was before its last one."""
    await holds(lambda: bool(pool.names()))
    kill(stack, "prefill")
    return sum([await stack.transport.queue_length("prefill", priority) for priority in PRIORITIES]) == 1


async def test_prefill_killed_in_mid_prompt_changes_nothing(stack: Stack) -> None:
    one = ask(stack, "a long prompt, byte after byte " * 32, 20, temperature=0.8, logprobs=1)
    expected = await results_of(stack, [one])
    with pool_of(stack.settings) as pool:
        for _ in range(NUM_TRIES):
            results = asyncio.create_task(results_of(stack, [one]))
            interrupted = await kill_in_mid_prompt(stack, pool)
            assert await results == expected
            await all_ready(stack)
            if interrupted:
                return
    pytest.fail("prefill was always through with the prompt before it was killed")


async def test_all_stages_killed_at_once_lose_no_request(stack: Stack) -> None:
    asks = [ask(stack, f"request number {number}", 60, seed=number, temperature=0.8) for number in range(12)]
    expected = await results_of(stack, asks)
    first = asyncio.Event()
    results = asyncio.create_task(results_of(stack, asks, lambda _: first.set()))
    await asyncio.wait_for(first.wait(), DEADLINE_S)
    kill(stack)
    assert await results == expected
    await all_ready(stack)


async def test_a_process_that_would_compute_other_bits_refuses_to_start(
    stack: Stack, tiny_models: tuple[Path, Path]
) -> None:
    other_model = {"SLUICE_MODEL": str(tiny_models[1])}
    others = {("decode", "codec"): {"SLUICE_KV_CODEC": "raw"}}
    others |= {(stage, "model"): other_model for stage in ("tokenizer", "compressor")}
    processes = {
        (stage, part): await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            f"stages.{stage}",
            env=stage_environment(stack.settings) | variables,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for (stage, part), variables in others.items()
    }
    try:
        for (_, part), process in processes.items():
            output, _ = await asyncio.wait_for(process.communicate(), DEADLINE_S)
            assert process.returncode == 1, output
            assert f"this process has {part} ".encode() in output
            assert b"FingerprintMismatch" in output
            assert b"Traceback" not in output
    finally:
        for process in processes.values():
            if process.returncode is None:
                process.kill()
    one = ask(stack, "still here", 5)
    assert len((await results_of(stack, [one]))[0].token_ids) == 5


async def test_two_homes_at_once_do_not_meet(stack: Stack, caches: Path, tiny_models: tuple[Path, Path]) -> None:
    async with running_stack(
        caches, model=str(tiny_models[1]), chunk_tokens=64, kv_codec="raw", engine_threads=1
    ) as other:
        mine, theirs = ask(stack, "whose am I?", 30), ask(other, "whose am I?", 30)
        alternating = await asyncio.gather(*(results_of(s, [a] * 5) for s, a in ((stack, mine), (other, theirs))))
        assert [len(set(results)) for results in alternating] == [1, 1]
        assert alternating[0][0].token_ids != alternating[1][0].token_ids
        assert other.settings.redis_url != stack.settings.redis_url
        for one, another in ((stack, other), (other, stack)):
            # Those killed by the tests before are registered until that runs out.
            registered = {process.consumer.split(":")[-2] for process in await one.transport.processes()}
            assert registered >= {str(pid) for pid in pids_of(one).values()}
            assert registered.isdisjoint({str(pid) for pid in pids_of(another).values()})
