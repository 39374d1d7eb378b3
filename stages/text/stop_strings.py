"""Ends a text before a stop string, and holds back what might be the beginning of one.

Owns the held-back text of one sequence. Knows nothing about tokens. All results are a pure function of the
concatenation of what was pushed: how it was cut into pieces, by tokens or by speculation, changes nothing.

Of all matches in a text the one that is complete first counts; of several that are complete at the same
character, the one that starts first. This is the only order that can be decided as the text comes, whatever
the pieces.
"""

from collections.abc import Sequence


class StopMatcher:
    """Filters one text; after a hit it emits nothing more."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Start with an empty text; no stop string may be empty."""
        if not all(stops):
            raise ValueError("a stop string is empty: it would end every text at once")
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """Return (text that can be emitted now, whether a stop string was hit)."""
        if self.matched is not None:
            return "", True
        seen = self._held + text
        match = self._first_match(seen)
        if match is not None:
            start, self.matched = match
            self._held = ""
            return seen[:start], True
        num_held = self._num_held(seen)
        cut = len(seen) - num_held
        self._held = seen[cut:]
        return seen[:cut], False

    def flush(self) -> str:
        """Return the held-back text, when no more follows."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, seen: str) -> tuple[int, str] | None:
        # Everything before the held-back text is known to begin no match, so the first occurrence of each
        # stop string in here is its first in the whole text.
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := seen.find(stop)) >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _num_held(self, seen: str) -> int:
        """Return the length of the longest suffix that begins, but does not complete, a stop string."""
        longest = max((len(stop) for stop in self._stops), default=0) - 1
        for length in range(min(longest, len(seen)), 0, -1):
            suffix = seen[-length:]
            if any(stop.startswith(suffix) for stop in self._stops):
                return length
        return 0
