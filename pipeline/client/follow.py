"""Reading results: from any token on, as often as wanted, to the end.

Owns the position in a result stream. Knows nothing about who enqueued what.

The entries of a stream are deltas of one or more tokens. A position inside a delta gives the rest of its tokens, and
all of its text: text cannot be cut at a token, so that of a delta belongs to its last token. Whoever goes on behind
a delta that it got never meets this.
"""

from collections.abc import AsyncGenerator

from pipeline.batch.results import Completion, outcome_of
from pipeline.client.patience import Patience
from pipeline.errors import StateDamaged
from pipeline.messages import Delta, Failure, Terminal
from pipeline.transport import AFTER_ALL, ResultEntry, Transport
from pipeline.wire import unpack

BLOCK_S = 2.0  # how long one read waits; also how often the patience is looked at


class ResultReader:
    """Follows any number of requests."""

    def __init__(self, transport: Transport, patience: Patience, block_s: float = BLOCK_S) -> None:
        self._transport = transport
        self._patience = patience
        self._block_s = block_s

    async def follow(self, request_id: str, after: int) -> AsyncGenerator[Delta | Terminal]:
        """Yield what comes after the first `after` tokens, the terminal last; a page is read when it is asked for.

        Raises:
            UnknownRequest: nothing is there and nothing will come.
            ServerUnreachable: the server stayed away.
            Stalled: nothing moved for too long.
            StateDamaged: tokens are missing.
        """
        position, start, num_chars = after, None, 0
        while True:
            waiting_since = self._patience.now()
            while not (entries := await self.read(request_id, position)):
                self._patience.check(waiting_since, f"no token of request {request_id} arrived")
            self._patience.moved()
            for entry in entries:
                if entry.offset is None:
                    yield unpack(entry.data, Terminal)
                    return
                delta = _checked(unpack(entry.data, Delta), request_id, position, entry.offset)
                if start is None:
                    start = delta.first_index  # the first delta's text comes out whole, wherever `after` is in it
                if delta.first_index < position:
                    delta = _tail(delta, position)
                    if position > after:  # the server lost its last second; the tokens came again, grouped otherwise
                        text = await self._text(request_id, start, entry.offset)
                        delta = delta.model_copy(update={"text": text[num_chars:]})
                position, num_chars = entry.offset, num_chars + len(delta.text)
                yield delta

    async def collect(self, request_id: str) -> Completion | Failure:
        """Return what a request came to, when it has ended; raises as follow does."""
        deltas: list[Delta] = []
        async for entry in self.follow(request_id, 0):
            if isinstance(entry, Terminal):
                return outcome_of(deltas, entry)
            deltas.append(entry)
        raise AssertionError("results end with a terminal")

    async def has_ended(self, request_id: str, block_s: float) -> bool:
        """Return whether a request has ended, waiting up to block_s for it; its deltas are not read."""
        return bool(await self.read(request_id, AFTER_ALL, block_s))

    async def read(self, request_id: str, after: int, block_s: float | None = None) -> list[ResultEntry]:
        """Return one page, empty where nothing came for a while."""
        wait_s = self._block_s if block_s is None else block_s
        return await self._patience.call(lambda: self._transport.read_results(request_id, after, wait_s))

    async def _text(self, request_id: str, after: int, end: int) -> str:
        """Return the text of the deltas behind `after`, up to the one that ends at `end`."""
        pieces: list[str] = []
        waiting_since = self._patience.now()
        while after < end:
            entries = await self.read(request_id, after)
            for entry in entries:
                if entry.offset is None or entry.offset > end:
                    return "".join(pieces)
                pieces.append(unpack(entry.data, Delta).text)
                after = entry.offset
            if not entries:
                self._patience.check(waiting_since, f"the tokens of request {request_id} went away")
        return "".join(pieces)


def _checked(delta: Delta, request_id: str, position: int, end: int) -> Delta:
    if not delta.first_index <= position < end == delta.first_index + len(delta.token_ids):
        got = f"{len(delta.token_ids)} tokens from {delta.first_index} under 0-{end}"
        raise StateDamaged((f"request {request_id}: token {position} expected in the results, got {got}",))
    return delta


def _tail(delta: Delta, position: int) -> Delta:
    """Return the tokens from a position on; the text stays."""
    num_cut = position - delta.first_index
    changes = {
        "first_index": position,
        "token_ids": delta.token_ids[num_cut:],
        "logprobs": None if delta.logprobs is None else delta.logprobs[num_cut:],
    }
    return delta.model_copy(update=changes)
