"""Many things at once, their results in order: bounded work in flight, bounded results waiting.

Owns the two bounds. Knows nothing about what is worked on.

    items --feed--> at most `window` works in flight --> results wait for those before them --> take
                                                         at most KEPT_WINDOWS * window of them
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

KEPT_WINDOWS = 4  # one slow item lets this many windows go past it before it stops the rest

Item = TypeVar("Item")
Result = TypeVar("Result")


async def in_order(
    items: Iterable[Item],
    work: Callable[[Item], Awaitable[Result]],
    take: Callable[[Item, Result], None],
    window: int,
) -> None:
    """Work on all items and hand each result to `take`, in the order of the items.

    Raises:
        Exception: the first one that an item, a work or a take raised; the rest of the works are cancelled.
    """
    free = asyncio.Semaphore(window)
    waiting: asyncio.Queue[tuple[Item, asyncio.Task[Result]] | None] = asyncio.Queue(KEPT_WINDOWS * window)

    async def run(item: Item) -> Result:
        try:
            return await work(item)
        finally:
            free.release()

    async def feed() -> None:
        for item in items:
            await free.acquire()
            await waiting.put((item, group.create_task(run(item))))
        await waiting.put(None)

    async def drain() -> None:
        while (entry := await waiting.get()) is not None:
            item, task = entry
            take(item, await task)

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(feed())
            group.create_task(drain())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
