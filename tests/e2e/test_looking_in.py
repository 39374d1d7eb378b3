"""A stack one can look into: after 16 requests traces are complete, samples were taken, status finds everything."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from ops.stack import Stack, stage_environment
from pipeline.batch.results import Completion
from pipeline.boundaries import (
    CHUNK_COMPUTED,
    CHUNK_WRITTEN,
    COMPRESSOR_CLAIMED,
    DECODE_CLAIMED,
    FINISHED,
    FIRST_TOKEN,
    KV_LOADED,
    OF_A_CHUNK,
    PREFILL_CLAIMED,
    SEALED,
    SUBMITTED,
    TOKENIZED,
    TOKENIZER_CLAIMED,
)
from pipeline.connect import open_client
from pipeline.keys import Keys
from pipeline.messages import Failure, Terminal
from pipeline.samples import SampleLog
from pipeline.timeline import phases_us, spans, tpot_ms, ttft_ms
from pipeline.wire import unpack
from tests.e2e.stacks import DEADLINE_S, ask, running_stack
from tests.ops.trace_rules import check_trace

CHUNK_TOKENS, NUM_REQUESTS, MAX_TOKENS = 64, 16, 24
ORDER = (SUBMITTED, TOKENIZER_CLAIMED, TOKENIZED, PREFILL_CLAIMED, FIRST_TOKEN, DECODE_CLAIMED, KV_LOADED, FINISHED)
CHUNK_ORDER = (CHUNK_COMPUTED, CHUNK_WRITTEN, COMPRESSOR_CLAIMED, SEALED)
STAGE_OF = {
    TOKENIZER_CLAIMED: "tokenizer",
    TOKENIZED: "tokenizer",
    PREFILL_CLAIMED: "prefill",
    FIRST_TOKEN: "prefill",
    CHUNK_COMPUTED: "prefill",
    CHUNK_WRITTEN: "prefill",
    COMPRESSOR_CLAIMED: "compressor",
    SEALED: "compressor",
    DECODE_CLAIMED: "decode",
    KV_LOADED: "decode",
    FINISHED: "decode",
}


async def run_sluice(stack: Stack, *words: str) -> tuple[int, str, str]:
    """A command line with the settings of the stack."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ops.cli", *words),
        env=stage_environment(stack.settings),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    stdout, stderr = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert process.returncode is not None
    return process.returncode, stdout.decode(), stderr.decode()


async def answer_all(stack: Stack) -> dict[str, Completion]:
    """Requests of one to four chunks, all at once."""
    client = stack.client(stall_timeout_s=DEADLINE_S)
    asks = [ask(stack, "a tide " * (5 + 2 * number), MAX_TOKENS, ignore_eos=True) for number in range(NUM_REQUESTS)]
    answers = await stack.watched(_gathered(client, asks))
    assert all(isinstance(one.outcome, Completion) for one in answers)
    return {one.submitted.request_id: one.outcome for one in answers}


async def _gathered(client, asks):
    return await asyncio.gather(*(client.answer(one, "interactive") for one in asks))


def check_stamps(terminal: Terminal, consumers: dict[str, str]) -> None:
    """Every boundary once, in the order of a request's life, crossed by a process of the stage whose it is."""
    own = {stamp.boundary: stamp for stamp in terminal.stamps if stamp.boundary not in OF_A_CHUNK}
    assert len(own) + sum(stamp.boundary in OF_A_CHUNK for stamp in terminal.stamps) == len(terminal.stamps)
    assert set(own) == set(ORDER)
    times = [own[boundary].at_us for boundary in ORDER]
    assert times == sorted(times)
    assert terminal.usage is not None
    num_chunks = -(-terminal.usage.prompt_tokens // CHUNK_TOKENS)
    of_chunks = {(stamp.boundary, stamp.chunk): stamp for stamp in terminal.stamps if stamp.boundary in OF_A_CHUNK}
    assert set(of_chunks) == {(boundary, chunk) for boundary in OF_A_CHUNK for chunk in range(num_chunks)}
    for chunk in range(num_chunks):
        times = [of_chunks[boundary, chunk].at_us for boundary in CHUNK_ORDER]
        assert times == sorted(times)
        assert own[PREFILL_CLAIMED].at_us <= times[0] <= own[FIRST_TOKEN].at_us
        assert times[-1] <= own[DECODE_CLAIMED].at_us
    for stamp in terminal.stamps:
        if stamp.boundary != SUBMITTED:
            assert stamp.by is not None
            assert consumers[stamp.by] == STAGE_OF[stamp.boundary]


def check_durations(terminal: Terminal) -> None:
    at_us = {stamp.boundary: stamp.at_us for stamp in terminal.stamps}
    whole_us = at_us[FINISHED] - at_us[SUBMITTED]
    phases = phases_us(terminal.stamps)
    assert sum(phases.values()) == whole_us
    assert min(phases.values()) >= 0
    assert all(0 <= span.start_us <= span.end_us for span in spans(terminal.stamps))
    assert terminal.usage is not None
    ttft, tpot = ttft_ms(terminal.stamps), tpot_ms(terminal.stamps, terminal.usage.completion_tokens)
    assert ttft is not None
    assert tpot is not None
    assert ttft + tpot * (terminal.usage.completion_tokens - 1) == pytest.approx(whole_us / 1000)


async def test_sixteen_requests_can_be_followed_through_every_process(
    caches: Path, tiny_models: tuple[Path, Path], tmp_path: Path
) -> None:
    fields = {"model": str(tiny_models[0]), "chunk_tokens": CHUNK_TOKENS}
    async with running_stack(caches, {"decode": 2}, **fields) as stack:
        answered = await answer_all(stack)
        consumers = {process.consumer: process.stage for process in await stack.transport.processes()}
        ended = await stack.transport.finished(NUM_REQUESTS)
        assert {one.request_id for one in ended} == set(answered)
        for one in ended:
            terminal = unpack(one.terminal, Terminal)
            check_stamps(terminal, consumers)
            check_durations(terminal)

        target = tmp_path / "trace.json"
        code, _, stderr = await run_sluice(stack, "trace", "--last", str(NUM_REQUESTS), "-o", str(target))
        assert code == 0, stderr
        document = json.loads(target.read_text())
        check_trace(document)
        check_slices(document, answered)

        code, stdout, stderr = await run_sluice(stack, "status", "--json")
        assert code == 0, stderr
        status = json.loads(stdout)
        assert status["missing"] == []
        assert {row["stage"] for row in status["processes"]} == set(consumers.values())
        assert status["requests"]["lately"] == {"finished": NUM_REQUESTS, "failed": 0, "cancelled": 0}
        await samples_of(stack)


def check_slices(document: dict[str, list[dict]], answered: dict[str, Completion]) -> None:
    slices = [event for event in document["traceEvents"] if event["ph"] == "X"]
    names = {
        event["pid"]: event["args"]["name"] for event in document["traceEvents"] if event["name"] == "process_name"
    }
    decoded = [event for event in slices if event["name"] == "decode"]
    assert {event["args"]["request_id"] for event in decoded} == set(answered)
    assert {names[event["pid"]].partition(" (")[0] for event in decoded} == {"decode 1", "decode 2"}
    for event in decoded:
        done = answered[event["args"]["request_id"]]
        assert event["args"]["completion_tokens"] == len(done.token_ids) == MAX_TOKENS
        assert event["args"]["finish_reason"] == "length"
    text = json.dumps(document)
    assert "a tide" not in text
    assert all(done.text not in text for done in answered.values())


async def samples_of(stack: Stack) -> None:
    """The jobs process samples on its own."""
    client = open_client(stack.settings)
    try:
        log = SampleLog(client, "the stack", Keys(stack.settings.namespace))
        async with asyncio.timeout(DEADLINE_S):
            while len(found := await log.read(0, 2**55)) < 2:  # noqa: ASYNC110 - another process takes them
                await asyncio.sleep(0.05)
        assert {sample.kv_quota_bytes for sample in found} == {stack.settings.kv_pool_bytes}
    finally:
        await client.aclose()


async def test_a_request_that_was_refused_says_how_far_it_came(caches: Path, tiny_models: tuple[Path, Path]) -> None:
    async with running_stack(caches, model=str(tiny_models[0])) as stack:
        client = stack.client(stall_timeout_s=DEADLINE_S)
        answer = await stack.watched(client.answer(ask(stack, "x" * 2_000, 8), "interactive"))
        assert isinstance(answer.outcome, Failure)
        [one] = await stack.transport.finished(1)
    stamps = unpack(one.terminal, Terminal).stamps
    assert [stamp.boundary for stamp in stamps] == [SUBMITTED, TOKENIZER_CLAIMED, FINISHED]
    assert list(phases_us(stamps)) == ["queue_tokenizer", "tokenizer"]
