"""Marks: what they protect, and that they come out again."""

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from stages.text.text_marks import mark_all, mark_lookalikes, unused_mark

MARK = "\ufdd0"
TOKENS = ("<|end|>", "<|e", "aaba")
TEXTS = st.text("<|end>a \n", max_size=20).map(lambda text: text.replace("n", "<|end|>"))


def test_mark_is_one_that_no_text_holds() -> None:
    assert unused_mark([]) == "\ufdd0"
    assert unused_mark(["a\ufdd0", "\ufdd1"]) == "\ufdd2"
    assert unused_mark(["".join(map(chr, range(0xFDD0, 0xFDF0)))]) is None


@settings(derandomize=True, deadline=None)
@given(text=st.text().filter(lambda text: MARK not in text))
def test_marks_come_out_again(text: str) -> None:
    assert mark_all(text, MARK).replace(MARK, "") == text
    assert mark_lookalikes(text, MARK, TOKENS).replace(MARK, "") == text


@settings(derandomize=True, deadline=None)
@given(text=TEXTS, before=st.text("<|end>a", max_size=6), after=st.text("<|end>a", max_size=6))
def test_no_token_is_found_that_touches_marked_text(text: str, before: str, after: str) -> None:
    for marked in (mark_all(text, MARK), mark_lookalikes(text, MARK, TOKENS)):
        assert not any(token in marked for token in TOKENS)
        if text.strip():
            around = before + marked + after
            found = [match.span() for token in TOKENS for match in re.finditer(re.escape(token), around)]
            inside = range(len(before), len(before) + len(marked))
            assert not any(start < inside.stop and end > inside.start for start, end in found)


def test_all_marks_leave_the_ends_to_trimming() -> None:
    marked = mark_all(" \n a b \t", MARK)
    assert marked == f" \n {MARK}a{MARK} {MARK}b{MARK} \t"
    assert marked.strip() == mark_all("a b", MARK)
    assert mark_all(" \n", MARK) == " \n"


def test_only_lookalikes_and_touching_ends_are_marked() -> None:
    assert mark_lookalikes("plain <text>", MARK, ("<|end|>",)) == "plain <text>"
    assert mark_lookalikes("a <|end|> b", MARK, ("<|end|>",)) == f"a <{MARK}|end|> b"
    assert mark_lookalikes("end|> b <", MARK, ("<|end|>",)) == f"{MARK}end|> b <{MARK}"
    assert mark_lookalikes("anything <|end|>", MARK, ()) == "anything <|end|>"
