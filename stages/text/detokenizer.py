"""Token ids to text as they come, never half a character.

Owns the bytes of an unfinished character, nothing else. Knows nothing about stop strings. The state is a pure
function of the tokens pushed, so whoever takes a sequence over pushes them again.
"""

import codecs

from stages.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Turns one sequence of tokens into text, piece by piece.

    All pieces and the flush together are exactly `Tokenizer.decode` of the sequence, wherever it is cut.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Start with an empty sequence."""
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Return the text that this token completes: none for a control token or half a character."""
        return self._decoder.decode(self._tokenizer.output_bytes(token_id))

    def flush(self) -> str:
        """Return what is left when no token follows: U+FFFD for an unfinished character, else nothing."""
        return self._decoder.decode(b"", final=True)
