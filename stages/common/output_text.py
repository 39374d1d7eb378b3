"""The text of one request as it grows: tokens in, complete characters out, ended by stop strings.

A pure function of the tokens pushed so far, so whoever takes a request over rebuilds it by pushing them again.
"""

from collections.abc import Iterable

from stages.text.detokenizer import IncrementalDetokenizer
from stages.text.stop_strings import StopMatcher
from stages.text.tokenizer import Tokenizer


class OutputText:
    """Detokeniser and stop strings of one request."""

    def __init__(self, tokenizer: Tokenizer, stops: Iterable[str]) -> None:
        """Start with no text."""
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stops = StopMatcher(tuple(stops))

    def push(self, token_id: int) -> tuple[str, bool]:
        """Text that is now certain, and whether a stop string ended it."""
        return self._stops.push(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """Text held back until the end; call once, and not after a stop string was hit."""
        text, hit = self._stops.push(self._detokenizer.flush())
        return text if hit else text + self._stops.flush()
