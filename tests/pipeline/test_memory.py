"""What only the in-memory transport can show: leases and expiry on a clock that a test moves."""

import pytest

from pipeline.errors import UnknownRequest
from pipeline.keys import LEASE_S, RESULT_TTL_S
from pipeline.memory import MemoryQueues, MemoryTransport
from pipeline.transport import Accepted, Delivery, Finish, Outcome, Transaction, TransportOptions


class HandClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def pair(clock: HandClock) -> tuple[MemoryTransport, MemoryTransport]:
    queues = MemoryQueues(monotonic=clock)
    return tuple(MemoryTransport(queues, TransportOptions(name)) for name in ("a", "b"))  # pyright: ignore[reportReturnType]


async def held_by(transport: MemoryTransport) -> Delivery:
    await transport.admit("r", "batch", b"work")
    (delivery,) = await transport.receive("tokenizer", 1, block_s=0)
    return delivery


async def test_a_lease_lasts_exactly_as_long_as_it_says(
    pair: tuple[MemoryTransport, MemoryTransport], clock: HandClock
) -> None:
    a, b = pair
    await held_by(a)
    clock.now_s += LEASE_S - 0.01
    assert await b.receive("tokenizer", 1, block_s=0) == []
    clock.now_s += 0.01
    assert len(await b.receive("tokenizer", 1, block_s=0)) == 1


async def test_a_renewed_lease_is_not_taken_over(
    pair: tuple[MemoryTransport, MemoryTransport], clock: HandClock
) -> None:
    a, b = pair
    delivery = await held_by(a)
    for _ in range(10):
        clock.now_s += LEASE_S / 3
        assert await a.renew([delivery]) == [True]
        assert await b.receive("tokenizer", 1, block_s=0) == []


async def test_an_ended_request_is_forgotten_after_its_time(
    pair: tuple[MemoryTransport, MemoryTransport], clock: HandClock
) -> None:
    a, _ = pair
    delivery = await held_by(a)
    end = Transaction(delivery, "r", 0, (Finish(b"end", "finished"),), ack=True)
    assert await a.commit([end]) == [Outcome.OK]
    clock.now_s += RESULT_TTL_S - 1
    assert len(await a.read_results("r", 0, block_s=0)) == 1
    clock.now_s += 1
    with pytest.raises(UnknownRequest):
        await a.read_results("r", 0, block_s=0)
    assert await a.admit("r", "batch", b"work") == Accepted()
