"""Sending requests: one through a door that may be closed for a while, or many, a few at a time.

Owns the wait for the door. Knows nothing about results.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Iterable
from typing import Any, TypeVar

from pipeline.client.arguments import check_timeout
from pipeline.client.asks import Ask, Submitted, check_new_id, check_priority, new_request, packed
from pipeline.client.errors import QueueFull
from pipeline.client.patience import Patience
from pipeline.keys import Priority
from pipeline.transport import Admission, Busy, Exists, Transport

QUEUE_TIMEOUT_S = 300.0  # a queue that is full for longer has no room for this request today

T = TypeVar("T")


async def submit(
    transport: Transport, patience: Patience, ask: Ask, priority: Priority, request_id: str, queue_timeout_s: float
) -> Submitted:
    """Admit a request; wait for up to queue_timeout_s while the queue is full. Its own time begins after that.

    Raises:
        InvalidRequest: the id, the priority or the time is wrong, or the request too large for any stage.
        QueueFull: there was no room.
        ServerUnreachable: the server stayed away; the request may have been accepted.
    """
    check_priority(priority)
    check_new_id(request_id)
    check_timeout(queue_timeout_s)
    request = new_request(ask, priority, request_id)
    payload, started_at = packed(request), patience.now()

    async def admit() -> Admission:
        return await transport.admit(request_id, priority, payload, request.attempt, ask.timeout_s)

    while isinstance(admission := await patience.call(admit), Busy):
        waited_s = patience.now() - started_at
        if waited_s >= queue_timeout_s:
            raise QueueFull(request_id, waited_s)
        await asyncio.sleep(min(admission.retry_after_s, queue_timeout_s - waited_s))
    patience.moved()
    assert request.params.seed is not None
    created_s = request.stamps[0].at_us // 1_000_000
    return Submitted(request_id, request.params.seed, created_s, started_at, isinstance(admission, Exists))


async def one_after_the_other(calls: Iterable[Coroutine[Any, Any, T]], num_at_a_time: int) -> AsyncGenerator[T]:
    """Yield the results of calls in their order, with so many under way; the rest is cancelled when one fails."""
    under_way: deque[asyncio.Task[T]] = deque()
    try:
        for call in calls:
            under_way.append(asyncio.create_task(call))
            if len(under_way) == num_at_a_time:
                yield await under_way.popleft()
        while under_way:
            yield await under_way.popleft()
    finally:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
