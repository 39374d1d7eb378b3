"""The detokenizer: whole characters only, and together exactly the whole decode."""

from hypothesis import given, settings
from hypothesis import strategies as st

from stages.text.detokenizer import IncrementalDetokenizer
from stages.text.tokenizer import Tokenizer


def _pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


def _byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    of_byte = {tokenizer.token_bytes(id_): id_ for id_ in range(256)}
    return [of_byte[bytes([byte])] for byte in data]


@settings(derandomize=True, deadline=None)
@given(ids=st.lists(st.integers(0, 49_151), max_size=50))
def test_pieces_together_are_the_whole_decode(ids: list[int], tokenizer: Tokenizer) -> None:
    assert "".join(_pieces(tokenizer, ids)) == tokenizer.decode(ids)


@settings(derandomize=True, deadline=None)
@given(data=st.binary(max_size=30) | st.text().map(str.encode))
def test_any_bytes_decode_as_python_decodes_them(data: bytes, tiny_tokenizer: Tokenizer) -> None:
    pieces = _pieces(tiny_tokenizer, _byte_ids(tiny_tokenizer, data))
    assert "".join(pieces) == data.decode("utf-8", errors="replace")


@settings(derandomize=True, deadline=None)
@given(text=st.text())
def test_valid_text_never_shows_a_replacement(text: str, tiny_tokenizer: Tokenizer) -> None:
    text = text.replace("\ufffd", "")
    assert "\ufffd" not in "".join(_pieces(tiny_tokenizer, _byte_ids(tiny_tokenizer, text.encode())))


def test_character_appears_with_its_last_byte(tiny_tokenizer: Tokenizer) -> None:
    ids = _byte_ids(tiny_tokenizer, "é😀".encode())
    assert _pieces(tiny_tokenizer, ids) == ["", "é", "", "", "", "😀", ""]


def test_unfinished_character_is_replaced_at_the_end_only(tiny_tokenizer: Tokenizer) -> None:
    assert _pieces(tiny_tokenizer, _byte_ids(tiny_tokenizer, b"a\xf0\x9f\x98")) == ["a", "", "", "", "\ufffd"]


def test_byte_that_cannot_follow_ends_the_character_before(tiny_tokenizer: Tokenizer) -> None:
    assert _pieces(tiny_tokenizer, _byte_ids(tiny_tokenizer, b"\xf0\x9fA")) == ["", "", "\ufffdA", ""]


def test_control_token_adds_nothing_even_within_a_character(tiny_tokenizer: Tokenizer) -> None:
    control = tiny_tokenizer.vocabulary.eos_id
    assert control is not None
    first, second = _byte_ids(tiny_tokenizer, "é".encode())
    assert _pieces(tiny_tokenizer, [control, first, control, second, control]) == ["", "", "", "é", "", ""]


def test_flushing_twice_gives_nothing_more(tiny_tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tiny_tokenizer)
    detokenizer.push(_byte_ids(tiny_tokenizer, b"\xc3")[0])
    assert (detokenizer.flush(), detokenizer.flush()) == ("\ufffd", "")
