"""What tokens spell, for the logprobs in output lines; the vocabulary is read only when a line has some.

Owns nothing but the lazy load. Knows nothing about requests.
"""

from functools import cached_property
from pathlib import Path

from stages.text.tokenizer import Tokenizer
from stages.text.vocabulary import Vocabulary


class TokenNames:
    """The bytes of each token of one model file."""

    def __init__(self, model_path: Path) -> None:
        self._model_path = model_path

    def token_bytes(self, token_id: int) -> bytes:
        """Return what a token spells."""
        return self._tokenizer.token_bytes(token_id)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer(Vocabulary.from_gguf(self._model_path))
