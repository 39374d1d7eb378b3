"""KV of a chunk on its way between an engine's pages and the pool: raw blobs out, sealed blobs in.

Owns blob names and headers. Knows nothing about streams; every call blocks on memory and belongs in a thread.
"""

import hashlib
import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from kv_store.blob import BlobHeader, BlobKind, BlobMeta, Compression
from kv_store.codecs.base import Codec
from kv_store.errors import KvStoreError
from kv_store.layout import KvLayout
from kv_store.packing import PageArrays, pack, unpack
from kv_store.pool import FilePool
from kv_store.ref import BlobRef

_OWNER = re.compile(r"_[0-9a-f]{20}_[0-9]+_")


class BlobMismatchError(ValueError):
    """A blob is whole but not the one that was asked for; it names the field, the actual and the expected value."""


@dataclass(frozen=True, slots=True)
class ChunkId:
    """Which chunk of which request."""

    request_id: str
    attempt: int
    index: int
    start_token: int
    num_tokens: int
    content_address: bytes


@dataclass(frozen=True, slots=True)
class KvFormat:
    """What both ends must agree on before a byte means anything."""

    layout: KvLayout
    codec: Codec
    fingerprint: bytes

    def write_raw(self, pool: FilePool, chunk: ChunkId, pages: Sequence[PageArrays]) -> BlobRef:
        """Copy whole pages into a new raw blob."""
        buffers = [buffer for page in pages for buffer in page.buffers()]
        return pool.write(_name("raw", chunk), self._meta(BlobKind.PAGED, chunk), buffers)

    def write_sealed(
        self, pool: FilePool, chunk: ChunkId, pages: Sequence[PageArrays], compression: Compression
    ) -> BlobRef:
        """Pack pages into a new sealed blob."""
        payload = pack(pages, self.layout, self.codec, chunk.num_tokens)
        meta = self._meta(BlobKind.PACKED, chunk)
        return pool.write(_name("kv", chunk), meta, [payload], compression=compression)

    def read_sealed(self, pool: FilePool, ref: BlobRef, chunk: ChunkId, pages: Sequence[PageArrays]) -> None:
        """Copy a sealed blob into pages.

        Raises:
            KvStoreError: The blob is missing or damaged.
            BlobMismatchError: It is another chunk, or was computed by other arithmetic.
        """
        with pool.read(ref) as (header, payload):
            self.check(header, BlobKind.PACKED, chunk)
            unpack(payload, pages, self.layout, self.codec, chunk.num_tokens)

    def check(self, header: BlobHeader, kind: BlobKind, chunk: ChunkId) -> None:
        """Hold a header against what was asked for.

        Raises:
            BlobMismatchError: They differ.
        """
        expected = self._meta(kind, chunk)
        for field in ("kind", "codec_id", "fingerprint", "content_address", "start_token", "num_tokens"):
            actual, wanted = getattr(header, field), getattr(expected, field)
            if actual != wanted:
                raise BlobMismatchError(f"{field} is {actual!r}, expected {wanted!r}")

    def _meta(self, kind: BlobKind, chunk: ChunkId) -> BlobMeta:
        return BlobMeta(
            kind=kind,
            codec_id=self.codec.codec_id,
            fingerprint=self.fingerprint,
            content_address=chunk.content_address,
            start_token=chunk.start_token,
            num_tokens=chunk.num_tokens,
            attempt=chunk.attempt,
        )


def release_all(pool: FilePool, request_id: str, attempt: int) -> int:
    """Release every blob of an attempt that nobody will read any more, and return how many there were.

    Names say whose a blob is, so this finds also what a process wrote and did not live to make known, and what a
    finished request's dropped references named.
    """
    owner, num_released = owner_of(request_id, attempt), 0
    with suppress(KvStoreError):  # what cannot be removed now is swept when the stack ends
        for name in pool.names():
            num_released += owner in name and pool.release(name)
    return num_released


def _name(kind: str, chunk: ChunkId) -> str:
    """A name nobody else uses."""
    return f"{kind}{owner_of(chunk.request_id, chunk.attempt)}{chunk.index}_{secrets.token_hex(4)}"


def owner_of(request_id: str, attempt: int) -> str:
    """The part of a blob's name that says whose it is: ids may hold any character, so their digest stands for them."""
    return f"_{hashlib.sha256(request_id.encode()).hexdigest()[:20]}_{attempt}_"


def owner_in(name: str) -> str | None:
    """The same part of a name that is there; None of a blob that does not say whose it is."""
    found = _OWNER.search(name)
    return None if found is None else found[0]
