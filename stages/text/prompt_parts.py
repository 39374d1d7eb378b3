"""A prompt as parts: text, and the special tokens between.

Owns the one rule by which special tokens are found in text. Knows nothing about whose text it is.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A piece of a prompt: one special token by its spelling, or text in which none is recognised."""

    text: str
    is_token: bool


class PartSplitter:
    """Finds tokens by their spelling: the leftmost first, of several that start there the longest."""

    def __init__(self, spellings: Iterable[str]) -> None:
        """Compile the pattern; without spellings nothing is ever found."""
        longest_first = sorted(filter(None, spellings), key=len, reverse=True)
        alternatives = "|".join(map(re.escape, longest_first))
        self._pattern = re.compile(f"({alternatives})") if alternatives else None

    def split(self, text: str) -> Iterator[PromptPart]:
        """Yield the parts of a text in order, none of them empty."""
        pieces = self._pattern.split(text) if self._pattern else [text]
        for index, piece in enumerate(pieces):
            if piece:
                yield PromptPart(piece, is_token=index % 2 == 1)
