"""What requests come to where nothing goes wrong: the oracle that every row is compared with.

Owns a quiet stack for each model, with other choices than the rows make: no drafts, and prompts in one piece wherever
they fit. Tokens and logprobs do not depend on such choices, so one run of a request is right for all rows.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, ClassVar, Self

from ops.chaos.homes import new_home
from ops.external import JOBS
from ops.outputs import Output
from ops.stack import Stack
from pipeline.batch.results import Completion
from pipeline.client.answers import Answer
from pipeline.client.asks import NewRequest
from pipeline.errors import SluiceError
from pipeline.settings import Settings

CHUNK_TOKENS = 512


class ReferenceFailed(SluiceError):  # noqa: N818 - reads as the fact it states
    """A request failed although nothing went wrong, so there is nothing to compare with."""

    retryable: ClassVar[bool] = True
    code: ClassVar[str] = "reference_failed"


class Reference:
    """Runs each request once, on a stack that is started when it is first needed; use it in an `async with`."""

    def __init__(self, base: Settings) -> None:
        self._base = base
        self._stacks: dict[str, Stack] = {}
        self._outputs: dict[str, Output] = {}
        self._exit = AsyncExitStack()
        self._one_at_a_time = asyncio.Lock()

    async def outputs(self, asks: Sequence[NewRequest]) -> list[Output]:
        """Return the output of each request, in their order; all are of one model.

        Raises:
            ReferenceFailed: one failed.
        """
        async with self._one_at_a_time:
            missing = {_key(ask): ask for ask in asks if _key(ask) not in self._outputs}
            if missing:
                stack = await self._stack(asks[0].model)
                client = stack.client()
                plain = [replace(ask, speculate=False, request_id=None) for ask in missing.values()]
                answers = await stack.watched(_gathered([client.answer(ask) for ask in plain]))
                for key, answer in zip(missing, answers, strict=True):
                    if not isinstance(answer.outcome, Completion):
                        failure = answer.outcome
                        raise ReferenceFailed(f"without faults, a request failed in {failure.stage}: {failure.message}")
                    self._outputs[key] = Output.of(answer.outcome)
        return [self._outputs[_key(ask)] for ask in asks]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exit.aclose()

    async def _stack(self, model: str) -> Stack:
        if model not in self._stacks:
            home = new_home(self._base, model=model, chunk_tokens=CHUNK_TOKENS)
            self._stacks[model] = await self._exit.enter_async_context(Stack(self._exit.enter_context(home), {JOBS: 0}))
        return self._stacks[model]


async def _gathered(answers: Iterable[Coroutine[Any, Any, Answer]]) -> list[Answer]:
    return await asyncio.gather(*answers)


def _key(ask: NewRequest) -> str:
    """All that the output depends on."""
    return "\n".join((ask.model, repr(ask.prompt), repr(ask.messages), ask.params.model_dump_json()))
