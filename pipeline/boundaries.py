"""The boundaries that a request crosses: every name that a stamp may carry.

Owns the names and what each one means. Knows nothing about durations (timeline.py) or about who stamps. Boundaries
of a chunk carry its index; those that a process crosses say which process (`by`, its consumer name).

    client      submitted
                   |   waits in the tokenizer's stream
    tokenizer   tokenizer_claimed
                   |
                tokenized
                   |   waits in prefill's stream, and for room in decode and in the pool
    prefill     prefill_claimed
                   |
                chunk_computed 0 .. last - 1 ---> chunk_written i                       a blob is in the pool,
                   |                                    |   waits in compressor's stream   while the next chunk
                   |                  compressor  compressor_claimed i                     is computed
                   |                                    |
                   |                              sealed i
                chunk_computed last, first_token        .
                   |                                    .
                chunk_written last ---> compressor_claimed last ---> sealed last
                   |   the last one to be sealed brings the request into decode's stream;
                   |   waits there, and for a slot and pages
    decode      decode_claimed
                   |
                kv_loaded
                   |
                finished

A request that ends with token 0 goes from first_token to finished. One that fails or is cancelled has `finished` as
well, whoever ended it, behind what is known of its way. Where prefill seals its blobs itself, a chunk is written and
sealed in the same moment, and nobody in the compressor claims it.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

SUBMITTED: Final = "submitted"
"""The client sent it; the first stamp of every request."""
TOKENIZER_CLAIMED: Final = "tokenizer_claimed"
TOKENIZED: Final = "tokenized"
PREFILL_CLAIMED: Final = "prefill_claimed"
"""Prefill begins to compute it: decode and pool have room."""
CHUNK_COMPUTED: Final = "chunk_computed"
CHUNK_WRITTEN: Final = "chunk_written"
"""The chunk's blob is in the pool."""
FIRST_TOKEN: Final = "first_token"  # noqa: S105 - a token of text
"""Prefill sampled token 0; it leaves for the reader as soon as the last chunk is written."""
COMPRESSOR_CLAIMED: Final = "compressor_claimed"
SEALED: Final = "sealed"
DECODE_CLAIMED: Final = "decode_claimed"
"""Decode begins to load it: there is a slot, and pages for all of it."""
KV_LOADED: Final = "kv_loaded"
"""Its KV is in the engine's pages; the next step computes it."""
FINISHED: Final = "finished"
"""It has ended, for whatever reason; the last stamp of every request."""

CLAIMED: Final[Mapping[str, str]] = MappingProxyType(
    {"tokenizer": TOKENIZER_CLAIMED, "prefill": PREFILL_CLAIMED, "decode": DECODE_CLAIMED}
)
"""By stage; a stage of chunks claims each of them."""
OF_A_CHUNK: Final = frozenset({CHUNK_COMPUTED, CHUNK_WRITTEN, COMPRESSOR_CLAIMED, SEALED})
"""Crossed once by each chunk; the others are crossed once by the request."""
