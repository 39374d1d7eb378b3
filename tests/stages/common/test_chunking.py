"""Chunks cover a prompt once, and an address stands for everything before and in its chunk."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.common.chunking import chunks_of

FINGERPRINT = b"f" * 32


@given(num_tokens=st.integers(1, 400), chunk_tokens=st.sampled_from([1, 64, 128]))
def test_chunks_cover_the_prompt_without_gap_or_overlap(num_tokens: int, chunk_tokens: int) -> None:
    chunks = chunks_of("r", 0, range(num_tokens), chunk_tokens, FINGERPRINT)
    covered = [t for chunk in chunks for t in range(chunk.start_token, chunk.start_token + chunk.num_tokens)]
    assert covered == list(range(num_tokens))
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    assert all(chunk.num_tokens == chunk_tokens for chunk in chunks[:-1])


def test_equal_prefixes_have_equal_addresses_whoever_asks() -> None:
    first = chunks_of("r", 0, [*range(64), 1], 64, FINGERPRINT)
    second = chunks_of("s", 3, [*range(64), 2], 64, FINGERPRINT)
    assert first[0].content_address == second[0].content_address
    assert first[1].content_address != second[1].content_address


@pytest.mark.parametrize("changed", [0, 63, 64])
def test_a_token_changes_its_chunks_address_and_all_later_ones(changed: int) -> None:
    prompt = list(range(192))
    other = [*prompt[:changed], 999, *prompt[changed + 1 :]]
    pairs = zip(chunks_of("r", 0, prompt, 64, FINGERPRINT), chunks_of("r", 0, other, 64, FINGERPRINT), strict=True)
    equal = [one.content_address == two.content_address for one, two in pairs]
    assert equal == [index < changed // 64 for index in range(3)]


def test_other_arithmetic_means_other_addresses() -> None:
    [one], [two] = chunks_of("r", 0, [1], 64, FINGERPRINT), chunks_of("r", 0, [1], 64, b"g" * 32)
    assert one.content_address != two.content_address
