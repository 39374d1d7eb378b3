"""The load of the end-to-end benchmark: so many requests at a time, each followed to its end.

Owns what is kept of a request, and what makes an output a loop. Knows nothing about stacks or tables.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ops.bench.stamps import phases_ms
from ops.in_order import in_order
from pipeline.client.answers import Answer
from pipeline.client.asks import Ask, NewRequest
from pipeline.client.client import Client
from pipeline.errors import SluiceError
from pipeline.messages import ChatMessage, Delta
from pipeline.params import SamplingParams

LONGEST_PERIOD_TOKENS = 32  # of a loop: a sentence or a list entry
NUM_ROUNDS = 3  # said so often in a row, it is a loop and no coincidence


class LoadFailed(SluiceError):  # noqa: N818 - reads as the fact it states
    """A request of the load failed, so its pass has no figures."""

    retryable: ClassVar[bool] = True
    code: ClassVar[str] = "load_failed"


@dataclass(frozen=True, slots=True)
class Sample:
    """One request of a pass; times are the client's, phases those of the stamps."""

    prompt_tokens: int
    output_tokens: int
    draft_tokens: int
    accepted_tokens: int
    ttft_ms: float
    tpot_ms: float
    total_ms: float
    loops: bool
    phases_ms: dict[str, float]


@dataclass(frozen=True, slots=True)
class Pass:
    """All requests once."""

    wall_s: float
    samples: tuple[Sample, ...]


def asks_of(turns: Sequence[str], model: str, output_tokens: int, *, speculate: bool) -> list[Ask]:
    """Return a greedy request of exactly so many output tokens for each text, as a chat."""
    params = SamplingParams(temperature=0, seed=0, max_tokens=output_tokens, ignore_eos=True)
    return [NewRequest(model, None, (ChatMessage(role="user", content=turn),), params, speculate) for turn in turns]


async def run_pass(
    client: Client,
    asks: Sequence[Ask],
    concurrency: int,
    on_tokens: Callable[[int], None] = lambda _: None,
    on_sample: Callable[[Sample], None] = lambda _: None,
) -> Pass:
    """Run all requests, so many at a time.

    Raises:
        LoadFailed: one of them failed.
    """
    samples: list[Sample] = []

    def take(_: Ask, sample: Sample) -> None:
        samples.append(sample)
        on_sample(sample)

    started_at = time.monotonic()
    await in_order(asks, lambda ask: _sample(client, ask, on_tokens), take, concurrency)
    return Pass(time.monotonic() - started_at, tuple(samples))


async def _sample(client: Client, ask: Ask, on_tokens: Callable[[int], None]) -> Sample:
    token_ids: list[int] = []

    def take(delta: Delta) -> None:
        token_ids.extend(delta.token_ids)
        on_tokens(len(delta.token_ids))

    return _finished(await client.answer(ask, "interactive", take), token_ids)


def _finished(answer: Answer, token_ids: list[int]) -> Sample:
    terminal, timing = answer.terminal, answer.timing
    usage = terminal.usage
    if terminal.failure is not None or usage is None:
        problem = terminal.failure.message if terminal.failure else terminal.finish_reason
        raise LoadFailed(f"a request of the load failed: {problem}")
    return Sample(
        prompt_tokens=usage.prompt_tokens,
        output_tokens=len(token_ids),
        draft_tokens=usage.draft_tokens,
        accepted_tokens=usage.accepted_tokens,
        ttft_ms=timing.ttft_ms or 0.0,
        tpot_ms=timing.tpot_ms or 0.0,
        total_ms=1000 * (answer.ended_at - timing.started_at),
        loops=is_loop(token_ids),
        phases_ms=phases_ms(terminal.stamps),
    )


def is_loop(token_ids: Sequence[int]) -> bool:
    """Whether an output ends by saying the same again and again, which flatters any drafter."""
    for period in range(1, min(LONGEST_PERIOD_TOKENS, len(token_ids) // NUM_ROUNDS) + 1):
        # Short periods need as many tokens as the longest: three equal tokens alone are no loop.
        num_compared = max(NUM_ROUNDS * period, min(LONGEST_PERIOD_TOKENS, len(token_ids)))
        tail = token_ids[-num_compared:]
        if all(tail[index] == tail[index - period] for index in range(period, len(tail))):
            return True
    return False
