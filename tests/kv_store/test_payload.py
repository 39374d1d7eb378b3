import dataclasses
import zlib

import numpy as np
import pytest
import zstandard

from kv_store import payload
from kv_store.blob import BlobHeader, BlobKind, BlobMeta
from kv_store.errors import BlobDamaged, InvalidValue

META = BlobMeta(
    kind=BlobKind.PAGED,
    codec_id=1,
    fingerprint=bytes(32),
    content_address=bytes(32),
    start_token=0,
    num_tokens=1,
    attempt=0,
)
REPETITIVE = b"keys and values " * 500
NOISE = np.random.default_rng(0).bytes(8000)


def _joined(views: list[memoryview]) -> bytes:
    return b"".join(views)


def _compressed() -> tuple[BlobHeader, bytes]:
    header, stored = payload.encode(META, [REPETITIVE], "zstd")
    return header, _joined(stored)


def test_buffers_of_any_shape_and_type_are_joined_in_order() -> None:
    arrays = [
        np.arange(24, dtype=np.uint8).reshape(2, 3, 4),
        np.linspace(0, 1, 6, dtype=np.float16).reshape(3, 2),
        np.array(1.5, np.float32),
        np.empty((0, 4), np.int8),
    ]
    expected = b"".join(array.tobytes() for array in arrays) + b"tail"

    header, stored = payload.encode(META, [*arrays, bytearray(b"tail")], "none")

    assert _joined(stored) == expected
    assert (header.payload_bytes, header.stored_bytes) == (len(expected), len(expected))
    assert header.crc32 == zlib.crc32(expected)


def test_uncompressed_payload_is_not_copied() -> None:
    array = np.zeros((4, 8), np.float32)
    _, stored = payload.encode(META, [array], "none")

    array[0, 0] = 1.0

    assert _joined(stored) == array.tobytes()


def test_header_keeps_what_the_writer_said() -> None:
    header, _ = payload.encode(META, [REPETITIVE], "none")

    said = {field.name: getattr(header, field.name) for field in dataclasses.fields(META)}
    assert BlobMeta(**said) == META


def test_zstd_payload_is_stored_as_one_frame_and_comes_back() -> None:
    header, stored = _compressed()

    assert header.compression == "zstd"
    assert header.payload_bytes == len(REPETITIVE)
    assert header.stored_bytes == len(stored) < len(REPETITIVE)
    assert header.crc32 == zlib.crc32(stored)
    assert bytes(payload.decode(header, memoryview(stored))) == REPETITIVE


def test_zstd_frame_does_not_depend_on_how_the_payload_is_cut() -> None:
    whole, _ = payload.encode(META, [REPETITIVE], "zstd")
    cut, _ = payload.encode(META, [REPETITIVE[:100], REPETITIVE[100:]], "zstd")

    assert cut == whole


def test_payload_that_zstd_cannot_shrink_is_stored_as_it_is() -> None:
    header, stored = payload.encode(META, [NOISE], "zstd")

    assert header.compression == "none"
    assert _joined(stored) == NOISE


def test_uncompressed_payload_is_the_stored_memory_itself() -> None:
    header, stored = payload.encode(META, [REPETITIVE], "none")
    view = memoryview(_joined(stored))

    assert payload.decode(header, view) is view


def test_strided_buffer_is_refused() -> None:
    with pytest.raises(InvalidValue, match="C-contiguous"):
        payload.encode(META, [np.zeros((4, 4), np.uint8).T[:, :2]], "none")


@pytest.mark.parametrize("buffers", [[], [b""], [np.empty(0, np.float32)]])
def test_empty_payload_is_refused(buffers: list[bytes]) -> None:
    with pytest.raises(InvalidValue, match="payload bytes is 0"):
        payload.encode(META, buffers, "none")


def test_payload_above_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload, "MAX_PAYLOAD_BYTES", len(NOISE) - 1)

    with pytest.raises(InvalidValue, match=f"payload bytes is {len(NOISE)}"):
        payload.encode(META, [NOISE], "none")


@pytest.mark.parametrize(
    ("stored", "field"),
    [
        (REPETITIVE[:-1], "stored bytes"),
        (REPETITIVE + b"\0", "stored bytes"),
        (b"K" + REPETITIVE[1:], "crc32"),
        (REPETITIVE[::-1], "crc32"),
    ],
)
def test_bytes_other_than_those_stored_are_noticed(stored: bytes, field: str) -> None:
    header, _ = payload.encode(META, [REPETITIVE], "none")

    with pytest.raises(BlobDamaged) as damage:
        payload.decode(header, memoryview(stored), name="blob_one")

    assert (damage.value.name, damage.value.field) == ("blob_one", field)


def test_header_that_contradicts_itself_is_noticed() -> None:
    header, _ = payload.encode(META, [REPETITIVE], "none")
    wrong = dataclasses.replace(header, payload_bytes=header.payload_bytes + 1)

    with pytest.raises(BlobDamaged, match="payload bytes"):
        payload.decode(wrong, memoryview(REPETITIVE))


@pytest.mark.parametrize(
    ("frame", "field"),
    [
        (b"no zstd frame at all", "zstd frame"),
        (zstandard.ZstdCompressor().compress(REPETITIVE)[:-2], "zstd frame"),
        (zstandard.ZstdCompressor().compress(REPETITIVE) + b"more", "zstd frame"),
        (zstandard.ZstdCompressor().compress(REPETITIVE + b"!"), "zstd content bytes"),
        (zstandard.ZstdCompressor(write_content_size=False).compress(REPETITIVE), "zstd content bytes"),
    ],
)
def test_faulty_frame_under_a_correct_checksum_is_noticed(frame: bytes, field: str) -> None:
    header, _ = _compressed()
    faulty = dataclasses.replace(header, stored_bytes=len(frame), crc32=zlib.crc32(frame))

    with pytest.raises(BlobDamaged) as damage:
        payload.decode(faulty, memoryview(frame))

    assert damage.value.field == field


def test_frame_that_claims_to_be_huge_allocates_nothing() -> None:
    header, _ = _compressed()
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(2**24))
    faulty = dataclasses.replace(header, stored_bytes=len(bomb), crc32=zlib.crc32(bomb))

    with pytest.raises(BlobDamaged, match=f"zstd content bytes is {2**24}"):
        payload.decode(faulty, memoryview(bomb))
