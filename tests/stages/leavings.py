"""What processes leave behind, for the tests of whoever clears up: blobs, credits, entries of a pool that is gone."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kv_store.blob import BlobKind, BlobMeta
from kv_store.pool import FilePool
from kv_store.ref import BlobRef
from pipeline import wire
from pipeline.messages import PrefilledPrompt, RawChunk
from pipeline.params import parse_params
from pipeline.transport import Delivery, Effect, Emit, Outcome, Plan, Publish, TakeCredit, Transaction, Transport
from stages.common.kv_blobs import owner_of

AT_ONCE_S = 0.002
DEADLINE_S = 20.0  # for things that take milliseconds, on a machine that may be busy
META = BlobMeta(
    kind=BlobKind.PACKED,
    codec_id=1,
    fingerprint=bytes(32),
    content_address=bytes(32),
    start_token=0,
    num_tokens=1,
    attempt=0,
)


def blob(pool: FilePool, request_id: str, attempt: int = 0, index: int = 0) -> str:
    """Write a blob of a request, under a name as stages give, and return the name."""
    return pool.write(f"kv{owner_of(request_id, attempt)}{index}_00c0ffee", META, [b"bytes"]).name


async def commit(transport: Transport, delivery: Delivery, request_id: str, *effects: Effect, ack: bool) -> None:
    """Commit what has to happen."""
    assert await transport.commit([Transaction(delivery, request_id, 0, effects, ack)]) == [Outcome.OK]


async def with_credit(transport: Transport, request_id: str, timeout_s: float | None = None) -> Delivery:
    """Admit a request and take a credit for it."""
    await transport.admit(request_id, "batch", b"payload", timeout_s=timeout_s)
    [delivery] = await transport.receive("tokenizer", 1, 1)
    await commit(transport, delivery, request_id, TakeCredit(100, 10_000, 100), ack=False)
    return delivery


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A request whose prompt was computed in a pool: its one chunk waits for the compressor, or is sealed already."""

    message: PrefilledPrompt
    chunk: RawChunk

    @classmethod
    def of(cls, request_id: str, pool_id: str, num_restarts: int = 0) -> "Prefilled":
        message = PrefilledPrompt(
            request_id=request_id,
            priority="batch",
            prompt_token_ids=(1, 2, 3),
            first_token_id=4,
            params=parse_params({"seed": 1}),
            max_tokens=5,
            num_prefilled_tokens=3,
            num_chunks=1,
            chunk_tokens=64,
            fingerprint=bytes(32),
            num_restarts=num_restarts,
        )
        ref = BlobRef(pool_id=pool_id, name=f"raw{owner_of(request_id, 0)}0_00c0ffee", size_bytes=1, crc32=0)
        chunk = RawChunk(
            request_id=request_id, priority="batch", chunk_index=0, start_token=0, ref=ref, content_address=bytes(32)
        )
        return cls(message, chunk)

    async def put(self, transport: Transport) -> None:
        """Do what prefill does, over a transport of the pool: one token is out."""
        request_id = self.message.request_id
        delivery = await with_credit(transport, request_id)
        await commit(
            transport,
            delivery,
            request_id,
            Emit(b"token 0", 0, 1),
            Publish("compressor", "batch", wire.pack(self.chunk)),
            Plan(1, "batch", wire.pack(self.message)),
            ack=True,
        )


async def until(condition: Callable[[], Awaitable[bool] | bool]) -> None:
    """Return when the condition holds; fail when it does not come to hold."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            holds = condition()
            if holds if isinstance(holds, bool) else await holds:
                return
            await asyncio.sleep(AT_ONCE_S)
