"""Rows about what lies in queues: batches under fire, a message that kills whoever takes it, and no message at all."""

import asyncio
import json
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
from redis.asyncio import Redis

from kv_store.pool import FilePool
from ops.chaos import deadly
from ops.chaos.asks import SAMPLED_TEMPERATURE, long_answers
from ops.chaos.deadly import DEADLY
from ops.chaos.history import Seen
from ops.chaos.lab import Lab
from ops.chaos.launchers import write_procfile
from ops.chaos.processes import pids_of, ready_pids
from ops.chaos.row import Row
from ops.chaos.trial import TIMEOUT_S, Trial
from pipeline.batch.options import served_name
from pipeline.client.asks import NewRequest
from pipeline.client.batches import Batches
from pipeline.keys import MAX_DELIVERIES, POOLED_STAGES, STAGES
from pipeline.wire import MAX_BYTES, SCHEMA_VERSION

NUM_LINES, LONG_NUM_LINES = 500, 20_000
KILL_EVERY_S, LONG_KILLING_S = 2.0, 120.0
KILLING_S = 15.0
NUM_COMPARED = 24
NUM_BESIDES = 6
HUGE_BYTES = 100 * 1024**2


async def f6(lab: Lab) -> None:
    """Random stages are killed while a batch runs."""
    num_lines = LONG_NUM_LINES if lab.long else NUM_LINES
    killing_s = LONG_KILLING_S if lab.long else KILLING_S
    asks = [_line_ask(lab, index) for index in range(NUM_COMPARED)]
    expected = await lab.expected(asks)
    async with lab.trial() as trial:
        source, target = trial.settings.home / "in.jsonl", trial.settings.home / "out.jsonl"
        await asyncio.to_thread(_write_lines, lab, source, num_lines)
        async with Batches(trial.stack.transport, trial.settings) as batches:
            killing = asyncio.create_task(_kill_at_random(trial, killing_s))
            began_at = time.monotonic()
            await trial.stack.watched(batches.run(source, target, model=trial.settings.model))
            wall_s = time.monotonic() - began_at
            killing.cancel()
            await asyncio.gather(killing, return_exceptions=True)
        records = [json.loads(line) for line in target.read_text("utf-8").splitlines()]
        names = [record["custom_id"] for record in records]
        lab.note(f"{len(set(names))} of {num_lines} lines in {wall_s:.0f} s, {len(trial.deaths.all)} processes killed")
        lab.require(len(names) == len(set(names)), f"{len(names) - len(set(names))} lines came out twice")
        lab.require(len(set(names)) == num_lines, f"{num_lines - len(set(names))} lines are missing")
        lab.require(trial.deaths.all, "nobody was killed")
        by_name = {record["custom_id"]: record for record in records}
        for index, output in enumerate(expected):
            choice = by_name[f"line-{index}"]["response"]["body"]["choices"][0]
            lab.require(tuple(choice["token_ids"]) == output.token_ids, f"line-{index} has other tokens")
        await trial.judge_remains()


async def f21(lab: Lab) -> None:
    """A message takes down every process that reads it; others wait right behind it, and come after it."""
    besides = long_answers(lab, NUM_BESIDES, 40)
    await lab.expected(besides)
    for stage in ("tokenizer", "prefill", "decode"):
        poison = replace(lab.ask("a prompt that nobody survives", 20), request_id=f"{DEADLY}{stage}")
        async with lab.home() as settings:
            procfile = write_procfile(settings.home / "Procfile", deadly, {stage})
            async with lab.trial_in(settings, procfile=procfile) as trial:
                trial.mark()
                trial.may_die = True
                pid = pids_of(trial.stack)[stage]
                trial.stopped.stop(pid)  # so that all of them lie there when it goes on, the poison first
                [poisoned] = await _queued(trial, stage, [poison], 1)
                sent = await _queued(trial, stage, besides, 1 + len(besides))
                trial.stopped.resume(pid)
                await trial.ended([poisoned])
                sent += trial.send(besides)
                failure = poisoned.failure
                num_deaths, num_dead = _num_kills(trial, stage), await _num_dead(trial, stage)
                lab.note(f"{stage}: {failure.code if failure else None} after {num_deaths} deaths")
                lab.require(failure is not None, f"{stage}: the poison has no failure: {poisoned.error}")
                lab.require(num_deaths == MAX_DELIVERIES, f"{stage}: {num_deaths} deaths and not {MAX_DELIVERIES}")
                lab.require(num_dead == 1, f"{stage}: {num_dead} dead letters and not 1")
                await trial.judge(sent, recovers=False)


async def f34(lab: Lab) -> None:
    """Entries that are no messages of ours lie in every stream, among real ones."""
    asks = long_answers(lab, 4, 40)
    await lab.expected(asks)
    async with lab.trial() as trial:
        trial.mark()
        with FilePool.open(trial.settings.pool_dir, trial.settings.kv_pool_bytes) as pool:
            pool_id = pool.pool_id
        wanted = 1 + sum(1 for _ in _strange_payloads())
        # A client of its own: so many bytes take longer than an answer may.
        async with Redis.from_url(str(trial.settings.redis_url), protocol=2, socket_timeout=TIMEOUT_S) as client:
            for stage in STAGES:
                stream = trial.keys.stream(stage, "interactive", pool_id if stage in POOLED_STAGES else None)
                for payload in _strange_payloads():
                    await client.xadd(stream, {"p": payload})
                await client.xadd(stream, {"q": b"no payload at all"})
                trial.send(asks)
                await trial.until_so(partial(_has_dead, trial, stage, wanted), f"{stage} has not {wanted} dead letters")
        await trial.judge(recovers=False)
        lab.note(f"{wanted} strange entries for each of {len(STAGES)} stages, one of {HUGE_BYTES >> 20} MiB")


def _line_ask(lab: Lab, index: int) -> Any:
    return lab.ask(f"line {index}", 8 + index % 8, seed=index, temperature=SAMPLED_TEMPERATURE * (index % 2))


def _write_lines(lab: Lab, path: Path, number: int) -> None:
    model = served_name(str(lab.models.served))
    with path.open("w", encoding="utf-8") as file:
        for index in range(number):
            ask = _line_ask(lab, index)
            body = {
                "model": model,
                "prompt": ask.prompt,
                "max_tokens": ask.params.max_tokens,
                "seed": ask.params.seed,
                "temperature": ask.params.temperature,
            }
            line = {"custom_id": f"line-{index}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")


async def _kill_at_random(trial: Trial, for_s: float) -> None:
    generator = random.Random(0)  # noqa: S311 - the same order each time, not a secret
    ends_at = time.monotonic() + for_s
    while time.monotonic() < ends_at:
        await asyncio.sleep(generator.uniform(0.5, 1.5) * KILL_EVERY_S)
        ready = sorted(name for name in ready_pids(trial.stack) if name in STAGES)
        if ready:
            trial.strike(generator.choice(ready), number=signal.SIGKILL)


async def _queued(trial: Trial, stage: str, asks: Sequence[NewRequest], number: int) -> list[Seen]:
    """Send requests and return when `number` lie in front of a stage."""
    sent = trial.send(asks)
    await trial.accepted(sent)

    async def arrived() -> bool:
        return await trial.queue_length(stage) >= number

    await trial.until_so(arrived, f"{number} requests did not arrive at {stage}")
    return sent


def _num_kills(trial: Trial, stage: str) -> int:
    """How often a stage's process was ready and died: each start says so in its log, and the last one lives."""
    return trial.log(stage).count('"stage_ready"') - 1


async def _num_dead(trial: Trial, stage: str) -> int:
    return await trial.redis.xlen(trial.keys.dead(stage))


async def _has_dead(trial: Trial, stage: str, number: int) -> bool:
    return await _num_dead(trial, stage) == number


def _strange_payloads() -> Iterator[bytes]:
    yield b"\xc1 is never msgpack"
    yield b""
    yield msgpack.packb([SCHEMA_VERSION + 1, 0, b"\x80"]) or b""
    yield msgpack.packb([SCHEMA_VERSION, 0, msgpack.packb({"kind": "nothing we know"})]) or b""
    assert HUGE_BYTES > MAX_BYTES
    yield bytes(HUGE_BYTES)


ROWS = [
    Row("F6", "random stages killed while a batch runs", "every line once", f6),
    Row("F21", "a message that kills whoever takes it", "dead letter and terminal error; others unaffected", f21),
    Row("F34", "entries that are no messages, one of 100 MB", "dead letters; no crash loop", f34),
]
