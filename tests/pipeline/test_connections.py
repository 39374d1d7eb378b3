"""Commands packed in C are the bytes that the client library packs."""

from typing import Any

import pytest
from redis.asyncio.connection import Connection
from redis.exceptions import DataError

from pipeline.connections import TcpConnection

COMMANDS: list[tuple[Any, ...]] = [
    ("PING",),
    ("CLIENT SETINFO", "LIB-NAME", "x"),
    (b"GET", b"key"),
    ("SET", "schlüssel", b"\x00\r\n\xff", "PX", 1500),
    ("XADD", "s", "0-18446744073709551615", "p", b"", -1, 2**63),
    ("ZADD", "z", 0.1 + 0.2, 1e22, 1796040315.123),
    ("EVALSHA", "d" * 40, 0, "x" * 100_000, b"y" * 100_000),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: str(command[0])[:20])
def test_commands_are_packed_as_the_library_packs_them(command: tuple[Any, ...]) -> None:
    packed: Any = TcpConnection().pack_command(*command)
    assert b"".join(packed) == b"".join(Connection().pack_command(*command))


@pytest.mark.parametrize("wrong", [None, True, [1]])
def test_what_the_protocol_has_no_form_for_is_refused(wrong: Any) -> None:
    with pytest.raises(DataError):
        TcpConnection().pack_command("SET", "key", wrong)
