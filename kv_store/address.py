r"""Content addresses: equal tokens after equal prefixes, computed alike, have equal KV and one address.

It owns the hash's input, drawn below. It knows nothing about blobs or about where an address is kept.

    SHA-256 over   "sluice chunk address 1\0"
                   fingerprint       32 bytes   model, codec, arithmetic and layout
                   length of salt     4 bytes   little-endian, so that no salt can run into what follows it
                   tenant salt        n bytes   keeps one tenant from probing what another one has cached
                   parent            32 bytes   the address of the chunk before, ROOT for the first one
                   token ids        4n bytes    little-endian int32

The parent makes the address cover the whole prefix, and with it the chunk's position.
"""

import hashlib
import struct
from collections.abc import Sequence
from typing import Final

from kv_store.errors import InvalidValue

ADDRESS_BYTES: Final = 32
ROOT: Final = bytes(ADDRESS_BYTES)

_DOMAIN: Final = b"sluice chunk address 1\0"
_MAX_TOKEN_ID: Final = 2**31 - 1
_MAX_SALT_BYTES: Final = 2**16  # far above any real salt; keeps the four length bytes from overflowing


def chunk_address(fingerprint: bytes, tenant_salt: bytes, parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The 32-byte address of the chunk that holds `token_ids` after the chunk `parent` (ROOT for none).

    Raises:
        InvalidValue: a part has the wrong length, or a token id is not in 0..2**31-1.
    """
    _check_length("fingerprint", fingerprint)
    _check_length("parent", parent)
    if len(tenant_salt) > _MAX_SALT_BYTES:
        raise InvalidValue("tenant_salt", f"{len(tenant_salt)} bytes", f"at most {_MAX_SALT_BYTES} bytes")
    digest = hashlib.sha256(_DOMAIN)
    digest.update(fingerprint)
    digest.update(struct.pack("<I", len(tenant_salt)))
    digest.update(tenant_salt)
    digest.update(parent)
    digest.update(_token_bytes(token_ids))
    return digest.digest()


def _check_length(field: str, value: bytes) -> None:
    if len(value) != ADDRESS_BYTES:
        raise InvalidValue(field, f"{len(value)} bytes", f"{ADDRESS_BYTES} bytes")


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    if len(token_ids) == 0:
        raise InvalidValue("token_ids", "empty", "at least one token")
    lowest, highest = min(token_ids), max(token_ids)
    if lowest < 0 or highest > _MAX_TOKEN_ID:
        raise InvalidValue("token_ids", f"{lowest}..{highest}", f"0..{_MAX_TOKEN_ID}")
    return struct.pack(f"<{len(token_ids)}i", *token_ids)
