"""How a prompt is cut into chunks, and the address of each: the same on both sides of the pool."""

from collections.abc import Sequence

from kv_store.address import ROOT, chunk_address
from stages.common.kv_blobs import ChunkId

# One tenant per stack: prefixes are shared among all its requests.
_TENANT_SALT = b""


def chunks_of(
    request_id: str, attempt: int, prompt_token_ids: Sequence[int], chunk_tokens: int, fingerprint: bytes
) -> list[ChunkId]:
    """The chunks of a prompt, all of chunk_tokens tokens but the last."""
    chunks: list[ChunkId] = []
    parent = ROOT
    for index, start in enumerate(range(0, len(prompt_token_ids), chunk_tokens)):
        token_ids = prompt_token_ids[start : start + chunk_tokens]
        parent = chunk_address(fingerprint, _TENANT_SALT, parent, token_ids)
        chunks.append(ChunkId(request_id, attempt, index, start, len(token_ids), parent))
    return chunks
