"""How a payload is stored: end to end, perhaps compressed, with a checksum of the bytes as stored.

It owns compression and the payload's checksum. It knows nothing about files or about what the bytes mean.
"""

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import zstandard

from kv_store.blob import MAX_PAYLOAD_BYTES, BlobHeader, BlobMeta, Compression, require
from kv_store.errors import BlobDamaged, InvalidValue

if TYPE_CHECKING:
    import numpy.typing as npt
    from _typeshed import ReadableBuffer

    # numpy declares the buffer protocol to type checkers only from Python 3.12 on.
    ByteSource: TypeAlias = ReadableBuffer | npt.NDArray[Any]

# KV codes are nearly incompressible: higher levels cost several times the time for little more.
_ZSTD_LEVEL: Final = 1


def encode(
    meta: BlobMeta, buffers: "Sequence[ByteSource]", compression: Compression
) -> tuple[BlobHeader, list[memoryview]]:
    """The header and the stored bytes, in order, of the payload made of `buffers` end to end.

    Uncompressed, the views are the caller's own memory: nothing is copied. With "zstd" the payload is
    compressed once, and stored compressed only if that is smaller; the header says which.

    Raises:
        InvalidValue: a buffer is not C-contiguous, or the payload is empty or above MAX_PAYLOAD_BYTES.
    """
    payload = [view for view in map(_byte_view, buffers) if view.nbytes]
    payload_bytes = _total(payload)
    if not 1 <= payload_bytes <= MAX_PAYLOAD_BYTES:
        raise InvalidValue("payload bytes", payload_bytes, f"1..{MAX_PAYLOAD_BYTES}")
    stored = payload
    if compression == "zstd":
        stored = _compress(payload, payload_bytes)
        if _total(stored) >= payload_bytes:
            compression, stored = "none", payload
    header = BlobHeader(
        kind=meta.kind,
        codec_id=meta.codec_id,
        fingerprint=meta.fingerprint,
        content_address=meta.content_address,
        start_token=meta.start_token,
        num_tokens=meta.num_tokens,
        attempt=meta.attempt,
        compression=compression,
        payload_bytes=payload_bytes,
        stored_bytes=_total(stored),
        crc32=_crc32(stored),
    )
    return header, stored


def decode(header: BlobHeader, stored: memoryview, *, name: str = "") -> memoryview:
    """Check the stored bytes and return the payload: `stored` itself where it is not compressed.

    Raises:
        BlobDamaged: the length, the checksum or the zstd frame is wrong.
    """
    require(name, "stored bytes", stored.nbytes, header.stored_bytes)
    require(name, "crc32", zlib.crc32(stored), header.crc32)
    if header.compression == "none":
        require(name, "payload bytes", header.payload_bytes, header.stored_bytes)
        return stored
    return memoryview(_decompress(header, stored, name))


def _byte_view(buffer: "ByteSource") -> memoryview:
    view = memoryview(cast("ReadableBuffer", buffer))
    if not view.c_contiguous:
        # Copying silently would hide megabytes per chunk from whoever wrote the caller.
        raise InvalidValue("buffers", f"a strided buffer of shape {view.shape}", "C-contiguous buffers")
    return view.cast("B") if view.nbytes else memoryview(b"")


def _compress(payload: Sequence[memoryview], payload_bytes: int) -> list[memoryview]:
    # No zstd checksum: ours covers the stored bytes. A compressor is not thread-safe, so each call makes one.
    compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=False, write_content_size=True)
    stream = compressor.compressobj(size=payload_bytes)
    parts = [stream.compress(view) for view in payload]
    parts.append(stream.flush())
    return [memoryview(part) for part in parts if part]


def _decompress(header: BlobHeader, stored: memoryview, name: str) -> bytes:
    try:
        # The frame's own size decides how much is allocated, so it is compared before anything is.
        content_bytes = zstandard.frame_content_size(stored)
        require(name, "zstd content bytes", content_bytes, header.payload_bytes)
        return zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise BlobDamaged(name, "zstd frame", str(error), "one whole frame") from error


def _total(views: Sequence[memoryview]) -> int:
    return sum(view.nbytes for view in views)


def _crc32(views: Sequence[memoryview]) -> int:
    crc = 0
    for view in views:
        crc = zlib.crc32(view, crc)
    return crc
