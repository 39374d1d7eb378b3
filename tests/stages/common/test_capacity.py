"""What decode processes of a pool take together, as others read it."""

import msgpack
import pytest

from pipeline.transport import Process
from stages.common.capacity import Capacity, capacity_of


def process(stage: str, **info: object) -> Process:
    return Process(stage, "a", msgpack.packb({"parts": {}, **info}) or b"")


def test_slots_add_up_and_the_largest_cache_counts() -> None:
    processes = [
        process("decode", pool="p", slots=16, pages=640),
        process("decode", pool="p", slots=4, pages=1000),
        process("decode", pool="q", slots=100, pages=9999),
        process("prefill", pool="p", slots=100, pages=9999),
    ]
    assert capacity_of(processes, "p") == Capacity(slots=20, pages=1000)


def test_without_decode_there_is_no_capacity() -> None:
    assert capacity_of([], "p") == Capacity(0, 0)


@pytest.mark.parametrize("info", [b"", b"\xc1", b"\x01", msgpack.packb({"pool": "p", "slots": -3, "pages": True})])
def test_who_says_nothing_that_we_know_takes_nothing(info: bytes) -> None:
    processes = [Process("decode", "foreign", info), process("decode", pool="p", slots=2, pages=3)]
    assert capacity_of(processes, "p") == Capacity(2, 3)
