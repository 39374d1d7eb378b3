"""Output text: whoever pushes the same tokens gets the same text, wherever somebody else stopped."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.chaos.tiny_model import write_tiny_llama
from stages.common.output_text import OutputText
from stages.text.tokenizer import Tokenizer
from stages.text.vocabulary import Vocabulary


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(Vocabulary.from_gguf(write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf")))


def written(tokenizer: Tokenizer, token_ids: bytes, stops: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    """The pieces of a text, the last of them what was held back, and whether a stop string ended it."""
    text, pieces = OutputText(tokenizer, stops), []
    for token_id in token_ids:
        piece, stopped = text.push(token_id)
        pieces.append(piece)
        if stopped:
            return pieces, True
    return [*pieces, text.finish()], False


@given(data=st.binary(max_size=30) | st.text(max_size=10).map(str.encode))
def test_pieces_together_are_the_decoded_whole(tokenizer: Tokenizer, data: bytes) -> None:
    pieces, _ = written(tokenizer, data, ("zzzz", data.decode(errors="replace") + "!"))
    assert "".join(pieces) == data.decode(errors="replace")


def test_half_a_character_waits_for_the_other_half(tokenizer: Tokenizer) -> None:
    assert written(tokenizer, "aé€😀".encode())[0] == ["a", "", "é", "", "", "€", "", "", "", "😀", ""]


def test_half_a_character_at_the_end_becomes_a_mark(tokenizer: Tokenizer) -> None:
    assert written(tokenizer, "€".encode()[:2])[0] == ["", "", "\ufffd"]


def test_a_stop_string_that_spans_tokens_and_characters_is_cut(tokenizer: Tokenizer) -> None:
    assert written(tokenizer, "one é two".encode(), ("é t",)) == (["o", "n", "e", " ", "", "", "", ""], True)


def test_a_stop_string_may_be_completed_by_what_is_left_at_the_end(tokenizer: Tokenizer) -> None:
    pieces, _ = written(tokenizer, b"ab\xe2\x82", ("b\ufffd",))
    assert "".join(pieces) == "a"


@given(data=st.text("ab", max_size=20), cut=st.integers(0, 20))
def test_a_second_reader_that_pushes_the_seen_tokens_goes_on_alike(tokenizer: Tokenizer, data: str, cut: int) -> None:
    stops = ("abba", "bbb")
    first, second = OutputText(tokenizer, stops), OutputText(tokenizer, stops)
    token_ids = data.encode()
    before = [first.push(token_id) for token_id in token_ids[:cut]]
    assert [second.push(token_id) for token_id in token_ids[:cut]] == before
    assert [first.push(t) for t in token_ids[cut:]] == [second.push(t) for t in token_ids[cut:]]
    assert first.finish() == second.finish()
