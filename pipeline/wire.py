"""Messages to bytes and back.

Owns the envelope and its limits. Knows nothing about what the messages mean.

    msgpack [ version: int, flag: int, body: bin ]
        flag 0: body is msgpack of the message, a map with string keys and a `kind`
        flag 1: body is one zstd frame of that, with its content size in the frame header

A reader takes the current version only, and checks sizes before it allocates.
"""

from typing import TypeVar, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]
import zstandard
from pydantic import BaseModel, TypeAdapter, ValidationError

from pipeline.errors import WireError
from pipeline.messages import Stamp

SCHEMA_VERSION = 1
MAX_BYTES = 32 * 1024 * 1024  # a prompt of a million tokens takes 5 MB; more is a mistake or an attack
COMPRESS_ABOVE_BYTES = 2048  # below, zstd saves less than a network packet and costs 20 us
_PLAIN, _ZSTD = 0, 1
_STAMPS = TypeAdapter(tuple[Stamp, ...])

M = TypeVar("M", bound=BaseModel)


def pack(message: BaseModel) -> bytes:
    """Return the bytes of a message.

    Raises:
        WireError: it would be larger than any reader accepts.
    """
    body = _encode(message.model_dump(mode="python"))
    if len(body) > MAX_BYTES:
        raise WireError("oversize", f"{len(body)} bytes, at most {MAX_BYTES} allowed")
    flag = _PLAIN
    if len(body) > COMPRESS_ABOVE_BYTES:
        # A compressor object each time: they are not thread-safe, and level 1 sets up in microseconds.
        flag, body = _ZSTD, zstandard.ZstdCompressor(level=1).compress(body)
    return _encode([SCHEMA_VERSION, flag, body])


def unpack(data: bytes, message_type: type[M]) -> M:
    """Return the message in `data`, which must be of exactly this type.

    Raises:
        WireError: anything else, with a reason of: oversize, not_msgpack, envelope, version, compression,
            kind, fields.
    """
    fields = _fields(data)
    kind = fields.get("kind")
    wanted: object = message_type.model_fields["kind"].default
    if kind != wanted:
        raise WireError("kind", f"got {str(kind)[:40]!r}, expected {wanted!r}")
    try:
        return message_type.model_validate(fields)
    except ValidationError as error:
        # Only places and types: the values may be a user's text.
        wrong = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(str(part) for part in wrong["loc"]) or "message"
        raise WireError("fields", f"{place}: {wrong['type']}") from None


def read_identity(data: bytes) -> tuple[str, int] | None:
    """Return the request id and attempt of a work item, whatever else is wrong with it; None without them."""
    try:
        fields = _fields(data)
    except WireError:
        return None
    request_id, attempt = fields.get("request_id"), fields.get("attempt")
    if isinstance(request_id, str) and type(attempt) is int:
        return request_id, attempt
    return None


def read_stamps(data: bytes) -> tuple[Stamp, ...]:
    """Return the stamps of a message, whatever else is wrong with it; none where they cannot be read."""
    try:
        return _STAMPS.validate_python(_fields(data).get("stamps"))
    except (WireError, ValidationError):
        return ()


def _fields(data: bytes) -> dict[str, object]:
    if len(data) > MAX_BYTES:
        raise WireError("oversize", f"{len(data)} bytes, at most {MAX_BYTES} allowed")
    fields = _decode(_body(_decode(data)))
    if not isinstance(fields, dict):
        raise WireError("kind", "the body is not a map")
    return cast("dict[str, object]", fields)


def _body(envelope: object) -> bytes:
    parts = cast("tuple[object, ...]", envelope) if isinstance(envelope, tuple) else ()
    if not parts or type(parts[0]) is not int:
        raise WireError("envelope", "not an array that starts with a version")
    if parts[0] != SCHEMA_VERSION:
        raise WireError("version", f"got {parts[0]}, expected {SCHEMA_VERSION}")
    if len(parts) != 3 or not isinstance(parts[2], bytes):
        raise WireError("envelope", "not [version, flag, body]")
    if parts[1] == _PLAIN and type(parts[1]) is int:
        return parts[2]
    if parts[1] == _ZSTD and type(parts[1]) is int:
        return _decompress(parts[2])
    raise WireError("envelope", f"flag {str(parts[1])[:40]!r} is not known")


def _decompress(frame: bytes) -> bytes:
    try:
        size = zstandard.frame_content_size(frame)  # -1 where the frame does not say
        if not 0 <= size <= MAX_BYTES:
            raise WireError("oversize", f"{size} bytes when decompressed, 0 to {MAX_BYTES} allowed")
        return zstandard.ZstdDecompressor().decompress(frame, max_output_size=MAX_BYTES, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WireError("compression", str(error)) from None


# msgpack ships no types; these two functions are all that is used of it.
def _encode(value: object) -> bytes:
    return cast("bytes", msgpack.packb(value, use_bin_type=True))  # pyright: ignore[reportUnknownMemberType]


def _decode(data: bytes) -> object:
    try:
        # Tuples, because messages are strict and frozen.
        decoded = msgpack.unpackb(  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
            data, raw=False, strict_map_key=True, use_list=False
        )
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise WireError("not_msgpack", type(error).__name__) from None
    return cast("object", decoded)
