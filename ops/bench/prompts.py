"""Plain prompts of about so many tokens, all different: what a request costs depends on lengths alone.

Owns the words. Knows nothing about requests.
"""

import random
from pathlib import Path

from stages.text.tokenizer import Tokenizer
from stages.text.vocabulary import Vocabulary

WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea kid body back"
)


class Prompts:
    """Makes prompts for one model."""

    def __init__(self, model_path: Path) -> None:
        """Read the vocabulary, which takes a second."""
        tokenizer = Tokenizer(Vocabulary.from_gguf(model_path))
        # Word by word: the pre-tokenizer cuts before each space, so the numbers add up.
        self._num_tokens = {word: len(tokenizer.encode(f" {word}", allow_special=False)) for word in WORDS.split()}

    def prompt(self, number: int, num_tokens: int) -> str:
        """Return prompt `number` of that length, or a word longer; the same number gives the same words."""
        chosen = random.Random(number)  # noqa: S311 - any words will do
        words: list[str] = []
        left = num_tokens
        while left > 0:
            words.append(chosen.choice(list(self._num_tokens)))
            left -= self._num_tokens[words[-1]]
        return "".join(f" {word}" for word in words)
