"""What consumers commit in the machine (test_protocol_machine.py): every kind of effect, well and badly chosen.

Mostly what a holder in its right mind would do next, so that requests get far; sometimes a delta that does not follow,
an attempt that is not there yet, or a request that nobody knows.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

from hypothesis import strategies as st

from pipeline.keys import PRIORITIES, STAGES, Priority
from pipeline.transport import (
    END_STATES,
    AddChunk,
    DeadLetter,
    Delivery,
    Effect,
    Emit,
    Finish,
    GiveCredit,
    Plan,
    Publish,
    Restart,
    TakeCredit,
    Transaction,
)
from tests.pipeline.protocol_model import ProtocolModel

MAX_BYTES, MAX_REQUESTS = 9, 2  # of a pool, or less: the bounds change
T = TypeVar("T")

_KINDS = (
    *("publish",) * 4,
    *("emit",) * 4,
    *("chunk",) * 2,
    "plan",
    *("chunks and plan",) * 2,
    "give",
    *("restart",) * 3,
    "finish",
    "nothing",
    "bury",
)
_KINDS_OF_PREFILL = (*_KINDS, *("credit",) * 8, *("credit and work",) * 4)
"""Credits are tied to prefill's entries: whoever asks for one looks for those of others in its own group."""


@lru_cache(maxsize=1_000, typed=True)
def any_of(*values: Any) -> Any:
    """A strategy for one of some values: the same one each time, since a new one costs more than a draw."""
    return st.sampled_from(values)


def payload_of(request_id: str, attempt: int, serial: int) -> bytes:
    """What an entry says: whose it is. The serial number is there so that no two look the same."""
    return b"%s %d %d" % (request_id.encode(), attempt, serial)


def identity(payload: bytes) -> tuple[str, int]:
    """Request and attempt of an entry."""
    request_id, attempt, _ = payload.decode().split(" ")
    return request_id, int(attempt)


def check_results(request_id: str, entries: list[tuple[int | None, bytes]]) -> None:
    """Deltas without gap or duplicate, then at most one end, and nothing behind it."""
    num_tokens = 0
    for place, (offset, data) in enumerate(entries):
        if offset is None:
            assert place == len(entries) - 1, f"{request_id} goes on after its end"
            return
        first, num = (int(number) for number in data.split(b"+"))
        assert (first, offset) == (num_tokens, num_tokens + num), (
            f"{request_id}: {data!r} at {offset}, {num_tokens} out"
        )
        num_tokens = offset


class TransactionDraws:
    """Draws for one step of the machine."""

    def __init__(self, data: st.DataObject, model: ProtocolModel, next_serial: Callable[[], int]) -> None:
        self._data = data
        self._model = model
        self._next_serial = next_serial

    def transaction(self, delivery: Delivery, *, is_sane: bool) -> Transaction:
        """One about a delivery; where it need not be sane, request and attempt may be wrong."""
        request_id, attempt = identity(delivery.payload)
        if not is_sane:
            request_id = self._one_of(*[request_id] * 7, "nobody")
            attempt += self._one_of(*[0] * 7, 1)
        kind = self._one_of(*(_KINDS_OF_PREFILL if delivery.stage == "prefill" else _KINDS))
        ack = kind == "restart" or self._one_of(False, False, False, True)
        return Transaction(delivery, request_id, attempt, self._effects(kind, request_id, attempt), ack)

    def _effects(self, kind: str, request_id: str, attempt: int) -> tuple[Effect, ...]:
        match kind:
            case "publish":
                return tuple(self._publish(request_id, attempt) for _ in range(self._one_of(1, 1, 2)))
            case "emit":
                return self._emit(request_id)[: self._one_of(1, 1, 2)]
            case "chunk" | "plan" | "chunks and plan":
                return self._parts(kind, self._payload(request_id, attempt))
            case "credit":
                return (self._credit(),)
            case "credit and work":  # no delta: whether it is the room or the index that is wrong, no rule says
                return (self._publish(request_id, attempt), self._credit(), self._chunk())
            case "give":
                return (GiveCredit(),)
            case "restart":
                later = attempt + self._one_of(1, 2)
                return (Restart(later, self._payload(request_id, later)),)
            case "finish":
                end = Finish(b"end", self._one_of(*END_STATES))
                return self._one_of((end,), (*self._emit(request_id)[:1], end), (end, DeadLetter("given up")))
            case "bury":
                return (DeadLetter("set aside"),)
            case _:
                return ()

    def _publish(self, request_id: str, attempt: int) -> Publish:
        return Publish(
            self._one_of(*STAGES, "prefill", "prefill"), self._priority(), self._payload(request_id, attempt)
        )

    def _emit(self, request_id: str) -> tuple[Emit, Emit]:
        """Two deltas; mostly they follow what is there, and each other."""
        request = self._model.requests.get(request_id)
        first = max(0, (request.num_tokens if request else 0) + self._one_of(0, 0, 0, 0, 1, -1))
        num = self._one_of(1, 1, 3)
        then = first + num + self._one_of(0, 0, 0, 1)
        return Emit(b"%d+%d" % (first, num), first, num), Emit(b"%d+1" % then, then, 1)

    def _parts(self, kind: str, payload: bytes) -> tuple[Effect, ...]:
        """Chunks and plans of what is to be joined."""
        if kind == "chunk":
            return (self._chunk(),)
        plan = Plan(self._one_of(1, 2), self._priority(), payload)
        return (plan,) if kind == "plan" else (AddChunk(0, b"x"), AddChunk(1, b"x"), plan)

    def _chunk(self) -> AddChunk:
        return AddChunk(self._one_of(0, 0, 1, 1, 2), self._one_of(b"x", b"y"), self._one_of(False, True))

    def _credit(self) -> TakeCredit:
        num_bytes, max_bytes = self._one_of(1, 4, 5, 5, MAX_BYTES), self._one_of(MAX_BYTES, MAX_BYTES, MAX_BYTES, 5)
        return TakeCredit(num_bytes, max_bytes, self._one_of(MAX_REQUESTS, MAX_REQUESTS, 1))

    def _payload(self, request_id: str, attempt: int) -> bytes:
        return payload_of(request_id, attempt, self._next_serial())

    def _priority(self) -> Priority:
        return self._one_of(*PRIORITIES)

    def _one_of(self, *values: T) -> T:
        return self._data.draw(any_of(*values))
