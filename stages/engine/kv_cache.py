"""Paged KV cache: pages of 64 positions holding codes and scales, and a free list that must balance.

Owns the memory. A page holds all layers of 64 absolute positions of one sequence; sequences name their pages in a
block table. K is transposed inside a page, as attention.py reads it. Knows nothing about requests or blobs.
"""

from collections.abc import Sequence

import numpy as np

from kv_store.codecs.base import Codec
from kv_store.layout import PAGE_TOKENS, KvLayout
from kv_store.packing import PageArrays


class OutOfPagesError(RuntimeError):
    """More pages were asked for than are free; callers ask `can_allocate` first."""


class PagedKvCache:
    """All pages of one engine."""

    def __init__(self, layout: KvLayout, codec: Codec, num_pages: int) -> None:
        """Reserve address space for num_pages; memory is used as pages are written."""
        heads = (num_pages, layout.num_layers, layout.num_kv_heads)
        self.layout = layout
        self.codec = codec
        self.num_pages = num_pages
        self.keys = np.zeros((*heads, layout.head_dim, PAGE_TOKENS), codec.code_dtype)
        self.values = np.zeros((*heads, PAGE_TOKENS, layout.head_dim), codec.code_dtype)
        self.key_scales = np.zeros((*heads, PAGE_TOKENS), np.float32)
        self.value_scales = np.zeros((*heads, PAGE_TOKENS), np.float32)
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free_pages(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    def can_allocate(self, num_tokens: int) -> bool:
        """Whether a sequence of that many tokens fits now."""
        return pages_for(num_tokens) <= len(self._free)

    def allocate(self, num_tokens: int) -> list[int]:
        """Take the pages for a sequence of num_tokens; the caller owns them until it frees them.

        Raises:
            OutOfPagesError: can_allocate is False.
        """
        wanted = pages_for(num_tokens)
        if wanted > len(self._free):
            raise OutOfPagesError(f"{wanted} pages wanted, {len(self._free)} of {self.num_pages} free")
        return [self._free.pop() for _ in range(wanted)]

    def free(self, pages: list[int]) -> None:
        """Give pages back; empties the list so that they cannot be given back twice."""
        self._free.extend(reversed(pages))
        pages.clear()
        assert len(self._free) <= self.num_pages, "a page was freed twice"

    def page(self, index: int) -> PageArrays:
        """Views of one page's memory, to copy out of or into."""
        return PageArrays(self.keys[index], self.key_scales[index], self.values[index], self.value_scales[index])

    def pages_of(self, block_table: Sequence[int], start: int, num_tokens: int) -> list[PageArrays]:
        """Views of a sequence's pages that hold num_tokens positions from start on, which is a page's first one."""
        first = pages_for(start)
        return [self.page(index) for index in block_table[first : first + pages_for(num_tokens)]]


def pages_for(num_tokens: int) -> int:
    """Pages a sequence of num_tokens fills or begins."""
    return -(-num_tokens // PAGE_TOKENS)
