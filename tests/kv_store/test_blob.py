import dataclasses
import struct
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_store.blob import (
    HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    BlobHeader,
    BlobKind,
    BlobMeta,
    header_crc32,
    pack_header,
    unpack_header,
)
from kv_store.errors import BlobDamaged, InvalidValue

HEADER = BlobHeader(
    kind=BlobKind.PACKED,
    codec_id=0x0201,
    fingerprint=bytes(range(32)),
    content_address=bytes(range(32, 64)),
    start_token=0x0807060504030201,
    num_tokens=256,
    attempt=3,
    compression="zstd",
    payload_bytes=5000,
    stored_bytes=4000,
    crc32=0xDEADBEEF,
)

_HEADERS = st.builds(
    BlobHeader,
    kind=st.sampled_from(BlobKind),
    codec_id=st.integers(0, 2**16 - 1),
    fingerprint=st.binary(min_size=32, max_size=32),
    content_address=st.binary(min_size=32, max_size=32),
    start_token=st.integers(0, 2**64 - 1),
    num_tokens=st.integers(1, 2**32 - 1),
    attempt=st.integers(0, 2**32 - 1),
    compression=st.sampled_from(["none", "zstd"]),
    payload_bytes=st.integers(1, MAX_PAYLOAD_BYTES),
    stored_bytes=st.integers(0, 2**64 - 1),
    crc32=st.integers(0, 2**32 - 1),
)


def _signed(fields: bytes) -> bytes:
    """A header as a faulty writer would leave it: wrong fields under a correct checksum."""
    return fields + struct.pack("<I", zlib.crc32(fields))


def _with_bytes(offset: int, value: bytes) -> bytes:
    packed = bytearray(pack_header(HEADER))
    packed[offset : offset + len(value)] = value
    return _signed(bytes(packed[:-4]))


@settings(derandomize=True, deadline=None)
@given(_HEADERS)
def test_header_round_trips(header: BlobHeader) -> None:
    assert unpack_header(pack_header(header)) == header


def test_header_has_the_bytes_that_are_drawn() -> None:
    packed = pack_header(HEADER)

    assert len(packed) == HEADER_BYTES
    assert packed[:16] == b"SLKV" + b"\x01\0" + b"\x02" + b"\x01" + b"\x01\x02" + b"\0\0" + b"\x03\0\0\0"
    assert packed[16:32] == bytes(range(1, 9)) + b"\0\x01\0\0" + b"\xef\xbe\xad\xde"
    assert packed[32:96] == bytes(range(64))
    assert packed[96:124] == struct.pack("<QQ", 5000, 4000) + bytes(12)
    assert packed[124:] == struct.pack("<I", zlib.crc32(packed[:124]))


def test_header_checksum_depends_on_the_payload_checksum() -> None:
    other = dataclasses.replace(HEADER, crc32=HEADER.crc32 ^ 1)

    assert header_crc32(pack_header(HEADER)) != header_crc32(pack_header(other))


def test_every_flipped_bit_is_noticed() -> None:
    packed = pack_header(HEADER)
    for bit in range(8 * HEADER_BYTES):
        flipped = bytearray(packed)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BlobDamaged):
            unpack_header(bytes(flipped))


@pytest.mark.parametrize("size", [0, 1, HEADER_BYTES - 1, HEADER_BYTES + 1])
def test_header_of_another_length_is_refused(size: int) -> None:
    data = (pack_header(HEADER) + bytes(1))[:size]

    with pytest.raises(BlobDamaged) as damage:
        unpack_header(data, name="blob_one")

    assert damage.value.name == "blob_one"
    assert (damage.value.field, damage.value.actual, damage.value.expected) == ("header bytes", size, 128)


@pytest.mark.parametrize(
    ("offset", "value", "field", "actual"),
    [
        (0, b"SLKW", "magic", b"SLKW"),
        (4, b"\x02\0", "version", 2),
        (6, b"\0", "kind", 0),
        (6, b"\x03", "kind", 3),
        (7, b"\x02", "compression", 2),
        (10, b"\0\x01", "reserved bytes", b"\0\x01" + bytes(12)),
        (123, b"\x01", "reserved bytes", bytes(13) + b"\x01"),
        (24, bytes(4), "num_tokens", 0),
        (96, bytes(8), "payload bytes", 0),
        (96, struct.pack("<Q", MAX_PAYLOAD_BYTES + 1), "payload bytes", MAX_PAYLOAD_BYTES + 1),
    ],
)
def test_wrong_field_under_a_correct_checksum_is_named(offset: int, value: bytes, field: str, actual: object) -> None:
    with pytest.raises(BlobDamaged) as damage:
        unpack_header(_with_bytes(offset, value))

    assert (damage.value.field, damage.value.actual) == (field, actual)


def test_another_version_is_reported_as_such_whatever_follows() -> None:
    newer = b"SLKV\x02\0" + b"\xff" * (HEADER_BYTES - 6)

    with pytest.raises(BlobDamaged, match="version is 2, expected 1"):
        unpack_header(newer)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("codec_id", -1),
        ("codec_id", 2**16),
        ("start_token", -1),
        ("start_token", 2**64),
        ("num_tokens", 0),
        ("num_tokens", 2**32),
        ("attempt", -1),
        ("attempt", 2**32),
        ("fingerprint", bytes(31)),
        ("content_address", bytes(33)),
    ],
)
def test_writer_cannot_say_what_does_not_fit(field: str, value: object) -> None:
    fields: dict[str, object] = {
        "kind": BlobKind.PAGED,
        "codec_id": 1,
        "fingerprint": bytes(32),
        "content_address": bytes(32),
        "start_token": 0,
        "num_tokens": 1,
        "attempt": 0,
    }

    with pytest.raises(InvalidValue) as refusal:
        BlobMeta(**(fields | {field: value}))  # pyright: ignore[reportArgumentType]

    assert refusal.value.field == field
