"""Marks users' text with a character that occurs nowhere else, so that it can be told apart after rendering.

A pure set of functions on strings. Knows nothing about templates; chat_template.py says what marks are for.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Final

# Code points that Unicode sets aside for internal use, so never text.
_CANDIDATES: Final = tuple(map(chr, range(0xFDD0, 0xFDF0)))
_BESIDE_INK: Final = re.compile(r"(?<=\S)|(?=\S)")


def unused_mark(texts: Iterable[str]) -> str | None:
    """Return a mark that occurs in none of the texts; None if they hold all of them."""
    used = set[str]().union(*(set(text) for text in texts))
    return next((mark for mark in _CANDIDATES if mark not in used), None)


def mark_all(text: str, mark: str) -> str:
    """Put a mark on both sides of every character but white space, so that trimming stays what it is."""
    return _BESIDE_INK.sub(mark, text)


def mark_lookalikes(text: str, mark: str, tokens: Sequence[str]) -> str:
    """Put marks only into what spells a token, and at the ends if more text there could complete one."""
    if tokens:
        anywhere = re.compile("(?=" + "|".join(map(re.escape, tokens)) + ")")
        inside = [match.start() + 1 for match in anywhere.finditer(text)]  # overlapping ones, too
        text = mark.join(text[start:end] for start, end in zip([0, *inside], [*inside, None], strict=True))
    ink = text.strip()
    if not any(_touches(ink, token) for token in tokens):
        return text
    start = len(text) - len(text.lstrip())
    return f"{text[:start]}{mark}{ink}{mark}{text[start + len(ink) :]}"


def _touches(ink: str, token: str) -> bool:
    """Whether a text can be the beginning, the middle or the end of a token."""
    if ink in token:
        return ink != ""
    cuts = range(1, len(token))
    return any(ink.startswith(token[cut:]) or ink.endswith(token[:cut]) for cut in cuts)
