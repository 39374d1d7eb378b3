"""Counts of what should be rare: blobs that were lost, requests that were taken over, leftovers that were removed.

Owns the names, what they mean, and the tally of one process. Knows nothing about the server, which adds up what all
processes counted (upkeep.py), nor about who counts.
"""

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Final

KV_MISSING: Final = "kv_missing"
KV_DAMAGED: Final = "kv_damaged"
KV_RECOMPUTED_TOKENS: Final = "kv_recomputed_tokens"
REQUESTS_TAKEN_OVER: Final = "requests_taken_over"
REQUESTS_SENT_BACK: Final = "requests_sent_back"
TOKENS_REPLAYED: Final = "tokens_replayed"
DIVERGENCES: Final = "divergences"
COMMITS_REFUSED: Final = "commits_refused"
DEAD_LETTERS: Final = "dead_letters"
ORPHANS_REMOVED: Final = "orphans_removed"
REQUESTS_EXPIRED: Final = "requests_expired"
CONSUMERS_REMOVED: Final = "consumers_removed"
CREDITS_RELEASED: Final = "credits_released"

MEANINGS: Final[Mapping[str, str]] = {
    KV_MISSING: "chunks of KV that were not in the pool any more",
    KV_DAMAGED: "blobs of KV that failed a check, and were not used",
    KV_RECOMPUTED_TOKENS: "tokens whose KV was computed again because it was lost",
    REQUESTS_TAKEN_OVER: "requests that went on after the process that had them died",
    REQUESTS_SENT_BACK: "requests that went back to prefill because their KV was lost",
    TOKENS_REPLAYED: "emitted tokens that were computed again to go on behind them",
    DIVERGENCES: "replayed tokens that differ from those that were emitted; must be 0",
    COMMITS_REFUSED: "commits of processes that had lost the work meanwhile",
    DEAD_LETTERS: "messages that could not be processed",
    ORPHANS_REMOVED: "blobs of requests that had ended, and files of writers that had died",
    REQUESTS_EXPIRED: "requests that were given up at their deadline",
    CONSUMERS_REMOVED: "names of dead processes that were removed from the queues",
    CREDITS_RELEASED: "shares of a pool that were taken back from requests that had ended",
}
"""All counters, each with what it counts."""


class Counters:
    """What one process counted since it was last asked; may be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, n: int = 1) -> None:
        """Count n more of one of MEANINGS."""
        assert name in MEANINGS, f"{name} is no counter; they are {', '.join(MEANINGS)}"
        assert n >= 0, f"{name} counts up, not by {n}"
        with self._lock:
            self._counts[name] += n

    def take(self) -> dict[str, int]:
        """Return the counts that are not zero, and begin again at zero."""
        with self._lock:
            counts = {name: n for name, n in self._counts.items() if n}
            self._counts.clear()
        return counts
