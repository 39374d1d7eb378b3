"""How the tokens of a request are cut into chunks, and the address of each: the same on both sides of the pool.

Prefill cuts what it computes from position 0 on. Decode goes on behind that with checkpoints: chunks of the same size
that begin at a page's edge, so the first one may hold some positions that the last chunk of prefill holds as well, with
the same bytes.
"""

from collections.abc import Sequence

from kv_store.address import ROOT, chunk_address
from kv_store.layout import PAGE_TOKENS
from stages.common.kv_blobs import ChunkId

# One tenant per stack: prefixes are shared among all its requests.
_TENANT_SALT = b""


def chunks_of(
    request_id: str, attempt: int, token_ids: Sequence[int], chunk_tokens: int, fingerprint: bytes
) -> list[ChunkId]:
    """The chunks of some tokens from position 0 on, all of chunk_tokens tokens but the last."""
    chunks: list[ChunkId] = []
    parent = ROOT
    for index, start in enumerate(range(0, len(token_ids), chunk_tokens)):
        of_chunk = token_ids[start : start + chunk_tokens]
        parent = chunk_address(fingerprint, _TENANT_SALT, parent, of_chunk)
        chunks.append(ChunkId(request_id, attempt, index, start, len(of_chunk), parent))
    return chunks


def checkpoint_start(num_prefilled_tokens: int, number: int, chunk_tokens: int) -> int:
    """The position at which a request's checkpoint `number`, counted from 0, begins."""
    return num_prefilled_tokens // PAGE_TOKENS * PAGE_TOKENS + number * chunk_tokens


def deep_chunk(
    request_id: str, attempt: int, index: int, start: int, token_ids: Sequence[int], fingerprint: bytes
) -> ChunkId:
    """The chunk of positions start to len(token_ids) - 1; its address depends on all tokens before it, too."""
    before = chunk_address(fingerprint, _TENANT_SALT, ROOT, token_ids[:start]) if start else ROOT
    address = chunk_address(fingerprint, _TENANT_SALT, before, token_ids[start:])
    return ChunkId(request_id, attempt, index, start, len(token_ids) - start, address)
