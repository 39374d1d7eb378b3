import hashlib
import struct

import numpy as np
import pytest

from kv_store.address import ROOT, chunk_address
from kv_store.errors import InvalidValue

FINGERPRINT = bytes(range(32))
TOKENS = (5, 0, 2**31 - 1, 700)


def test_address_hashes_exactly_what_the_drawing_says() -> None:
    parent = bytes(reversed(range(32)))

    expected = hashlib.sha256(
        b"sluice chunk address 1\0"
        + FINGERPRINT
        + b"\x04\0\0\0salt"
        + parent
        + struct.pack("<4i", 5, 0, 2**31 - 1, 700)
    ).digest()

    assert chunk_address(FINGERPRINT, b"salt", parent, TOKENS) == expected


def test_address_does_not_depend_on_the_sequence_type() -> None:
    expected = chunk_address(FINGERPRINT, b"", ROOT, TOKENS)

    assert chunk_address(FINGERPRINT, b"", ROOT, list(TOKENS)) == expected
    assert chunk_address(FINGERPRINT, b"", ROOT, np.array(TOKENS, np.int64).tolist()) == expected


def test_each_part_changes_the_address() -> None:
    other = bytes([255]) * 32
    addresses = [
        chunk_address(FINGERPRINT, b"salt", ROOT, TOKENS),
        chunk_address(other, b"salt", ROOT, TOKENS),
        chunk_address(FINGERPRINT, b"tlas", ROOT, TOKENS),
        chunk_address(FINGERPRINT, b"", ROOT, TOKENS),
        chunk_address(FINGERPRINT, b"salt", other, TOKENS),
        chunk_address(FINGERPRINT, b"salt", ROOT, TOKENS[:-1]),
        chunk_address(FINGERPRINT, b"salt", ROOT, TOKENS[::-1]),
    ]

    assert len(set(addresses)) == len(addresses)


def test_a_salt_cannot_take_over_the_bytes_that_follow_it() -> None:
    # Without the length both would hash the same bytes: salt, 32 bytes of parent, two tokens.
    moved = bytes(4)

    longer = chunk_address(FINGERPRINT, b"salt" + moved, ROOT, (0, 0))
    shorter = chunk_address(FINGERPRINT, b"salt", ROOT, (0, 0, 0))

    assert longer != shorter


def test_same_tokens_after_another_prefix_have_another_address() -> None:
    first = chunk_address(FINGERPRINT, b"", ROOT, (1, 2))
    other_first = chunk_address(FINGERPRINT, b"", ROOT, (1, 3))

    assert chunk_address(FINGERPRINT, b"", first, (4,)) != chunk_address(FINGERPRINT, b"", other_first, (4,))


@pytest.mark.parametrize("tokens", [(), (-1,), (0, 2**31)])
def test_tokens_that_are_no_int32_ids_are_refused(tokens: tuple[int, ...]) -> None:
    with pytest.raises(InvalidValue) as refusal:
        chunk_address(FINGERPRINT, b"", ROOT, tokens)

    assert refusal.value.field == "token_ids"


def test_parts_of_the_wrong_length_are_refused() -> None:
    with pytest.raises(InvalidValue, match="fingerprint is '31 bytes'"):
        chunk_address(FINGERPRINT[:-1], b"", ROOT, TOKENS)
    with pytest.raises(InvalidValue, match="parent is '0 bytes'"):
        chunk_address(FINGERPRINT, b"", b"", TOKENS)
    with pytest.raises(InvalidValue, match="tenant_salt is '65537 bytes'"):
        chunk_address(FINGERPRINT, bytes(65537), ROOT, TOKENS)
