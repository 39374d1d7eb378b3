"""Stop strings: the text ends before the first complete match, however it comes in pieces."""

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stages.text.stop_strings import StopMatcher

# Few letters, so that overlaps of stop strings with each other and themselves are the rule.
LETTERS = st.text("ab\N{SNOWMAN}", max_size=24)
STOPS = st.lists(st.text("ab\N{SNOWMAN}", min_size=1, max_size=5), max_size=4)


def _end(text: str, stops: list[str]) -> int | None:
    """Where the text ends: by the definition, in the obvious way."""
    for end in range(len(text) + 1):
        for start in range(end):
            if text[start:end] in stops:
                return start
    return None


def _run(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    emitted, hit = "", False
    for piece in pieces:
        emit, hit = matcher.push(piece)
        emitted += emit
    return emitted + matcher.flush(), hit


@settings(derandomize=True, deadline=None)
@given(text=LETTERS, stops=STOPS, cuts=st.lists(st.integers(0, 24), max_size=6))
@example(text="abab", stops=["bab", "a"], cuts=[])
@example(text="aabaab", stops=["aabab", "ab"], cuts=[3])
def test_pieces_do_not_matter_and_the_definition_holds(text: str, stops: list[str], cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(bounds)]
    end = _end(text, stops)
    expected = (text if end is None else text[:end], end is not None)
    assert _run(pieces, stops) == expected
    assert _run(list(text), stops)[0] == expected[0]


@settings(derandomize=True, deadline=None)
@given(text=LETTERS, stops=STOPS)
def test_no_more_is_held_back_than_could_begin_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    emitted, hit = matcher.push(text)
    if hit:
        return
    possible = [
        length
        for length in range(len(text) + 1)
        if length == 0 or any(stop.startswith(text[-length:]) for stop in stops)
    ]
    assert len(text) - len(emitted) == max(possible)


@settings(derandomize=True, deadline=None)
@given(text=LETTERS)
def test_without_stop_strings_everything_passes_at_once(text: str) -> None:
    assert StopMatcher([]).push(text) == (text, False)


def test_beginning_of_a_stop_string_waits_and_is_released() -> None:
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.push("Hello\n") == ("Hello", False)
    assert matcher.push("\nUs") == ("", False)
    assert matcher.push("age") == ("\n\nUsage", False)
    assert matcher.push(" \n\n") == (" ", False)
    assert matcher.flush() == "\n\n"


def test_match_across_pieces_ends_the_text_before_it() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.push("a ST") == ("a ", False)
    assert matcher.push("OP and more") == ("", True)
    assert matcher.matched == "STOP"


def test_nothing_comes_after_a_hit() -> None:
    matcher = StopMatcher(["x"])
    assert matcher.push("ax") == ("a", True)
    assert matcher.push("b") == ("", True)
    assert matcher.flush() == ""


def test_match_that_is_complete_first_counts() -> None:
    # "bcd" would begin earlier, but nobody can wait for what may never come.
    assert _run(["abcd"], ["bcd", "c"]) == ("ab", True)
    assert _run(["abcd"], ["bcd", "cd"]) == ("a", True)


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])
