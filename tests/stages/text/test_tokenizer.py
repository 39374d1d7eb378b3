"""The tokenizer against ids made elsewhere, and its rule for control tokens."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.text.errors import UnencodableText, UnknownTokenId, VocabularyUnsupported
from stages.text.prompt_parts import PromptPart
from stages.text.tokenizer import Tokenizer
from stages.text.vocabulary import TokenType, Vocabulary

REFERENCE: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "reference" / "token_ids.json").read_text(encoding="ascii")
)
TEXTS: list[dict[str, Any]] = REFERENCE["texts"]
# Bytes for which SmolLM2 has no token. 0xC0, 0xC1 and 0xF5 upwards never occur in UTF-8.
MISSING_BYTES = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)}


def test_reference_has_many_texts() -> None:
    assert len(TEXTS) >= 30


@pytest.mark.parametrize("entry", TEXTS, ids=lambda entry: entry["name"])
def test_ids_equal_the_reference(entry: dict[str, Any], tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(entry["text"], allow_special=False) == entry["ids"]
    assert tokenizer.encode(entry["text"], allow_special=True) == entry["ids_with_special"]


def test_digits_are_split_from_the_spaces_before_them(tokenizer: Tokenizer) -> None:
    # The two spaces are one token: the digit takes none of them, as a word would.
    pieces = [tokenizer.token_bytes(id_) for id_ in tokenizer.encode("a  12  b", allow_special=False)]
    assert pieces == [b"a", b"  ", b"1", b"2", b" ", b" b"]


@settings(derandomize=True, deadline=None)
@given(text=st.text())
def test_decoding_gives_the_text_back_but_for_bytes_without_a_token(text: str, tokenizer: Tokenizer) -> None:
    kept = bytes(byte for byte in text.encode() if byte not in MISSING_BYTES)
    assert tokenizer.decode(tokenizer.encode(text, allow_special=False)) == kept.decode(errors="replace")


@settings(derandomize=True, deadline=None)
@given(pieces=st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>", "<|im", "_end|>", "<", "|>", " ", "7", "é"])))
def test_user_text_never_makes_a_control_token(pieces: list[str], tokenizer: Tokenizer) -> None:
    text = "".join(pieces)
    ids = tokenizer.encode(text, allow_special=False)
    assert not tokenizer.vocabulary.control_ids.intersection(ids)
    assert tokenizer.decode(ids) == text


def test_parts_say_what_is_control(tokenizer: Tokenizer) -> None:
    parts = [PromptPart("<|im_end|>", is_token=True), PromptPart("<|im_end|>", is_token=False)]
    assert tokenizer.encode_parts(parts) == [2, *tokenizer.encode("<|im_end|>", allow_special=False)]


def test_first_token_of_the_vocabulary_can_be_a_control_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<|endoftext|>", allow_special=True) == [0]


def test_longest_of_several_control_tokens_is_taken(tiny_tokenizer: Tokenizer) -> None:
    ids = tiny_tokenizer.encode("<|endoftext|><|end|>", allow_special=True)
    assert [tiny_tokenizer.token_bytes(id_) for id_ in ids] == [b"<|endoftext|>", b"<|end|>"]


def test_shorthand_is_recognised_in_any_text_and_is_output(tiny_tokenizer: Tokenizer) -> None:
    ids = tiny_tokenizer.encode("he<think>", allow_special=False)
    assert [tiny_tokenizer.token_bytes(id_) for id_ in ids] == [b"he", b"<think>"]
    assert tiny_tokenizer.decode(ids) == "he<think>"


def test_control_token_has_a_name_but_no_output(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(2) == b"<|im_end|>"
    assert tokenizer.output_bytes(2) == b""
    assert tokenizer.decode([2, *tokenizer.encode("x", allow_special=False), 0]) == "x"


def test_bos_is_added_once_and_only_where_wanted(tokenizer: Tokenizer, tiny_tokenizer: Tokenizer) -> None:
    bos = tiny_tokenizer.vocabulary.bos_id
    assert bos is not None
    assert tiny_tokenizer.with_bos([]) == [bos]
    assert tiny_tokenizer.with_bos((5, 6)) == [bos, 5, 6]
    assert tiny_tokenizer.with_bos([bos, 5]) == [bos, 5]
    assert tokenizer.with_bos([5]) == [5]


@pytest.mark.parametrize("text", ["\ud800", "ab\udfff", "\ud83d\ude00"])
def test_half_of_a_surrogate_pair_is_refused_with_its_place(text: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(UnencodableText, match=r"is U\+D|half of a surrogate pair"):
        tokenizer.encode(text, allow_special=False)


@pytest.mark.parametrize("token_id", [-1, 49_152, 2**31])
def test_unknown_id_is_refused(token_id: int, tokenizer: Tokenizer) -> None:
    with pytest.raises(UnknownTokenId, match=f"{token_id} is not in a vocabulary of 49152 tokens"):
        tokenizer.token_bytes(token_id)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "gpt-4o"}, r"tokenizer\.ggml\.pre is 'gpt-4o', supported: smollm"),
        ({"model": "llama"}, r"tokenizer\.ggml\.model is 'llama', supported: gpt2"),
        ({"merges": (("h", "\u2603"),)}, r"tokenizer\.ggml\.merges"),
    ],
)
def test_unsupported_vocabulary_is_refused_by_name(
    changes: dict[str, Any], message: str, tiny_vocabulary: Vocabulary
) -> None:
    with pytest.raises(VocabularyUnsupported, match=message):
        Tokenizer(dataclasses.replace(tiny_vocabulary, **changes))


def test_unused_token_spells_nothing(tiny_vocabulary: Vocabulary) -> None:
    types = (TokenType.UNUSED, *tiny_vocabulary.types[1:])
    assert Tokenizer(dataclasses.replace(tiny_vocabulary, types=types)).token_bytes(0) == b""
