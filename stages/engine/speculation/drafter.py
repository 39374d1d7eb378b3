"""The seam every drafter fills.

A draft only saves steps: token n is always what keyed sampling gives for position n, and a draft is accepted where it
equals that token. So a drafter cannot change a text, and nobody has to trust it.
"""

from collections.abc import Sequence
from typing import Protocol


class Drafter(Protocol):
    """Guesses the next tokens of one sequence. One instance belongs to one sequence."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take note of tokens that are now part of the sequence."""
        ...

    def draft(self, max_tokens: int) -> list[int]:
        """At most max_tokens guesses for what follows; none is a fine answer."""
        ...
