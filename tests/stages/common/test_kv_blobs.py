"""KV between pages and pool: what is read back is what was written, or it is refused by name."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from kv_store.codecs.registry import codec_named
from kv_store.errors import BlobDamaged, BlobMissing
from kv_store.layout import KvLayout
from kv_store.packing import PageArrays, pack, pages_of
from kv_store.pool import FilePool
from stages.common.chunking import chunks_of
from stages.common.kv_blobs import BlobMismatchError, ChunkId, KvFormat, owner_in, owner_of, release_all
from stages.engine.kv_cache import PagedKvCache
from tests.stages.damage import DAMAGES, Damage

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=16)
FORMAT = KvFormat(LAYOUT, codec_named("fp8_e4m3"), b"f" * 32)
NUM_TOKENS = 100


def some_pages(seed: int = 1) -> list[PageArrays]:
    """Two pages of a cache with numbers in them."""
    cache, generator = PagedKvCache(LAYOUT, FORMAT.codec, 2), np.random.default_rng(seed)
    for codes in (cache.keys, cache.values):
        codes.view(np.uint8)[:] = generator.integers(0, 120, codes.view(np.uint8).shape)
    for scales in (cache.key_scales, cache.value_scales):
        scales[:] = np.exp2(generator.integers(-8, 8, scales.shape)).astype(np.float32)
    return [cache.page(0), cache.page(1)]


def some_chunk(request_id: str = "r") -> ChunkId:
    return chunks_of(request_id, 0, range(NUM_TOKENS), 128, FORMAT.fingerprint)[0]


def empty_pages() -> list[PageArrays]:
    cache = PagedKvCache(LAYOUT, FORMAT.codec, 2)
    return [cache.page(0), cache.page(1)]


@pytest.fixture
def pool(tmp_path: Path) -> FilePool:
    return FilePool.open(tmp_path / "pool", 10_000_000)


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_sealed_chunk_comes_back_bit_for_bit(pool: FilePool, compression: str) -> None:
    written, read = some_pages(), empty_pages()
    ref = FORMAT.write_sealed(pool, some_chunk(), written, "zstd" if compression == "zstd" else "none")
    FORMAT.read_sealed(pool, ref, some_chunk(), read)
    assert pack(read, LAYOUT, FORMAT.codec, NUM_TOKENS) == pack(written, LAYOUT, FORMAT.codec, NUM_TOKENS)


def test_a_raw_blob_is_the_pages_as_they_are(pool: FilePool) -> None:
    written = some_pages()
    ref = FORMAT.write_raw(pool, some_chunk(), written)
    with pool.read(ref) as (_, payload):
        read = pages_of(payload, LAYOUT, FORMAT.codec, NUM_TOKENS)
        assert [page.buffers() for page in read] == [page.buffers() for page in written]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_chunk_is_refused(pool: FilePool, tmp_path: Path, damage: Damage) -> None:
    ref = FORMAT.write_sealed(pool, some_chunk(), some_pages(), "none")
    other = FORMAT.write_sealed(pool, some_chunk("s"), some_pages(2), "none")
    damage(tmp_path / "pool", ref.name, other.name)
    with pytest.raises((BlobDamaged, BlobMissing)):
        FORMAT.read_sealed(pool, ref, some_chunk(), empty_pages())


@pytest.mark.parametrize(
    ("field", "value"), [("content_address", b"b" * 32), ("start_token", 64), ("num_tokens", NUM_TOKENS - 1)]
)
def test_another_chunk_than_the_one_asked_for_is_refused_by_field(pool: FilePool, field: str, value: object) -> None:
    ref = FORMAT.write_sealed(pool, some_chunk(), some_pages(), "none")
    wanted = dataclasses.replace(some_chunk(), **{field: value})
    with pytest.raises(BlobMismatchError, match=f"^{field} is"):
        FORMAT.read_sealed(pool, ref, wanted, empty_pages())


@pytest.mark.parametrize(
    ("field", "reader"),
    [
        ("fingerprint", dataclasses.replace(FORMAT, fingerprint=b"g" * 32)),
        ("codec_id", dataclasses.replace(FORMAT, codec=codec_named("int8"))),
    ],
)
def test_a_chunk_of_other_arithmetic_is_refused_by_field(pool: FilePool, field: str, reader: KvFormat) -> None:
    ref = FORMAT.write_sealed(pool, some_chunk(), some_pages(), "none")
    with pytest.raises(BlobMismatchError, match=f"^{field} is"):
        reader.read_sealed(pool, ref, some_chunk(), empty_pages())


def test_a_raw_blob_is_not_taken_for_a_sealed_one(pool: FilePool) -> None:
    ref = FORMAT.write_raw(pool, some_chunk(), some_pages())
    with pytest.raises(BlobMismatchError, match=r"^kind is"):
        FORMAT.read_sealed(pool, ref, some_chunk(), empty_pages())


def test_all_blobs_of_a_request_are_released_and_no_others(pool: FilePool) -> None:
    for _ in range(2):
        FORMAT.write_raw(pool, some_chunk("gone"), some_pages())
    FORMAT.write_sealed(pool, some_chunk("gone"), some_pages(), "none")
    kept = [FORMAT.write_raw(pool, some_chunk("kept"), some_pages()).name]
    kept.append(FORMAT.write_raw(pool, dataclasses.replace(some_chunk("gone"), attempt=1), some_pages()).name)
    assert release_all(pool, "gone", 0) == 3
    assert pool.names() == sorted(kept)
    assert release_all(pool, "gone", 0) == 0


def test_request_ids_of_any_characters_make_names(pool: FilePool) -> None:
    FORMAT.write_raw(pool, some_chunk("A.b:c-" * 30), some_pages())
    assert pool.usage().num_blobs == 1


def test_the_name_of_a_blob_says_whose_it_is(pool: FilePool) -> None:
    chunk = dataclasses.replace(some_chunk("batch_1-7:x"), attempt=12)
    for ref in (FORMAT.write_raw(pool, chunk, some_pages()), FORMAT.write_sealed(pool, chunk, some_pages(), "none")):
        assert owner_in(ref.name) == owner_of("batch_1-7:x", 12)
    assert owner_of("batch_1-7:x", 1) not in ref.name
    assert owner_in("kv_of_nobody_1") is None
