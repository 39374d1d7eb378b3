"""The handshake: processes that would compute other bits do not work side by side."""

import msgpack
import pytest

from pipeline.memory import MemoryQueues, MemoryTransport
from pipeline.transport import Process, TransportOptions
from stages.common.handshake import (
    REGISTRATION_TTL_S,
    Announcement,
    FingerprintMismatch,
    Registration,
    read_announcement,
)
from tests.stages.line import ManualClock

PARTS = {"model": "m1", "codec": "fp8_e4m3", "layout": "l1"}


class Stack:
    """Queues that processes register at."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.queues = MemoryQueues(monotonic=self.clock)

    async def announce(self, stage: str, consumer: str, parts: dict[str, str]) -> None:
        await Registration(MemoryTransport(self.queues, TransportOptions(consumer)), stage, parts).announce()

    async def registered(self) -> list[str]:
        return [process.consumer for process in await MemoryTransport(self.queues, TransportOptions("x")).processes()]


async def test_equal_processes_work_together() -> None:
    stack = Stack()
    for consumer in ("a", "b"):
        await stack.announce("decode", consumer, PARTS)
    await stack.announce("prefill", "c", PARTS)
    assert await stack.registered() == ["a", "b", "c"]


@pytest.mark.parametrize("part", PARTS)
async def test_a_process_that_differs_refuses_to_start_and_names_the_part(part: str) -> None:
    stack = Stack()
    await stack.announce("prefill", "a", PARTS)
    with pytest.raises(FingerprintMismatch, match=rf"has {part} other, but prefill \(a\) has {PARTS[part]}") as caught:
        await stack.announce("decode", "b", PARTS | {part: "other"})
    assert caught.value.part == part


async def test_parts_that_only_one_side_has_are_not_compared() -> None:
    stack = Stack()
    await stack.announce("tokenizer", "a", {})
    await stack.announce("compressor", "b", {"layout": "l1"})
    await stack.announce("decode", "c", PARTS)
    with pytest.raises(FingerprintMismatch, match="layout"):
        await stack.announce("compressor", "d", {"layout": "l2"})


async def test_a_process_that_died_is_no_obstacle_for_long() -> None:
    stack = Stack()
    await stack.announce("prefill", "a", PARTS)
    stack.clock.now += REGISTRATION_TTL_S
    await stack.announce("prefill", "b", PARTS | {"codec": "raw"})


@pytest.mark.parametrize("info", [b"", b"\x80", b"\x93\x01\x02\x03", b"\x81\xa5parts\x01", b"\xc1"])
async def test_a_registration_that_says_nothing_known_is_no_obstacle(info: bytes) -> None:
    stack = Stack()
    other = MemoryTransport(stack.queues, TransportOptions("other"))
    await other.register("gateway", info, REGISTRATION_TTL_S)
    await stack.announce("decode", "a", PARTS)


@pytest.mark.parametrize(
    "info", [b"", b"\x80", b"\x93\x01\x02\x03", b"\xc1", msgpack.packb({"pool": 7, "slots": "many"})]
)
def test_what_is_no_announcement_of_ours_says_nothing(info: bytes) -> None:
    assert read_announcement(Process("decode", "a", info)) == Announcement()


async def test_an_announcement_says_where_a_process_is_and_how_much_it_takes() -> None:
    stack = Stack()
    transport = MemoryTransport(stack.queues, TransportOptions("a"))
    await Registration(transport, "decode", PARTS, "pool-1", capacity={"slots": 16, "pages": 640}).announce()
    await Registration(transport, "tokenizer", {}).announce()
    decode, tokenizer = await transport.processes()
    assert read_announcement(decode) == Announcement(PARTS, "pool-1", slots=16, pages=640)
    assert read_announcement(tokenizer) == Announcement()
