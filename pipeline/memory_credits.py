"""Credits of pools inside one process: what scripts/commit.lua does with them, said again in Python.

Owns the credits. Knows nothing about requests or streams: the broker says whether an entry waits.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from pipeline.transport import TakeCredit, Transaction, TransportOptions

Entry = tuple[str, str]
"""A stream and the id of an entry in it."""


@dataclass(frozen=True, slots=True)
class Credit:
    """What a request may fill of a pool; where it names an entry, it counts only while somebody works on that."""

    attempt: int
    num_bytes: int
    entry: Entry | None = None


class MemoryCredits:
    """The credits of all pools."""

    def __init__(self, waits: Callable[[Entry, float], bool], void: Callable[[Entry], None]) -> None:
        """`waits` says whether nobody works on an entry, given how long a lease lasts; `void` ends a claim of one."""
        self.by_pool: dict[str, dict[str, Credit]] = {}
        self._waits = waits
        self._void = void

    def has_room(self, transaction: Transaction, wanted: TakeCredit, options: TransportOptions) -> bool:
        """Return whether the request may have its credit, if those that only wait make way."""
        if self._suffices(transaction.request_id, wanted, options):
            return True
        revoked = self._revoked(transaction, wanted, options)
        others = self._others(transaction.request_id, options)
        return _fits(wanted, [credit for owner, credit in others.items() if owner not in revoked])

    def take(self, transaction: Transaction, wanted: TakeCredit, options: TransportOptions) -> None:
        """Give the request its credit, tied to the entry under which it is asked for."""
        request_id = transaction.request_id
        revoked = [] if self._suffices(request_id, wanted, options) else self._revoked(transaction, wanted, options)
        for owner in revoked:
            if (tie := self._of(options)[owner].entry) is not None:
                self._void(tie)  # a holder that was away for a lease must not go on without credit
        for owner in [*revoked, request_id]:
            self.drop(owner)
        entry = (transaction.delivery.stream, transaction.delivery.entry_id)
        self._of(options)[request_id] = Credit(transaction.attempt, wanted.num_bytes, entry)

    def settle(self, request_id: str) -> None:
        """Let a request's credit count whatever happens."""
        self._change(request_id, lambda credit: replace(credit, entry=None))

    def move(self, request_id: str, attempt: int, entry: Entry) -> None:
        """Tie a request's credit to another entry, under another attempt."""
        self._change(request_id, lambda credit: Credit(attempt, credit.num_bytes, entry))

    def drop(self, request_id: str) -> None:
        """End a request's credit, in whichever pool it is."""
        for owned in self.by_pool.values():
            owned.pop(request_id, None)

    def _change(self, request_id: str, change: Callable[[Credit], Credit]) -> None:
        for owned in self.by_pool.values():
            if credit := owned.get(request_id):
                owned[request_id] = change(credit)

    def _of(self, options: TransportOptions) -> dict[str, Credit]:
        if options.pool_id is None:
            raise ValueError("credits are those of a pool, and this process has none")
        return self.by_pool.setdefault(options.pool_id, {})

    def _others(self, request_id: str, options: TransportOptions) -> dict[str, Credit]:
        return {owner: credit for owner, credit in self._of(options).items() if owner != request_id}

    def _suffices(self, request_id: str, wanted: TakeCredit, options: TransportOptions) -> bool:
        own = self._of(options).get(request_id)
        return own is not None and own.num_bytes >= wanted.num_bytes

    def _revoked(self, transaction: Transaction, wanted: TakeCredit, options: TransportOptions) -> list[str]:
        others = self._others(transaction.request_id, options)
        if _fits(wanted, list(others.values())):
            return []
        return [
            owner
            for owner, credit in others.items()
            if credit.entry is not None and self._waits(credit.entry, options.lease_s)
        ]


def _fits(wanted: TakeCredit, others: list[Credit]) -> bool:
    num_bytes = wanted.num_bytes + sum(credit.num_bytes for credit in others)
    return num_bytes <= wanted.max_bytes and len(others) < wanted.max_requests
