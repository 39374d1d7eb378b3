"""Everything that a namespace holds on the server, in one moment, as the model's picture (protocol_model.py).

Reads keys by their documented names (pipeline/keys.py), and complains about what should not be there at all: unknown
keys, state without a TTL after its end or with one before, claims and counts of entries that are gone.
"""

from dataclasses import dataclass
from typing import Any, cast

from pipeline.keys import HANDBACK, Keys, Lane
from pipeline.transport import END_STATES
from tests.pipeline.pools import read_credit
from tests.pipeline.protocol_model import GONE, Picture, Queue

LEASE_MS = 600_000
"""What is idle for as long has lost its lease."""

SCRIPT = """
local found = {}
for _, key in ipairs(redis.call('KEYS', ARGV[1])) do
  local kind, value, pending = redis.call('TYPE', key).ok, {}, {}
  if kind == 'hash' then
    value = redis.call('HGETALL', key)
  elseif kind == 'stream' then
    value = redis.call('XRANGE', key, '-', '+')
    for _, group in ipairs(redis.call('XINFO', 'GROUPS', key)) do
      pending = redis.call('XPENDING', key, group[2], '-', '+', 1000)
    end
  end
  found[#found + 1] = { key, redis.call('TTL', key), value, pending }
end
return found
"""
"""ARGV pattern of keys; reply for each of them: name, TTL, value, and the pending list of a stream's group."""


@dataclass(frozen=True, slots=True)
class _Key:
    ttl_s: int
    value: Any
    pending: Any

    def fields(self) -> dict[bytes, bytes]:
        """Of a hash."""
        return _pairs(self.value)

    def entries(self) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Of a stream."""
        return [(entry_id, _pairs(fields)) for entry_id, fields in self.value]

    @property
    def stays(self) -> bool:
        return self.ttl_s == -1


def read_picture(reply: list[Any], keys: Keys) -> Picture:
    """What the script's reply shows."""
    found = {name.decode().removeprefix(f"{keys.namespace}:"): _Key(*rest) for name, *rest in reply}
    view = _View(found)
    for name, key in found.items():
        view.add(name.split(":"), key)
    view.check_ends()
    return view.picture


class _View:
    """Puts keys into their places; names in tests have no colon."""

    def __init__(self, found: dict[str, _Key]) -> None:
        self._found = found
        self.picture = Picture({}, {}, {}, {}, {}, {}, [])

    def add(self, words: list[str], key: _Key) -> None:
        picture = self.picture
        match words:
            case ["stream", *_, "claims" | "tries"]:
                assert ":".join(words[:-1]) in self._found, f"{words} has no stream"
            case ["stream", stage, lane]:
                self._add_queue((stage, cast("Lane", lane), None), key)
            case ["stream", stage, pool, lane]:
                self._add_queue((stage, cast("Lane", lane), pool), key)
            case ["req", request_id]:
                fields = key.fields()
                state = fields[b"state"].decode()
                assert key.stays == (state not in END_STATES), f"{request_id} is {state}, its TTL {key.ttl_s}"
                picture.requests[request_id] = (state, int(fields[b"attempt"]), int(fields[b"n"]))
            case ["res", request_id]:
                picture.results[request_id] = [_result(*entry) for entry in key.entries()]
            case ["chunks", request_id, attempt]:
                chunks = {int(index): ref for index, ref in key.fields().items()}
                picture.chunks[request_id, int(attempt)] = chunks
            case ["credits", pool]:
                picture.credits[pool] = {name.decode(): self._credit(it) for name, it in key.fields().items()}
            case ["dead", stage]:
                assert not key.stays
                picture.dead[stage] = [(fields[b"p"], fields[b"reason"].decode()) for _, fields in key.entries()]
            case ["finished"]:
                assert not key.stays
                picture.finished.extend((fields[b"id"].decode(), fields[b"p"]) for _, fields in key.entries())
            case _:
                raise AssertionError(f"nothing should be called {':'.join(words)}")

    def check_ends(self) -> None:
        """Results run out when their request does, and not before its end."""
        for request_id in self.picture.results:
            request, results = self._found.get(f"req:{request_id}"), self._found[f"res:{request_id}"]
            assert request, f"{request_id} has results and no state"
            assert request.stays == results.stays, f"TTLs of {request_id}: {request.ttl_s}, {results.ttl_s}"

    def _add_queue(self, queue: Queue, stream: _Key) -> None:
        name = ":".join(word for word in ("stream", queue[0], queue[2], queue[1]) if word)
        claims, tries = (self._fields(f"{name}:{what}") for what in ("claims", "tries"))
        pending = {entry_id: (holder.decode(), idle_ms) for entry_id, holder, idle_ms, _ in stream.pending}
        entries = dict(stream.entries())
        for what, ids in (("claims", claims), ("tries", tries), ("pending entries", pending)):
            assert ids.keys() <= entries.keys(), f"{name} has {what} of entries that are gone"
        rows = [
            (fields[b"p"], *_state(pending.get(entry_id), claims.get(entry_id), int(tries.get(entry_id, 0))))
            for entry_id, fields in entries.items()
        ]
        if rows:
            self.picture.queues[queue] = rows

    def _credit(self, credit: bytes) -> tuple[int, int, bytes | None]:
        """Attempt, bytes, and the payload of the entry that it is tied to."""
        attempt, num_bytes, tie = read_credit(credit)
        if tie is None:
            return attempt, num_bytes, None
        stream = self._found.get(tie[0].decode().partition(":")[2])
        fields = dict(stream.entries()).get(tie[1]) if stream else None
        return attempt, num_bytes, fields[b"p"] if fields else GONE

    def _fields(self, name: str) -> dict[bytes, bytes]:
        key = self._found.get(name)
        return key.fields() if key else {}


def _state(pending: tuple[str, int] | None, claim: bytes | None, tries: int) -> tuple[object, ...]:
    """State, holder, nonce, tries, whether the lease has ended."""
    if pending is None:  # the claim of a group that was destroyed may still be there
        assert tries or not claim, f"an entry that nobody ever had is claimed by {claim!r}"
        return "new", None, None, tries, False
    holder, idle_ms = pending
    if holder == HANDBACK:
        assert claim is None, f"an entry that was handed back is claimed by {claim!r}"
        return "handed back", None, None, tries, False
    has_ended = idle_ms >= LEASE_MS
    assert claim or has_ended, f"{holder} works on an entry without a claim"  # it goes with a credit that made way
    return "held", holder, claim.decode().partition(":")[0] if claim else None, tries, has_ended


def _result(entry_id: bytes, fields: dict[bytes, bytes]) -> tuple[int | None, bytes]:
    if entry_id == b"1-0":
        return None, fields[b"p"]
    assert entry_id.startswith(b"0-"), f"a result has the id {entry_id!r}"
    return int(entry_id[2:]), fields[b"p"]


def _pairs(flat: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))
