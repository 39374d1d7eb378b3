"""The last requests that ended, as whoever watches a stack reads them: each once.

Owns what is kept of a request, and the pace of output. Knows nothing about who writes the log (scripts/ending.lua).
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, cast

from redis.asyncio import Redis

from pipeline import wire
from pipeline.boundaries import FIRST_TOKEN
from pipeline.errors import WireError
from pipeline.keys import MAX_FINISHED, Keys
from pipeline.messages import Terminal
from pipeline.redis_calls import RedisCalls, command
from pipeline.timeline import ttft_ms
from pipeline.transport import EndState

_END_STATE: Final[dict[str, EndState]] = {"cancelled": "cancelled", "error": "failed"}
_START: Final = "-"


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request that has ended."""

    request_id: str
    ended_us: int
    """Epoch, by the server's clock, to the millisecond."""
    state: EndState
    num_output_tokens: int = 0
    first_token_us: int | None = None
    ttft_ms: float | None = None


class FinishedLog:
    """A reader that remembers what it has seen, and how far it came."""

    def __init__(self, calls: RedisCalls, client: Redis, keys: Keys) -> None:
        """Use a client that answers at once; whoever made it closes it."""
        self._calls = calls
        self._client = client
        self._keys = keys
        self._seen: deque[EndedRequest] = deque(maxlen=MAX_FINISHED)
        self._after = _START

    async def read(self) -> tuple[EndedRequest, ...]:
        """Return the last requests that ended, oldest first; asks only for those that are new.

        Raises:
            ServerError: there is no answer.
        """
        reply = await command(self._calls, self._client, "XRANGE", self._keys.finished(), self._after, "+")
        for entry_id, fields in cast("list[tuple[bytes, dict[bytes, bytes]]]", reply):
            self._after = "(" + entry_id.decode()
            try:
                terminal = wire.unpack(fields[b"p"], Terminal)
            except WireError:
                continue  # of another version of ours: it has ended, and that is all it says
            self._seen.append(_ended(entry_id, fields[b"id"].decode(), terminal))
        return tuple(self._seen)


def output_tokens_per_s(ended: Iterable[EndedRequest], now_us: int, window_s: float) -> float:
    """Return the pace of the last window_s seconds, as far as requests that have ended tell.

    The tokens of a request count evenly between its first one and its end. Those of requests that are still running
    are missing, so a window should be several times as long as a request takes.
    """
    since_us = now_us - round(1e6 * window_s)
    return sum(_tokens_since(request, since_us) for request in ended) / window_s


def _tokens_since(request: EndedRequest, since_us: int) -> float:
    if request.ended_us <= since_us:
        return 0.0
    began_us = min(request.first_token_us or request.ended_us, request.ended_us)
    if began_us >= since_us:
        return request.num_output_tokens
    return request.num_output_tokens * (request.ended_us - since_us) / (request.ended_us - began_us)


def _ended(entry_id: bytes, request_id: str, terminal: Terminal) -> EndedRequest:
    return EndedRequest(
        request_id=request_id,
        ended_us=1000 * int(entry_id.partition(b"-")[0]),
        state=_END_STATE.get(terminal.finish_reason, "finished"),
        num_output_tokens=terminal.usage.completion_tokens if terminal.usage is not None else 0,
        first_token_us=max((s.at_us for s in terminal.stamps if s.boundary == FIRST_TOKEN), default=None),
        ttft_ms=ttft_ms(terminal.stamps),
    )
