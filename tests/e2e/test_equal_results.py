"""The default model in whole stacks: how a stack is cut up, and who drafts, shows in no token, logprob or character."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path

import pytest

from ops.stack import Stack
from pipeline.batch.lines import BatchLine, read_batch
from pipeline.client.asks import NewRequest
from tests.e2e.stacks import Result, results_of, running_stack

MODEL = "smollm2-135m-instruct"
EXAMPLES = Path(__file__).parents[2] / "examples" / "prompts.jsonl"
NUM_PROMPTS, MAX_TOKENS = 8, 16


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What one stack answered."""

    drafting: list[Result]
    plain: list[Result]
    other_seed: list[Result]


def example_requests() -> list[NewRequest]:
    """Some of the examples that people try first, with short answers and logprobs."""
    lines = [line for line in read_batch(BytesIO(EXAMPLES.read_bytes()), MODEL) if isinstance(line, BatchLine)]
    by_length = sorted(lines, key=lambda line: len(line.prompt or str(line.messages)))
    step = len(by_length) / (NUM_PROMPTS - 1)
    chosen = [by_length[min(round(number * step), len(by_length) - 1)] for number in range(NUM_PROMPTS)]
    return [
        NewRequest(
            MODEL,
            line.prompt,
            line.messages,
            line.params.model_copy(update={"max_tokens": MAX_TOKENS, "seed": 5, "logprobs": 2}),
        )
        for line in chosen
    ]


async def outcomes(stack: Stack, asks: Sequence[NewRequest]) -> Outcomes:
    """Everything at once, so that batches are mixed."""
    plain = [replace(ask, speculate=False) for ask in asks[:-1]]  # the last prompt is the longest by far
    sampled = [replace(ask, params=ask.params.model_copy(update={"temperature": 1.0, "seed": 6})) for ask in asks[:3]]
    results = await results_of(stack, [*asks, *plain, *sampled])
    first, second = len(asks), len(asks) + len(plain)
    return Outcomes(results[:first], results[first:second], results[second:])


@pytest.fixture(scope="module")
def one_of_each(caches: Path, real_model: Path) -> Outcomes:
    """Answers of a stack as people start it."""

    async def run() -> Outcomes:
        async with running_stack(caches, models={MODEL: real_model}) as stack:
            return await outcomes(stack, example_requests())

    return asyncio.run(run())


@pytest.fixture(scope="module")
def two_decoders_small_chunks(caches: Path, real_model: Path) -> Outcomes:
    """Answers of a stack with two decode processes, chunks a quarter as long, and little room in a batch."""

    async def run() -> Outcomes:
        settings = {"chunk_tokens": 64, "max_num_seqs": 3, "num_speculative_tokens": 7, "engine_threads": 1}
        async with running_stack(caches, {"decode": 2}, {MODEL: real_model}, **settings) as stack:
            return await outcomes(stack, example_requests())

    return asyncio.run(run())


def test_every_example_is_answered(one_of_each: Outcomes) -> None:
    for request, result in zip(example_requests(), one_of_each.drafting, strict=True):
        assert 1 <= len(result.token_ids) <= MAX_TOKENS
        assert result.finish_reason == ("length" if len(result.token_ids) == MAX_TOKENS else "stop")
        assert result.text
        assert not any(stop in result.text for stop in request.params.stop)
        assert result.logprobs is not None
        assert [entry.token_id for entry in result.logprobs] == list(result.token_ids)


def test_drafts_show_in_no_result(one_of_each: Outcomes) -> None:
    assert one_of_each.plain == one_of_each.drafting[: len(one_of_each.plain)]


def test_chunks_batches_and_processes_show_in_no_result(
    one_of_each: Outcomes, two_decoders_small_chunks: Outcomes
) -> None:
    assert two_decoders_small_chunks == one_of_each


def test_another_seed_gives_other_texts(one_of_each: Outcomes) -> None:
    first = one_of_each.drafting[: len(one_of_each.other_seed)]
    assert all(one.text != other.text for one, other in zip(first, one_of_each.other_seed, strict=True))
