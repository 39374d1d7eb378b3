"""Between the pages of an engine and the bytes of a blob, without losing a bit.

A *paged* payload is what prefill copies out of its cache: whole 64-token pages, K transposed, scales in fp32. A
*packed* payload is what waits in the pool and what decode reads: exactly the chunk's tokens, narrow scales.

    paged   per page:  keys [L][KV][D][64]  values [L][KV][64][D]  key scales, value scales [L][KV][64] fp32
    packed             [L][K|V][KV][token][D] codes, then [L][K|V][KV][token] scales in the codec's packed type

Codes are never derived again here: packing moves them. Knows nothing about files or tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kv_store.codecs.base import Codec
from kv_store.layout import PAGE_TOKENS, KvLayout

Codes = NDArray[Any]
Scales = NDArray[np.float32]
Buffer = memoryview | bytes


@dataclass(frozen=True, slots=True)
class PageArrays:
    """One page's arrays: keys [L, KV, D, 64], values [L, KV, 64, D], scales [L, KV, 64]."""

    keys: Codes
    key_scales: Scales
    values: Codes
    value_scales: Scales

    def buffers(self) -> list[memoryview]:
        """Its bytes in the order of a paged payload; no copy."""
        arrays = (self.keys, self.values, self.key_scales, self.value_scales)
        return [array.data.cast("B") for array in arrays]


class PayloadSizeError(ValueError):
    """A payload has another size than its layout, codec and token count say."""


def paged_bytes(layout: KvLayout, codec: Codec, num_tokens: int) -> int:
    """Size of the paged payload of a chunk."""
    return _page_bytes(layout, codec) * _num_pages(num_tokens)


def packed_bytes(layout: KvLayout, codec: Codec, num_tokens: int) -> int:
    """Size of the packed payload of a chunk."""
    rows = layout.num_layers * 2 * layout.num_kv_heads * num_tokens
    return rows * (layout.head_dim * codec.code_dtype.itemsize + codec.packed_scale_dtype.itemsize)


def pages_of(payload: Buffer, layout: KvLayout, codec: Codec, num_tokens: int) -> list[PageArrays]:
    """View a paged payload as pages.

    Raises:
        PayloadSizeError: The payload is not that long.
    """
    _check_size(payload, paged_bytes(layout, codec, num_tokens))
    size = _page_bytes(layout, codec)
    return [_page_at(payload, index * size, layout, codec) for index in range(_num_pages(num_tokens))]


def pack(pages: Sequence[PageArrays], layout: KvLayout, codec: Codec, num_tokens: int) -> bytes:
    """Packed payload of a chunk that lies in `pages` (its last page may be partly filled)."""
    codes = np.empty((layout.num_layers, 2, layout.num_kv_heads, num_tokens, layout.head_dim), codec.code_dtype)
    scales = np.empty(codes.shape[:-1], np.float32)
    for index, page in enumerate(pages):
        first = index * PAGE_TOKENS
        n = min(PAGE_TOKENS, num_tokens - first)
        span = slice(first, first + n)
        codes[:, 0, :, span] = page.keys[:, :, :, :n].swapaxes(2, 3)
        codes[:, 1, :, span] = page.values[:, :, :n]
        scales[:, 0, :, span] = page.key_scales[:, :, :n]
        scales[:, 1, :, span] = page.value_scales[:, :, :n]
    return codes.tobytes() + codec.pack_scales(scales).tobytes()


def unpack(payload: Buffer, pages: Sequence[PageArrays], layout: KvLayout, codec: Codec, num_tokens: int) -> None:
    """Write a packed payload into an engine's pages.

    Raises:
        PayloadSizeError: The payload is not that long.
    """
    _check_size(payload, packed_bytes(layout, codec, num_tokens))
    shape = (layout.num_layers, 2, layout.num_kv_heads, num_tokens, layout.head_dim)
    num_codes = int(np.prod(shape))
    codes = np.frombuffer(payload, codec.code_dtype, num_codes).reshape(shape)
    packed_scales = np.frombuffer(payload, codec.packed_scale_dtype, offset=codes.nbytes)
    scales = codec.unpack_scales(packed_scales).reshape(shape[:-1])
    for index, page in enumerate(pages):
        first = index * PAGE_TOKENS
        n = min(PAGE_TOKENS, num_tokens - first)
        span = slice(first, first + n)
        page.keys[:, :, :, :n] = codes[:, 0, :, span].swapaxes(2, 3)
        page.values[:, :, :n] = codes[:, 1, :, span]
        page.key_scales[:, :, :n] = scales[:, 0, :, span]
        page.value_scales[:, :, :n] = scales[:, 1, :, span]


def _num_pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_TOKENS)


def _page_bytes(layout: KvLayout, codec: Codec) -> int:
    rows = layout.num_layers * layout.num_kv_heads * PAGE_TOKENS
    return 2 * rows * (layout.head_dim * codec.code_dtype.itemsize + np.dtype(np.float32).itemsize)


def _page_at(payload: Buffer, offset: int, layout: KvLayout, codec: Codec) -> PageArrays:
    heads = (layout.num_layers, layout.num_kv_heads)
    num_codes = layout.num_layers * layout.num_kv_heads * PAGE_TOKENS * layout.head_dim
    num_scales = layout.num_layers * layout.num_kv_heads * PAGE_TOKENS
    keys = np.frombuffer(payload, codec.code_dtype, num_codes, offset)
    values = np.frombuffer(payload, codec.code_dtype, num_codes, offset + keys.nbytes)
    key_scales = np.frombuffer(payload, np.float32, num_scales, offset + 2 * keys.nbytes)
    value_scales = np.frombuffer(payload, np.float32, num_scales, offset + 2 * keys.nbytes + key_scales.nbytes)
    return PageArrays(
        keys=keys.reshape(*heads, layout.head_dim, PAGE_TOKENS),
        key_scales=key_scales.reshape(*heads, PAGE_TOKENS),
        values=values.reshape(*heads, PAGE_TOKENS, layout.head_dim),
        value_scales=value_scales.reshape(*heads, PAGE_TOKENS),
    )


def _check_size(payload: Buffer, expected: int) -> None:
    if len(payload) != expected:
        raise PayloadSizeError(f"payload has {len(payload)} bytes, expected {expected}")
