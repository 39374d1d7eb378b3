"""SmolLM2's tokenizer as its publisher defines it, written for clarity: a second opinion on the ids.

Owns the pre-tokenizer's expressions and the merging. Knows nothing of the tokenizers package.
"""

# The packages are those of the other environment.
# pyright: reportMissingImports=false, reportMissingModuleSource=false

from collections.abc import Iterator
from itertools import pairwise

import gguf
import regex

DIGIT = r"(\p{N})"
WORD = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CONTROL = 3  # llama.cpp's type of a control token


class Published:
    """The tokenizer as its publisher defines it, written for clarity."""

    def __init__(self, reader: gguf.GGUFReader) -> None:
        """Read vocabulary and merges."""
        spellings: list[str] = reader.fields["tokenizer.ggml.tokens"].contents()
        types = reader.fields["tokenizer.ggml.token_type"].contents()
        merges = reader.fields["tokenizer.ggml.merges"].contents()
        self._ids = {spelling: token_id for token_id, spelling in enumerate(spellings)}
        self._ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        controls = [spelling for spelling, type_ in zip(spellings, types, strict=True) if type_ == CONTROL]
        longest_first = sorted(controls, key=len, reverse=True)
        self._controls = regex.compile("(" + "|".join(map(regex.escape, longest_first)) + ")")
        self._letters = byte_letters()

    def ids(self, text: str, *, allow_special: bool) -> list[int]:
        """Return the token ids of a text."""
        pieces = self._controls.split(text) if allow_special else [text]
        ids: list[int] = []
        for index, piece in enumerate(pieces):
            ids += [self._ids[piece]] if index % 2 else self._plain_ids(piece)
        return ids

    def _plain_ids(self, text: str) -> Iterator[int]:
        for part in regex.split(DIGIT, text):
            for word in regex.findall(WORD, part):
                letters = [self._letters[byte] for byte in word.encode("utf-8")]
                yield from (self._ids[unit] for unit in self._merged(letters))

    def _merged(self, letters: list[str]) -> list[str]:
        units = [letter for letter in letters if letter in self._ids]  # bytes without a token are left out
        while len(units) > 1:
            pairs = list(pairwise(units))
            best = min(pairs, key=lambda pair: self._ranks.get(pair, len(self._ranks)))
            if best not in self._ranks:
                break
            at = pairs.index(best)
            units[at : at + 2] = ["".join(best)]
        return units


def byte_letters() -> dict[int, str]:
    """Return GPT-2's letter for each byte."""
    letters = {byte: chr(byte) for byte in (*range(33, 127), *range(161, 173), *range(174, 256))}
    others = (byte for byte in range(256) if byte not in letters)
    return letters | {byte: chr(256 + index) for index, byte in enumerate(list(others))}
