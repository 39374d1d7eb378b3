"""Rows about clients: gone in every state, too slow, too many at once."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ops.chaos.asks import long_answers, long_prompts, short_ones
from ops.chaos.history import Seen, holds, output_of
from ops.chaos.lab import Lab
from ops.chaos.processes import pids_of
from ops.chaos.remains import blobs_left, held_credits
from ops.chaos.row import Row
from ops.chaos.trial import TIMEOUT_S, Trial
from pipeline.messages import Failure

SLOW_CHUNK_S = 0.4
BACK_S = 1.0  # credits and memory, as soon as somebody who is alive sweeps
BUSY_S = 1.0  # on a machine that is busy
NUM_CANCELLED, NUM_TIMES = 300, 4
NUM_NORMAL = 50
POLL_S = 0.01
MAX_GROWTH_BYTES = 32 * 1024**2


@dataclass(frozen=True, slots=True)
class State:
    """A state in which a client leaves: how to keep a request in it, and how to see that it is there."""

    name: str
    stopped: str | None
    """The stage that is stopped meanwhile."""
    reached: Callable[[Trial, Seen], Awaitable[bool]]


async def f22(lab: Lab) -> None:
    """The client of a request leaves, whatever is being done for it."""
    states = (
        State("queued", "tokenizer", _in_stream("tokenizer")),
        State("mid-prefill", None, _has_blobs),
        State("compressing", "compressor", _has_blobs),
        State("queued for decode", "decode", _in_stream("decode")),
        State("mid-decode", None, _has_tokens),
    )
    async with lab.trial(fault=f"prefill.computed=delay:{SLOW_CHUNK_S}x*") as trial:
        trial.mark()
        for state in states:
            await _leave_in(trial, state)
        [unread] = trial.send(long_prompts(lab, 1, 100, 5))
        await trial.judge([unread], recovers=False)
        lab.require(
            await trial.redis.ttl(trial.keys.results(unread.request_id)) > 0, "unread: the result stays for ever"
        )


async def f27(lab: Lab) -> None:
    """One client reads a token a second, one never reads, and fifty are as usual."""
    usual = short_ones(lab, NUM_NORMAL, 40)
    slow, unread = lab.ask("slowly", 20, seed=7, temperature=0.8), lab.ask("never", 300, seed=8, temperature=0.8)
    await lab.expected([*usual, slow, unread])
    async with lab.trial() as trial:
        trial.mark()
        before = await trial.server.memory_bytes()
        trial.history.send([slow], token_s=1.0)
        never = await trial.stack.client().submit(unread)
        began_at = time.monotonic()
        sent = trial.send(usual)
        await trial.ended(sent)
        lab.note(f"{len(sent)} usual ones in {time.monotonic() - began_at:.1f} s")
        grown = await trial.server.memory_bytes() - before
        lab.note(f"the server grew by {grown / 1024**2:.1f} MiB")
        lab.require(grown < MAX_GROWTH_BYTES, f"the server grew by {grown} bytes")
        late = Seen(unread, never.request_id, began_at, accepted_at=began_at)
        trial.history.resume([late])  # it was written in full for whoever comes after all
        await trial.judge(recovers=False)


async def f38(lab: Lab) -> None:
    """Hundreds are cancelled at once, again and again; then one request comes."""
    asks = [*long_prompts(lab, 4, 300), *long_answers(lab, 4)]
    [probe] = short_ones(lab, 1)
    await lab.expected([probe])
    async with lab.trial() as trial:
        trial.mark()
        client = trial.stack.client()
        for _ in range(NUM_TIMES):
            ids = [
                submitted.request_id
                async for submitted in client.enqueue_many(asks[index % 8] for index in range(NUM_CANCELLED))
            ]
            outcomes = await client.cancel_many(ids)
            num_cancelled = list(outcomes.values()).count("cancelled")
            lab.require(num_cancelled > NUM_CANCELLED / 2, f"only {num_cancelled} of {NUM_CANCELLED} were cancelled")
        began_at = time.monotonic()
        await trial.judge_remains()  # before there is new work
        lab.note(f"nothing was left {time.monotonic() - began_at:.1f} s after the last of {NUM_TIMES * NUM_CANCELLED}")
        await trial.judge(trial.send([probe]), recovers=False)


async def _leave_in(trial: Trial, state: State) -> None:
    """Cancel a request in a state; its entry says so, and nothing is done or held for it any more."""
    lab = trial.lab
    pid = None if state.stopped is None else pids_of(trial.stack)[state.stopped]
    if pid is not None:
        trial.stopped.stop(pid)
    [seen] = trial.send(long_prompts(lab, 1, 800, 200))
    await trial.accepted([seen])
    deadline = time.monotonic() + TIMEOUT_S
    while not await state.reached(trial, seen):
        if seen.is_over or time.monotonic() > deadline:
            lab.blame([f"{state.name}: the request was never in this state"])
            return
        await asyncio.sleep(POLL_S)
    await trial.stack.client().cancel(seen.request_id)
    cancelled_at = time.monotonic()
    await trial.ended([seen])
    outcome = output_of(seen)
    lab.require(isinstance(outcome, Failure) and outcome.code == "cancelled", f"{state.name}: ended as {outcome}")
    lab.require(not await held_credits(trial.redis, trial.keys), f"{state.name}: the credit did not end with it")
    if pid is not None and state.stopped != "decode":
        trial.stopped.resume(pid)  # decode stays: whoever else is there clears up
    await holds(
        lambda: not blobs_left(trial.settings), TIMEOUT_S, lambda: f"{state.name}: {blobs_left(trial.settings)}"
    )
    back_s = time.monotonic() - cancelled_at
    lab.note(f"{state.name}: memory back after {back_s:.1f} s")
    most_s = BACK_S + BUSY_S + (SLOW_CHUNK_S if state.name == "mid-prefill" else 0.0)
    lab.require_soon(
        back_s <= most_s, f"{state.name}: memory was back after {back_s:.1f} s, and {most_s:.1f} s are the most"
    )
    if pid is not None:
        trial.stopped.resume(pid)
    await trial.judge_remains()


def _in_stream(stage: str) -> Callable[[Trial, Seen], Awaitable[bool]]:
    async def reached(trial: Trial, _: Seen) -> bool:
        return await trial.queue_length(stage) > 0

    return reached


async def _has_blobs(trial: Trial, seen: Seen) -> bool:
    return bool(blobs_left(trial.settings)) and not seen.deltas


async def _has_tokens(_: Trial, seen: Seen) -> bool:
    return seen.num_tokens > 1


ROWS = [
    Row("F22", "the client gone in every state of its request", "work stops; credits and memory are back soon", f22),
    Row("F27", "one client reads a token a second, one never", "fifty others are unchanged; memory is bounded", f27),
    Row("F38", "300 requests cancelled at once, four times", "nothing is left without new work; a probe finishes", f38),
]
