"""Transactions to the keys and arguments of scripts/commit.lua, whose head draws the format.

Owns that translation. Knows nothing about connections or outcomes.
"""

from collections.abc import Sequence

from pipeline.keys import HANDBACK, RETURNED, Keys
from pipeline.redis_calls import Arg
from pipeline.transport import (
    AddChunk,
    DeadLetter,
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


class CommitArgs:
    """Collects keys and arguments, in the order in which the script reads them."""

    def __init__(self, keys: Keys, pool_id: str | None, lease_s: float) -> None:
        self._names = keys
        self._pool_id = pool_id
        self._lease_ms = max(1, round(1000 * lease_s))
        self.keys: list[str] = []
        self.args: list[Arg] = []

    def add_all(self, transactions: Sequence[Transaction]) -> None:
        """Append the number of transactions, and each of them."""
        self.args.append(len(transactions))
        for transaction in transactions:
            self._add(transaction)

    def _add(self, transaction: Transaction) -> None:
        delivery, names = transaction.delivery, self._names
        self.keys += [
            delivery.stream,
            names.claims(delivery.stream),
            names.tries(delivery.stream),
            names.request(transaction.request_id),
            names.results(transaction.request_id),
            names.chunks(transaction.request_id, transaction.attempt),
        ]
        self.args += [delivery.stage, delivery.entry_id, delivery.nonce]
        self.args += [transaction.attempt, int(transaction.ack), len(transaction.effects)]
        for effect in transaction.effects:
            self._add_effect(transaction, effect)

    def _add_effect(self, transaction: Transaction, effect: Effect) -> None:
        match effect:
            case Publish(stage, priority, payload):
                self.keys.append(self._names.stream(stage, priority, self._pool_id))
                self.args += ["publish", payload]
            case Emit(delta, first_index, num_tokens):
                self.args += ["emit", delta, first_index, num_tokens]
            case Finish(terminal, state):
                self.keys.append(self._names.finished())
                self.args += ["finish", transaction.request_id, terminal, state]
            case AddChunk(index, ref, substitute):
                self._add_decode_streams()
                self.keys.append(self._credits())
                self.args += ["chunk", index, ref, int(substitute)]
            case Plan(num_chunks, priority, payload):
                self._add_decode_streams()
                self.args += ["plan", transaction.request_id, num_chunks, priority, payload]
            case TakeCredit(num_bytes, max_bytes, max_requests):
                self.keys.append(self._credits())
                self.args += ["credit", transaction.request_id, num_bytes, max_bytes, max_requests]
                self.args += [self._lease_ms, HANDBACK]
            case GiveCredit():
                self.args += ["give", transaction.request_id]
            case Restart(attempt, payload):
                self.keys.append(self._names.stream("prefill", RETURNED))
                self.args += ["restart", transaction.request_id, attempt, payload]
            case DeadLetter(reason):
                self.keys.append(self._names.dead(transaction.delivery.stage))
                self.args += ["dead", transaction.delivery.payload, reason]

    def _add_decode_streams(self) -> None:
        self.keys.append(self._names.stream("decode", "interactive", self._pool_id))
        self.keys.append(self._names.stream("decode", "batch", self._pool_id))

    def _credits(self) -> str:
        if self._pool_id is None:
            raise ValueError("credits are those of a pool, and this process has none")
        return self._names.credits(self._pool_id)
