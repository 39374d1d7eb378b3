"""The results of many requests, as they end: a few turns at a time go round among all of them.

Owns the turns. Memory holds the ids, and one result a turn. A turn waits for the end only, and briefly where others
wait: so a request that has ended is noticed long before its results expire, whatever stands in front of it.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterable

from pipeline.batch.results import Completion
from pipeline.client.follow import BLOCK_S, ResultReader
from pipeline.client.patience import Patience
from pipeline.errors import StateDamaged, UnknownRequest, WireError
from pipeline.messages import Failure

NUM_TURNS = 64  # at a time
TURN_S = 0.25  # how long a turn is while others wait for theirs

Outcome = Completion | Failure


async def gather(
    reader: ResultReader, patience: Patience, request_ids: Iterable[str], num_turns: int = NUM_TURNS
) -> AsyncGenerator[tuple[str, Outcome]]:
    """Yield each id with what its request came to; one that cannot be read comes out as a Failure.

    Raises:
        ServerUnreachable: the server stayed away.
        Stalled: none of them ended for too long.
    """
    waiting = deque(dict.fromkeys(request_ids))
    turns: dict[asyncio.Task[Outcome | None], str] = {}
    waiting_since = patience.now()
    try:
        while waiting or turns:
            while waiting and len(turns) < num_turns:
                request_id = waiting.popleft()
                turns[asyncio.create_task(_turn(reader, request_id, TURN_S if waiting else BLOCK_S))] = request_id
            done, _ = await asyncio.wait(turns, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                request_id, outcome = turns.pop(task), task.result()
                if outcome is None:
                    patience.check(waiting_since, f"request {request_id} does not end")
                    waiting.append(request_id)
                    continue
                patience.moved()
                yield request_id, outcome
                waiting_since = patience.now()
    finally:
        for task in turns:
            task.cancel()
        await asyncio.gather(*turns, return_exceptions=True)


async def _turn(reader: ResultReader, request_id: str, block_s: float) -> Outcome | None:
    try:
        return await reader.collect(request_id) if await reader.has_ended(request_id, block_s) else None
    except (UnknownRequest, StateDamaged, WireError) as error:
        return Failure(stage="client", code=error.code, message=str(error), retryable=error.retryable)
