"""Rows about the text: whatever way a request took, its tokens and logprobs are the same to the last bit."""

import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ops.chaos.asks import long_prompts, open_ends
from ops.chaos.damage import blobs_of, sealed
from ops.chaos.history import Seen
from ops.chaos.lab import CHUNK_TOKENS, Lab
from ops.chaos.processes import pids_of
from ops.chaos.row import Row
from ops.chaos.trial import Trial
from pipeline.client.asks import NewRequest
from pipeline.counters import KV_RECOMPUTED_TOKENS, REQUESTS_SENT_BACK, TOKENS_REPLAYED

LENGTHS = (*range(1, 2 * CHUNK_TOKENS + 2), 3 * CHUNK_TOKENS, 4 * CHUNK_TOKENS, 8 * CHUNK_TOKENS - 8)
FILLING = "The tide comes in, the tide goes out; "
OTHER_SEEDS = 1_000
DEEP_TOKENS = 400  # behind the first checkpoints
SENT_BACK_CHARS = 3200  # so many tokens of a real model that decode does not compute them itself when they are lost


@dataclass(frozen=True, slots=True)
class Way:
    """One way to the same text: what the stack is started with, and what happens to it."""

    name: str
    replicas: Mapping[str, int] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    strike: Callable[[Trial, Sequence[Seen]], Awaitable[None]] | None = None
    before: Callable[[Trial], None] | None = None
    counter: str | None = None
    """What must have been counted, or the way was not taken."""


async def f33(lab: Lab) -> None:
    """Prompts of every length around the edges of chunks."""
    asks = [lab.ask((FILLING * 20)[:length], 8, seed=length, temperature=0.8, logprobs=1) for length in LENGTHS]
    await lab.expected(asks)  # on a stack with chunks of 512 tokens
    async with lab.trial() as trial:
        trial.mark()
        trial.send(asks)
        await trial.judge(recovers=False)
        lab.note(f"prompts of 1 to {max(LENGTHS)} characters, chunks of {CHUNK_TOKENS} tokens")


async def f41(lab: Lab) -> None:
    """Every way to the same text, and other seeds as the control."""
    asks = [*open_ends(lab, 6), *long_prompts(lab, 2, SENT_BACK_CHARS, 40)]
    await lab.expected(asks)
    for way in _ways():
        async with lab.trial(way.replicas, **way.settings) as trial:
            trial.mark()
            if way.before is not None:
                way.before(trial)
            sent = trial.send(asks)
            if way.strike is not None:
                await way.strike(trial, sent)
            await trial.judge(sent, recovers=False)
            counted = await trial.counted()
            if way.counter is not None:
                lab.require(counted.get(way.counter), f"{way.name}: {way.counter} is 0, so this way was not taken")
            lab.note(f"{way.name} equal ({counted.get(TOKENS_REPLAYED, 0)} tokens replayed)")
    await _control(lab, asks[:6])


def _ways() -> list[Way]:
    small = {"chunk_tokens": 64}
    return [
        Way("cold, chunks of 256", settings={"chunk_tokens": 256}),
        Way("three decode processes, chunks of 64", {"decode": 3}, small | {"max_num_seqs": 2}),
        Way("sealed in prefill", settings=small | {"seal_in_prefill": True}),
        Way("zstd", settings=small | {"zstd_kv": True}),
        Way("blobs lost", settings=small, before=_stop_decode, strike=_lose_blobs, counter=KV_RECOMPUTED_TOKENS),
        Way("sent back to prefill", settings=small, before=_stop_decode, strike=_lose_all, counter=REQUESTS_SENT_BACK),
        Way("from a checkpoint", settings=small, strike=_kill_decode),
        Way("by replay", settings=small | {"keep_kv": False}, strike=_kill_decode, counter=TOKENS_REPLAYED),
    ]


async def _control(lab: Lab, asks: Sequence[NewRequest]) -> None:
    """Other seeds must give other texts, or equal ones would say nothing."""
    sampled = [ask for ask in asks if ask.params.temperature > 0]
    others = [replace(ask, params=ask.params.model_copy(update={"seed": _other(ask)})) for ask in sampled]
    same = sum(one == other for one, other in zip(await lab.expected(sampled), await lab.expected(others), strict=True))
    lab.require(not same, f"another seed changed nothing in {same} of {len(sampled)} requests")
    lab.note(f"other seeds differ in {len(sampled) - same} of {len(sampled)}")


def _other(ask: NewRequest) -> int:
    return (ask.params.seed or 0) + OTHER_SEEDS


def _stop_decode(trial: Trial) -> None:
    trial.strike("decode", number=signal.SIGSTOP)


async def _lose_blobs(trial: Trial, sent: Sequence[Seen]) -> None:
    """One blob of each request is lost."""
    await _lose(trial, sent, lambda number: number % 2 == 0)


async def _lose_all(trial: Trial, sent: Sequence[Seen]) -> None:
    """All blobs of all requests are lost."""
    await _lose(trial, sent, lambda _: True)


async def _lose(trial: Trial, sent: Sequence[Seen], chooses: Callable[[int], bool]) -> None:
    await sealed(trial, sent)
    for seen in sent:
        for number, blob in enumerate(blobs_of(trial.settings.pool_dir, seen)):
            if chooses(number):
                blob.unlink()
    trial.stopped.resume(pids_of(trial.stack)["decode"])


async def _kill_decode(trial: Trial, sent: Sequence[Seen]) -> None:
    await trial.tokens(DEEP_TOKENS, sent)
    trial.strike("decode")


ROWS = [
    Row("F33", "prompts of 1 to 2 chunks + 1 tokens, and multiples", "same text as without chunking", f33),
    Row(
        "F41",
        "every way to the same text",
        "equal tokens and logprobs; other seeds differ",
        f41,
        real=True,
        limit_s=900,
    ),
]
