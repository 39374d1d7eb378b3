"""Prompt lookup: what followed the last time the sequence's newest tokens occurred in it (arXiv 2304.04487).

Keeps, for every n-gram of `LONGEST` down to `SHORTEST` tokens, the position after its latest occurrence, so a draft
costs a few dictionary look-ups whatever the length of the sequence.
"""

from collections.abc import Sequence

LONGEST = 4
# A single token repeats by chance far too often to be worth a row.
SHORTEST = 2


class PromptLookup:
    """Drafter over one sequence's own tokens."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        """Index a prompt."""
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens. The n-grams that end at the newest token are indexed only when a token follows them."""
        for token_id in token_ids:
            end = len(self._tokens)
            for length in range(SHORTEST, min(LONGEST, end) + 1):
                self._after[tuple(self._tokens[end - length : end])] = end
            self._tokens.append(token_id)

    def draft(self, max_tokens: int) -> list[int]:
        """Tokens that followed the longest n-gram that ends the sequence and occurred before."""
        end = len(self._tokens)
        for length in range(min(LONGEST, end), SHORTEST - 1, -1):
            found = self._after.get(tuple(self._tokens[end - length : end]))
            if found is not None:
                return self._tokens[found : found + max_tokens]
        return []
