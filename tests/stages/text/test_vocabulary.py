"""The vocabulary of a model file: what is read, and what is refused with a name."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGUFWriter

from stages.text.errors import VocabularyDamaged
from stages.text.vocabulary import TokenType, Vocabulary

WriteGguf = Callable[[Callable[[GGUFWriter], None]], Path]


def _drop(key: str) -> Callable[[GGUFWriter], None]:
    return lambda writer: writer.kv_data[0].pop(f"tokenizer.ggml.{key}") and None


def test_the_default_model_is_read_as_it_is(vocabulary: Vocabulary) -> None:
    assert (vocabulary.model, vocabulary.pre) == ("gpt2", "smollm")
    assert (len(vocabulary.tokens), len(vocabulary.merges)) == (49_152, 48_900)
    assert (vocabulary.spelling(vocabulary.bos_id), vocabulary.spelling(vocabulary.eos_id)) == (
        "<|im_start|>",
        "<|im_end|>",
    )
    assert vocabulary.control_ids == frozenset(range(17))
    assert not vocabulary.add_bos
    assert vocabulary.chat_template is not None
    assert "SmolLM" in vocabulary.chat_template


def test_reading_takes_less_than_a_second_of_work(model_path: Path) -> None:
    started = time.process_time()
    Vocabulary.from_gguf(model_path)
    assert time.process_time() - started < 1.0


def test_end_of_generation_is_eos_and_every_control_token_spelled_like_one(
    vocabulary: Vocabulary, write_gguf: WriteGguf
) -> None:
    assert vocabulary.end_of_generation_ids == {0, 2}
    # "<|eot_id|>" is a normal token in the tiny file: text, not an end.
    assert Vocabulary.from_gguf(write_gguf(lambda writer: None)).end_of_generation_ids == {3, 4}


def test_stated_end_of_turn_counts_as_an_end(write_gguf: WriteGguf) -> None:
    path = write_gguf(lambda writer: writer.add_eot_token_id(5))
    assert Vocabulary.from_gguf(path).end_of_generation_ids == {3, 4, 5}


def test_what_is_not_stated_is_none_or_off(write_gguf: WriteGguf) -> None:
    vocabulary = Vocabulary.from_gguf(write_gguf(lambda writer: None))
    assert vocabulary.bos_id is None
    assert vocabulary.spelling(vocabulary.bos_id) == ""
    assert vocabulary.chat_template is None
    assert not vocabulary.add_bos


def test_tokens_are_found_by_type(vocabulary: Vocabulary) -> None:
    controls = vocabulary.by_spelling(TokenType.CONTROL)
    assert controls["<|im_end|>"] == 2
    assert set(controls.values()) == vocabulary.control_ids
    assert vocabulary.by_spelling(TokenType.USER_DEFINED) == {}


@pytest.mark.parametrize("key", ["model", "pre", "tokens", "token_type", "merges"])
def test_missing_key_is_named(key: str, write_gguf: WriteGguf) -> None:
    path = write_gguf(_drop(key))
    with pytest.raises(VocabularyDamaged, match=rf"tiny\.gguf: tokenizer\.ggml\.{key} is missing"):
        Vocabulary.from_gguf(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda writer: writer.add_bos_token_id(6), r"bos_token_id is 6, but there are 6 tokens"),
        (lambda writer: writer.add_string("tokenizer.ggml.bos_token_id", "1"), r"bos_token_id is str"),
        (lambda writer: writer.add_uint32("tokenizer.ggml.add_bos_token", 1), r"add_bos_token is int"),
        (lambda writer: writer.add_array("tokenizer.ggml.extra", [1]), None),
    ],
)
def test_wrong_value_is_named(change: Callable[[GGUFWriter], None], message: str | None, write_gguf: WriteGguf) -> None:
    path = write_gguf(change)
    if message is None:
        assert Vocabulary.from_gguf(path).tokens[0] == "a"
        return
    with pytest.raises(VocabularyDamaged, match=message):
        Vocabulary.from_gguf(path)


@pytest.mark.parametrize(
    ("key", "items", "message"),
    [
        ("token_type", [1, 1], "has 2 entries for 6 tokens"),
        ("token_type", [1, 1, 1, 1, 1, 99], "unknown type: 99"),
        ("token_type", [1.0] * 6, "not int"),
        ("merges", ["ab"], "expected two tokens and a space"),
        ("merges", ["a b c"], "expected two tokens and a space"),
        ("merges", [1], "not str"),
    ],
)
def test_wrong_array_is_named(key: str, items: list[object], message: str, write_gguf: WriteGguf) -> None:
    def change(writer: GGUFWriter) -> None:
        _drop(key)(writer)
        writer.add_array(f"tokenizer.ggml.{key}", items)

    with pytest.raises(VocabularyDamaged, match=message):
        Vocabulary.from_gguf(write_gguf(change))
