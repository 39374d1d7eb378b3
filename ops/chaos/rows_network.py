"""Rows about the way between stages and their server: answers lost, late or crossed, and a stage that is cut off."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from ops.chaos.asks import long_answers, long_prompts, short_ones
from ops.chaos.lab import LEASE_S, Lab
from ops.chaos.processes import extra_stage, registered
from ops.chaos.proxy import Proxy
from ops.chaos.row import Row
from ops.chaos.trial import Trial
from ops.outputs import Output
from ops.server.valkey import EmbeddedValkey
from pipeline.batch.results import Completion

LOSE_EVERY = 25
MIN_LOST = 20
LATE_S = 0.1
NUM_CALLS = 300
MANY_TOKENS = 100
CUT_S, LONG_CUT_S = 6 * LEASE_S, 30.0


async def f14(lab: Lab) -> None:
    """Answers are lost after the server did what it was asked."""
    asks = [*long_answers(lab, 4, 120), *long_prompts(lab, 4), *short_ones(lab, 40)]
    await lab.expected(asks)
    async with _trial_behind_proxy(lab) as (trial, proxy):
        proxy.lose_answer(_every(LOSE_EVERY, lambda head: b"EVAL" in head[:32]), times=10_000)
        trial.mark()
        sent = trial.send(asks)
        await trial.ended(sent)
        proxy.open()
        await trial.judge(recovers=False)
        lab.note(f"{proxy.num_lost} answers lost of {proxy.num_lost + proxy.num_answers}")
        lab.require(proxy.num_lost >= MIN_LOST, f"only {proxy.num_lost} answers were lost")


async def f15(lab: Lab) -> None:
    """Answers come late, and whoever waits for them is cancelled."""
    asks = short_ones(lab, 12)
    expected = await lab.expected(asks)
    generator = random.Random(0)  # noqa: S311 - the same delays each time, not a secret
    async with _trial_behind_proxy(lab) as (trial, proxy):
        proxy.delay_s = lambda: generator.uniform(0.0, LATE_S)
        trial.mark()
        sent = trial.send(asks)
        await trial.judge(sent, recovers=False)
        client = trial.stack.client()
        transport = client.transport
        num_cancelled = 0
        crossed: list[str] = []
        for number in range(NUM_CALLS):
            index = generator.randrange(len(sent))
            if number % 2:
                # A read, which goes on for others, and a command, whose connection nobody else may have after that.
                result, command = client.result(sent[index].request_id), transport.finished(len(asks))
                calls = {asyncio.create_task(result), asyncio.create_task(command)}
                await asyncio.wait(calls, timeout=generator.uniform(0.0, LATE_S))
                num_cancelled += sum(call.cancel() for call in calls)
                await asyncio.gather(*calls, return_exceptions=True)
                continue
            outcome, num_entries = await asyncio.gather(
                client.result(sent[index].request_id), transport.queue_length("tokenizer", "interactive")
            )
            if num_entries != 0:
                crossed.append(f"asked for the length of a queue that is empty, and got {num_entries!r}")
            if not isinstance(outcome, Completion) or Output.of(outcome) != expected[index]:
                crossed.append(f"the result of {sent[index].request_id} is another one's")
        lab.note(f"{num_cancelled} of {NUM_CALLS} calls cancelled while they waited")
        lab.blame(crossed[:4])
        lab.require(num_cancelled > NUM_CALLS / 10, f"only {num_cancelled} calls were cancelled")


async def f16(lab: Lab) -> None:
    """A decode process is cut off while it has requests: once in silence, once with closed connections."""
    cut_s = LONG_CUT_S if lab.long else CUT_S
    asks = long_answers(lab, 6, 400)
    await lab.expected(asks)
    async with (
        lab.trial(max_num_seqs=3) as trial,
        Proxy(str(trial.settings.redis_url), trial.settings.home / "p.sock") as proxy,
        extra_stage(trial.stack, "decode", SLUICE_REDIS_URL=proxy.url) as extra,
    ):
        await registered(trial.stack, extra.pid)
        for how in (proxy.freeze, proxy.cut):
            sent = trial.send(asks)
            await trial.tokens(MANY_TOKENS, sent)
            trial.mark()
            how()
            await asyncio.sleep(cut_s)  # the fault is the time itself
            proxy.open()
            await trial.judge(sent)
        log = trial.log("decode-extra")
        refused = log.count('"lease_lost"') + log.count('"request_dropped"')
        lab.note(f"cut off twice for {cut_s:g} s; it was refused {refused} times")
        lab.require(refused, "the process that was cut off never learned that its work was gone")


@asynccontextmanager
async def _trial_behind_proxy(lab: Lab) -> AsyncIterator[tuple[Trial, Proxy]]:
    """Run a stack and its client behind a proxy; only the judge asks the server itself."""
    async with lab.home() as settings:
        server = EmbeddedValkey(settings.home)
        url = await server.start()
        try:
            async with (
                Proxy(url, settings.home / "p.sock") as proxy,
                lab.trial_in(settings.model_copy(update={"redis_url": proxy.url}), judge_url=url) as trial,
            ):
                yield trial, proxy
        finally:
            await server.stop()


def _every(number: int, chooses: Callable[[bytes], bool]) -> Callable[[bytes], bool]:
    num_chosen = 0

    def choose(head: bytes) -> bool:
        nonlocal num_chosen
        num_chosen += chooses(head)
        return chooses(head) and num_chosen % number == 0

    return choose


ROWS = [
    Row("F14", "answers lost after the command was done", "no duplicate entry; claims are found again", f14),
    Row("F15", "answers late, and calls cancelled while they wait", "answers never cross", f15),
    Row("F16", "a stage cut off from the server for long", "taken over, then refused when it returns", f16),
]
