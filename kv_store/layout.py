"""The shape of KV: how many layers, heads and dimensions, and how a page is cut.

It owns the page size and the order of the axes. It knows nothing about codecs: how many bytes an element
takes is theirs to say.
"""

import hashlib
from dataclasses import dataclass
from typing import Final

from kv_store.errors import InvalidValue

# Attention walks keys in blocks of 64 absolute positions; a page is one such block, so none crosses pages.
PAGE_TOKENS: Final = 64

# Part of the fingerprint: two builds that order the axes differently must not read each other's bytes.
AXES: Final = "[layer][K|V][kv head][token][dim]"


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The dimensions that fix the meaning of each byte of a chunk, whatever its codec."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        dimensions = (
            ("num_layers", self.num_layers),
            ("num_kv_heads", self.num_kv_heads),
            ("head_dim", self.head_dim),
        )
        for field, value in dimensions:
            if value < 1:
                raise InvalidValue(field, value, "at least 1")

    def fingerprint(self) -> str:
        """The layout's identity: 64 hexadecimal digits (32 bytes), equal if and only if the layouts are."""
        text = (
            f"sluice kv layout 1: {AXES} layers={self.num_layers} kv_heads={self.num_kv_heads} "
            f"head_dim={self.head_dim} page_tokens={PAGE_TOKENS}"
        )
        return hashlib.sha256(text.encode()).hexdigest()
