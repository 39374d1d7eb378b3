"""Splitting a text at special tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.text.prompt_parts import PartSplitter

TOKENS = ("<a", "<a>", "<a>>", ">b", "(.*)")


def _split(text: str, tokens: tuple[str, ...] = TOKENS) -> list[tuple[str, bool]]:
    return [(part.text, part.is_token) for part in PartSplitter(tokens).split(text)]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", []),
        ("x<a>y", [("x", False), ("<a>", True), ("y", False)]),
        ("<a>><a><a", [("<a>>", True), ("<a>", True), ("<a", True)]),
        ("<a>b", [("<a>", True), ("b", False)]),
        ("x(.*)", [("x", False), ("(.*)", True)]),
        ("xyz", [("xyz", False)]),
    ],
)
def test_leftmost_then_longest_is_found(text: str, parts: list[tuple[str, bool]]) -> None:
    assert _split(text) == parts


def test_without_tokens_everything_is_text() -> None:
    assert _split("<a>", ()) == [("<a>", False)]
    assert _split("<a>", ("",)) == [("<a>", False)]


@settings(derandomize=True, deadline=None)
@given(text=st.text("<a>b(.*) "))
def test_parts_are_the_text_and_never_empty(text: str) -> None:
    parts = _split(text)
    assert "".join(part for part, _ in parts) == text
    assert all(part for part, _ in parts)
