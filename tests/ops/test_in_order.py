"""Work at once, results in order, within both bounds."""

import asyncio

import pytest

from ops.in_order import KEPT_WINDOWS, in_order


async def test_results_come_in_the_order_of_the_items_however_long_each_takes() -> None:
    taken: list[tuple[int, int]] = []

    async def work(item: int) -> int:
        for _ in range(50 - item):
            await asyncio.sleep(0)
        return item * 10

    await in_order(range(50), work, lambda item, result: taken.append((item, result)), window=7)
    assert taken == [(item, item * 10) for item in range(50)]


async def test_no_more_than_the_window_is_in_flight() -> None:
    running, most = 0, 0

    async def work(_: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    await in_order(range(40), work, lambda *_: None, window=5)
    assert most == 5


async def test_slow_first_item_does_not_let_results_pile_up() -> None:
    first = asyncio.Event()
    num_started = 0

    async def work(item: int) -> None:
        nonlocal num_started
        num_started += 1
        if item == 0:
            await first.wait()

    task = asyncio.create_task(in_order(range(1000), work, lambda *_: None, window=3))
    for _ in range(2000):
        await asyncio.sleep(0)
    assert num_started <= (KEPT_WINDOWS + 1) * 3
    first.set()
    await asyncio.wait_for(task, 10)
    assert num_started == 1000


async def test_first_error_ends_everything() -> None:
    cancelled: list[int] = []

    async def work(item: int) -> None:
        if item == 2:
            raise ValueError("two")
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            cancelled.append(item)
            raise

    with pytest.raises(ValueError, match="two"):
        await in_order(range(10), work, lambda *_: None, window=4)
    assert sorted(cancelled) == [0, 1, 3]


async def test_error_of_the_taker_is_raised() -> None:
    async def work(item: int) -> int:
        return item

    def take(_: int, result: int) -> None:
        raise OSError(f"disk full at {result}")

    with pytest.raises(OSError, match="disk full at 0"):
        await in_order(range(3), work, take, window=2)


async def test_nothing_to_do_is_done_at_once() -> None:
    async def work(_: int) -> None:
        raise AssertionError

    await in_order([], work, lambda *_: None, window=2)
