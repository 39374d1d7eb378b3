"""The header of a blob: what its bytes are, and how to tell that they are whole.

It owns the header's layout and checks. It knows nothing about files (pool.py), about how a payload is stored
(payload.py), or about what it means: that belongs to the codec the header names. Little-endian throughout:

      0   4s  magic "SLKV"
      4   H   version
      6   B   kind             1 paged (verbatim cache pages: codes and scales), 2 packed (a sealed chunk)
      7   B   compression      0 none, 1 zstd
      8   H   codec id
     10   2s  zeros
     12   I   attempt          of the request that wrote it
     16   Q   start token      position of the chunk's first token in the request
     24   I   number of tokens
     28   I   CRC-32 of the stored bytes
     32  32s  fingerprint      of model, codec, arithmetic and layout
     64  32s  content address
     96   Q   payload bytes    uncompressed
    104   Q   stored bytes     as they follow the header
    112  12s  zeros
    124   I   CRC-32 of bytes 0..123
    128       the stored bytes: a payload starts on a 64-byte boundary of the mapping

The header's CRC covers the payload's CRC, so it alone stands for the whole blob (BlobRef.crc32).
"""

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Literal, TypeAlias, cast

from kv_store.errors import BlobDamaged, InvalidValue

Compression: TypeAlias = Literal["none", "zstd"]

HEADER_BYTES: Final = 128
DIGEST_BYTES: Final = 32
# 512 tokens of a 70B model in fp32 are 0.3 GiB: no honest blob is larger, and a reader allocates no more.
MAX_PAYLOAD_BYTES: Final = 2**30

_MAGIC: Final = b"SLKV"
_VERSION: Final = 1
_FIELDS: Final = struct.Struct("<4sHBBH2sIQII32s32sQQ12s")
_CRC: Final = struct.Struct("<I")
_COMPRESSION_CODES: Final[dict[Compression, int]] = {"none": 0, "zstd": 1}
_COMPRESSIONS: Final[dict[int, Compression]] = {code: name for name, code in _COMPRESSION_CODES.items()}


class BlobKind(IntEnum):
    """What a payload is; the values are those of the header."""

    PAGED = 1
    PACKED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobMeta:
    """What the writer says about a blob; the store adds lengths and checksums.

    Raises:
        InvalidValue: a field does not fit the header.
    """

    kind: BlobKind
    codec_id: int
    fingerprint: bytes
    content_address: bytes
    start_token: int
    num_tokens: int
    attempt: int

    def __post_init__(self) -> None:
        _check_range("codec_id", self.codec_id, 0, 2**16 - 1)
        _check_range("start_token", self.start_token, 0, 2**64 - 1)
        _check_range("num_tokens", self.num_tokens, 1, 2**32 - 1)
        _check_range("attempt", self.attempt, 0, 2**32 - 1)
        _check_digest("fingerprint", self.fingerprint)
        _check_digest("content_address", self.content_address)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobHeader(BlobMeta):
    """Everything the header says, but for the constants and its own checksum."""

    compression: Compression
    payload_bytes: int
    stored_bytes: int
    crc32: int


def pack_header(header: BlobHeader) -> bytes:
    """The HEADER_BYTES bytes drawn at the top."""
    fields = _FIELDS.pack(
        _MAGIC,
        _VERSION,
        header.kind,
        _COMPRESSION_CODES[header.compression],
        header.codec_id,
        b"",
        header.attempt,
        header.start_token,
        header.num_tokens,
        header.crc32,
        header.fingerprint,
        header.content_address,
        header.payload_bytes,
        header.stored_bytes,
        b"",
    )
    return fields + _CRC.pack(zlib.crc32(fields))


def header_crc32(packed: bytes) -> int:
    """The checksum at the end of a packed header: what a BlobRef carries."""
    (crc,) = cast("tuple[int]", _CRC.unpack_from(packed, _FIELDS.size))
    return crc


def unpack_header(data: bytes, *, name: str = "") -> BlobHeader:
    """Read and check a header; `name` is the blob's, for the error.

    Raises:
        BlobDamaged: a field is wrong; it names the first one, its value and what was expected.
    """
    require(name, "header bytes", len(data), HEADER_BYTES)
    values = cast(
        "tuple[bytes, int, int, int, int, bytes, int, int, int, int, bytes, bytes, int, int, bytes]",
        _FIELDS.unpack_from(data),
    )
    magic, version, kind, compression, codec_id, zeros, attempt, start_token, num_tokens, crc32 = values[:10]
    fingerprint, content_address, payload_bytes, stored_bytes, more_zeros = values[10:]
    require(name, "magic", magic, _MAGIC)
    require(name, "version", version, _VERSION)
    require(name, "header crc32", zlib.crc32(data[: _FIELDS.size]), header_crc32(data))
    # Past the checksum only a faulty writer can fail; its blobs must not reach a codec either.
    require(name, "reserved bytes", zeros + more_zeros, bytes(len(zeros) + len(more_zeros)))
    _require_in(name, "kind", kind, tuple(BlobKind))
    _require_in(name, "compression", compression, tuple(_COMPRESSIONS))
    _require_in(name, "payload bytes", payload_bytes, range(1, MAX_PAYLOAD_BYTES + 1))
    _require_in(name, "num_tokens", num_tokens, range(1, 2**32))
    return BlobHeader(
        kind=BlobKind(kind),
        codec_id=codec_id,
        fingerprint=fingerprint,
        content_address=content_address,
        start_token=start_token,
        num_tokens=num_tokens,
        attempt=attempt,
        compression=_COMPRESSIONS[compression],
        payload_bytes=payload_bytes,
        stored_bytes=stored_bytes,
        crc32=crc32,
    )


def require(name: str, field: str, actual: object, expected: object) -> None:
    """Raise BlobDamaged unless `actual` equals `expected`."""
    if actual != expected:
        raise BlobDamaged(name, field, actual, expected)


def _require_in(name: str, field: str, actual: int, allowed: range | tuple[int, ...]) -> None:
    if actual not in allowed:
        raise BlobDamaged(name, field, actual, f"in {allowed}")


def _check_range(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidValue(field, value, f"{low}..{high}")


def _check_digest(field: str, value: bytes) -> None:
    if len(value) != DIGEST_BYTES:
        raise InvalidValue(field, f"{len(value)} bytes", f"{DIGEST_BYTES} bytes")
