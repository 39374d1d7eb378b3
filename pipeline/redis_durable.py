"""Scripts whose writes are on the server's disk when their reply is here: WAITAOF, on the connection that wrote.

Owns the wait, which is bounded. Knows nothing about what is written. A script that is called again because its
answer was lost must write something once more where it has nothing left to do: the log is in order, so the disk
has the first writing when it has the second.
"""

from collections.abc import Sequence
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from pipeline.errors import ServerUnreachable
from pipeline.redis_calls import ANSWER_TIMEOUT_S, Arg, RedisCalls

DISK_TIMEOUT_S = ANSWER_TIMEOUT_S - 1  # of one call: with everysec, a disk that keeps up needs a second at most


async def script_on_disk(
    calls: RedisCalls, client: Redis, address: str, name: str, keys: Sequence[str], args: Sequence[Arg]
) -> Any:
    """Run a script, and return its reply when all that this connection wrote is on the server's disk.

    Raises:
        ServerUnreachable: no answer, or the disk did not keep up; it may have run. The same again waits for it.
        ServerFull: refused for memory; it has not run.
        ServerRefused: any other error of the server; without an append-only file it has run.
    """
    source, digest = calls.loaded(name)
    rest = [len(keys), *keys, *args]

    async def send() -> Any:
        reply, synced = await _with_wait(client, ["EVALSHA", digest, *rest])
        if isinstance(reply, NoScriptError):
            reply, synced = await _with_wait(client, ["EVAL", source, *rest])
        for answer in (reply, synced):
            if isinstance(answer, Exception):
                raise answer
        if cast("list[int]", synced)[0] == 0:
            problem = f"has done {name}, but it is not on the disk after {DISK_TIMEOUT_S:g} s; call it again to wait"
            raise ServerUnreachable(address, problem)
        return reply

    return await calls.call(send, name)


async def _with_wait(client: Redis, words: Sequence[Arg]) -> list[object]:
    """Send a command and WAITAOF together, and return both answers, which may be errors."""
    async with cast("Any", client).pipeline(transaction=False) as together:
        together.execute_command(*words)
        together.execute_command("WAITAOF", 1, 0, round(1000 * DISK_TIMEOUT_S))  # this server, no replicas
        return cast("list[object]", await together.execute(raise_on_error=False))
