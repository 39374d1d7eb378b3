"""One call to the server: scripts by digest, errors mapped once, and sent again after a lost connection.

Owns the retry rule. Knows nothing about queues. Only calls that may be sent twice go through here, which is
all of them: scripts recognise themselves by a nonce, the rest reads or sets a value. The library's own
retries stay off, because they do not know that.

The time limit of a call is here, too, and the library's is off: it sends through asyncio.wait_for, which on
Python 3.11 returns instead of raising when its task is cancelled in the moment the bytes are out. A loop that
is cancelled there would go on for ever.
"""

import asyncio
import hashlib
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any, TypeVar, cast

import structlog
from redis import exceptions as redis_errors
from redis.asyncio import Redis

from pipeline.clock import Monotonic, monotonic_s
from pipeline.errors import ServerFull, ServerRefused, ServerUnreachable

ANSWER_TIMEOUT_S = 5.0  # scripts take milliseconds; a server that is this slow has lost the connection
FIRST_PAUSE_S = 0.02  # a dropped connection is replaced at once
MAX_PAUSE_S = 1.0  # a restarting server is found within a second

# A server that reads its files after a restart answers soon: BusyLoadingError is one of the first kind.
LOST = (redis_errors.ConnectionError, redis_errors.TimeoutError, OSError)

_INCLUDE = re.compile(r"^-- include: (\w+\.lua)\n", re.MULTILINE)

Arg = str | bytes | int | float
T = TypeVar("T")
log = structlog.get_logger(__name__)


class RedisCalls:
    """Calls on one client, each repeated for up to patience_s while the server does not answer."""

    def __init__(self, client: Redis, address: str, patience_s: float, monotonic: Monotonic = monotonic_s) -> None:
        self._client = client
        self._address = address
        self._patience_s = patience_s
        self._monotonic = monotonic
        self._scripts: dict[str, tuple[str, str]] = {}

    async def script(
        self, name: str, keys: Sequence[str], args: Sequence[Arg], resend_args: Sequence[Arg] | None = None
    ) -> Any:
        """Run a script; resend_args replaces args when the first reply was lost.

        Raises:
            ServerUnreachable: no answer within patience_s; it may have run.
            ServerFull: refused for memory; it has not run.
            ServerRefused: any other error of the server.
        """
        sending = 0

        async def send() -> Any:
            nonlocal sending
            sending += 1
            now_args = args if sending == 1 or resend_args is None else resend_args
            return await self._evaluate(name, keys, now_args)

        return await self.call(send, name)

    async def call(self, send: Callable[[], Awaitable[T]], what: str) -> T:
        """Await send(), again and again while the connection is lost; what names the call in logs.

        Each sending has ANSWER_TIMEOUT_S.
        """
        deadline = self._monotonic() + self._patience_s
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    return await send()
            except LOST as error:
                if _is_refusal(error):
                    raise ServerRefused(self._address, f"{what}: {error}") from error
                left_s = deadline - self._monotonic()
                if left_s <= 0:
                    reason = str(error) or type(error).__name__
                    problem = f"no answer to {what} within {self._patience_s:g} s ({reason})"
                    raise ServerUnreachable(self._address, problem) from error
                log.warning("server_call_repeated", call=what, error=type(error).__name__)
            except redis_errors.OutOfMemoryError as error:
                raise ServerFull(self._address, str(error)) from error
            except redis_errors.RedisError as error:
                raise ServerRefused(self._address, f"{what}: {error}") from error
            await asyncio.sleep(min(pause_s, max(left_s, 0)))
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def loaded(self, name: str) -> tuple[str, str]:
        """Return the text of a script and the digest that the server knows it by; reads the files once."""
        if name not in self._scripts:
            source = script_source(name)
            self._scripts[name] = (source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())
        return self._scripts[name]

    async def _evaluate(self, name: str, keys: Sequence[str], args: Sequence[Arg]) -> Any:
        source, digest = self.loaded(name)
        execute = cast("Callable[..., Awaitable[Any]]", self._client.execute_command)  # pyright: ignore[reportUnknownMemberType]
        try:
            return await execute("EVALSHA", digest, len(keys), *keys, *args)
        except redis_errors.NoScriptError:  # a new server, or one that was restarted; EVAL also keeps the script
            return await execute("EVAL", source, len(keys), *keys, *args)


def _is_refusal(error: Exception) -> bool:
    """A wrong password or database number comes as a connection error, which waiting would not cure."""
    answers = (
        redis_errors.AuthenticationError,
        redis_errors.AuthorizationError,
        redis_errors.ResponseError,
    )
    return isinstance(error, answers) or isinstance(error.__cause__, answers)


async def read_stream(readers: Redis, after: Mapping[str, str | bytes], count: int, block_s: float | None) -> list[Any]:
    """Return [stream, [(id, fields)]] of streams that have entries after an id; None does not wait."""
    xread = cast("Any", readers.xread)  # pyright: ignore[reportUnknownMemberType]
    # Rounded up, because just before its time nobody is done waiting; and 0 would be for ever.
    block_ms = None if block_s is None else max(1, math.ceil(1000 * block_s))
    async with asyncio.timeout(ANSWER_TIMEOUT_S):  # far above any block_s
        return cast("list[Any]", await xread(after, count=count, block=block_ms) or [])


async def command(calls: RedisCalls, client: Redis, *words: Arg) -> object:
    """Send one command, again where the reply was lost: only those that may be sent twice."""
    execute = cast("Any", client.execute_command)  # pyright: ignore[reportUnknownMemberType]
    return await calls.call(lambda: execute(*words), str(words[0]))


async def commands(calls: RedisCalls, client: Redis, many: Sequence[Sequence[Arg]], what: str) -> list[Any]:
    """Send commands in one round trip, again where the reply was lost; the first error is raised."""

    async def send() -> list[Any]:
        async with cast("Any", client).pipeline(transaction=False) as together:
            for words in many:
                together.execute_command(*words)
            return cast("list[Any]", await together.execute())

    return await calls.call(send, what)


def script_source(name: str) -> str:
    """Return the text of a script with its includes in place; reads the files."""
    folder = files("pipeline") / "scripts"

    def text(file: str) -> str:
        return (folder / file).read_text(encoding="utf-8")

    return _INCLUDE.sub(lambda line: text(line[1]), text(f"{name}.lua"))
