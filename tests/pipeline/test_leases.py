"""Leases are renewed while the work moves, and the process is told to stop by signals."""

import asyncio
import os
import signal
from collections.abc import Sequence

import pytest

from pipeline.errors import ServerUnreachable
from pipeline.leases import HANG_TICKS, RENEWALS_PER_LEASE, LeaseKeeper, stop_on_signals
from pipeline.memory import MemoryQueues, MemoryTransport
from pipeline.transport import Delivery, TransportOptions
from tests.pipeline.benches import soon

LEASE_S = 10.0


class HandClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Bench:
    """One consumer with a keeper, another one that waits for its leases to end; one clock."""

    def __init__(self) -> None:
        self.clock = HandClock()
        self.lost: list[Delivery] = []
        self.num_hung = 0
        queues = MemoryQueues(monotonic=self.clock)
        self.mine = MemoryTransport(queues, TransportOptions("mine", lease_s=LEASE_S))
        self.other = MemoryTransport(queues, TransportOptions("other", lease_s=LEASE_S))
        self.keeper = LeaseKeeper(self.mine, LEASE_S, self.lost.append, self._on_hung)

    def _on_hung(self) -> None:
        self.num_hung += 1

    async def tick(self, times: int = 1, *, moving: bool = False) -> None:
        """Let the keeper renew so often, in its own time, while the work moves or not."""
        for _ in range(times):
            self.clock.now_s += LEASE_S / RENEWALS_PER_LEASE
            if moving:
                self.keeper.progressed()
            await self.keeper.renew()

    async def held(self, request_id: str = "r") -> Delivery:
        await self.mine.admit(request_id, "batch", b"work")
        (delivery,) = await self.mine.receive("tokenizer", 1, block_s=0)
        self.keeper.hold(delivery)
        return delivery

    async def taken_over(self) -> int:
        return len(await self.other.receive("tokenizer", 10, block_s=0))


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_what_is_held_is_renewed(bench: Bench) -> None:
    await bench.held()
    for _ in range(10):
        bench.clock.now_s += LEASE_S / 2
        await bench.keeper.renew()
    assert await bench.taken_over() == 0


async def test_what_is_dropped_is_left_to_its_lease(bench: Bench) -> None:
    kept, dropped = await bench.held("r"), await bench.held("s")
    bench.keeper.drop(dropped)
    bench.keeper.drop(dropped)
    bench.clock.now_s += LEASE_S / 2
    await bench.keeper.renew()
    bench.clock.now_s += LEASE_S / 2
    assert await bench.taken_over() == 1
    assert bench.keeper.holds(kept)
    assert not bench.keeper.holds(dropped)


async def test_a_lost_lease_is_reported_once(bench: Bench) -> None:
    delivery = await bench.held()
    bench.clock.now_s += LEASE_S
    assert await bench.taken_over() == 1
    for _ in range(2):
        await bench.keeper.renew()
    assert bench.lost == [delivery]
    assert not bench.keeper.holds(delivery)


async def test_work_that_stands_still_is_given_up(bench: Bench) -> None:
    await bench.held()
    await bench.tick(HANG_TICKS)
    assert await bench.taken_over() == 0
    await bench.tick(RENEWALS_PER_LEASE)
    assert await bench.taken_over() == 1
    assert bench.lost == []
    await bench.tick(moving=True)  # it wakes up, and learns that its work is gone
    assert len(bench.lost) == 1


async def test_slow_work_that_moves_is_kept(bench: Bench) -> None:
    await bench.held()
    for _ in range(10):
        await bench.tick(HANG_TICKS - 1)
        await bench.tick(moving=True)
    assert await bench.taken_over() == 0
    assert bench.num_hung == 0


async def test_idle_time_is_not_a_hang(bench: Bench) -> None:
    await bench.tick(10 * HANG_TICKS)
    delivery = await bench.held()
    await bench.tick(HANG_TICKS)
    assert await bench.taken_over() == 0
    bench.keeper.drop(delivery)
    await bench.tick(10 * HANG_TICKS)
    assert bench.num_hung == 0


async def test_a_hang_that_nobody_should_wait_for_is_told_once(bench: Bench) -> None:
    await bench.held()
    await bench.tick(2 * HANG_TICKS)
    assert bench.num_hung == 0
    await bench.tick()
    assert bench.num_hung == 1
    await bench.tick(5 * HANG_TICKS)
    await bench.tick(moving=True)
    await bench.tick(5 * HANG_TICKS)
    assert bench.num_hung == 1


async def test_work_that_moves_again_is_not_told_of_as_a_hang(bench: Bench) -> None:
    await bench.held()
    await bench.tick(2 * HANG_TICKS)
    await bench.tick(moving=True)
    await bench.held("s")
    await bench.tick(HANG_TICKS)
    assert bench.num_hung == 0


async def test_a_process_that_was_stopped_and_continued_is_not_hung(bench: Bench) -> None:
    """As after SIGSTOP and SIGCONT: the clock has jumped, and nothing ran meanwhile, the keeper included."""
    delivery = await bench.held()
    for _ in range(HANG_TICKS - 1):
        bench.clock.now_s += 100 * LEASE_S
        await bench.tick()
    assert bench.num_hung == 0
    assert bench.lost == []  # nobody else asked
    await bench.tick(moving=True)
    assert await bench.taken_over() == 0
    assert bench.keeper.holds(delivery)


async def test_a_server_that_is_away_for_long_does_not_make_the_work_hung(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    delivery = await bench.held()

    async def unreachable(deliveries: Sequence[Delivery]) -> list[bool]:
        raise ServerUnreachable("redis://host", "is down")

    with monkeypatch.context() as patched:
        patched.setattr(bench.mine, "renew", unreachable)
        await bench.tick(3 * HANG_TICKS)
    assert bench.num_hung == 0
    await bench.tick()
    assert await bench.taken_over() == 0
    assert bench.keeper.holds(delivery)


async def test_an_unreachable_server_is_tried_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    delivery = await bench.held()

    async def unreachable(deliveries: Sequence[Delivery]) -> list[bool]:
        raise ServerUnreachable("redis://host", "is down")

    with monkeypatch.context() as patched:
        patched.setattr(bench.mine, "renew", unreachable)
        await bench.keeper.renew()
    assert bench.keeper.holds(delivery)
    bench.clock.now_s += LEASE_S / 2
    await bench.keeper.renew()
    bench.clock.now_s += LEASE_S / 2
    assert await bench.taken_over() == 0


async def test_renewal_runs_by_itself() -> None:
    """On the real clock: the keeper's lease is short, so its task must have renewed."""
    transport = MemoryTransport(MemoryQueues(), TransportOptions("mine"))
    renewed = asyncio.Event()

    async def renew(deliveries: Sequence[Delivery]) -> list[bool]:
        renewed.set()
        return [True for _ in deliveries]

    transport.renew = renew
    keeper = LeaseKeeper(transport, lease_s=0.01)
    await transport.admit("r", "batch", b"work")
    for delivery in await transport.receive("tokenizer", 1, block_s=0):
        keeper.hold(delivery)
    task = asyncio.create_task(keeper.run())
    await soon(renewed.wait())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_sets_the_event(number: signal.Signals) -> None:
    with stop_on_signals() as stopping:
        assert not stopping.is_set()
        os.kill(os.getpid(), number)
        await soon(stopping.wait())


async def test_handlers_are_gone_afterwards() -> None:
    loop = asyncio.get_running_loop()
    with stop_on_signals():
        pass
    assert not loop.remove_signal_handler(signal.SIGTERM)
    with stop_on_signals() as stopping:
        os.kill(os.getpid(), signal.SIGTERM)
        await soon(stopping.wait())
        assert not loop.remove_signal_handler(signal.SIGTERM)  # a second one ends the process
