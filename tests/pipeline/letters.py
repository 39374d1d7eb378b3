"""Dead letters for tests: messages of all stages, buried as the harness does it."""

from collections.abc import Callable
from typing import Any

from kv_store.ref import BlobRef
from pipeline.boundaries import FIRST_TOKEN, PREFILL_CLAIMED, SUBMITTED, TOKENIZED, TOKENIZER_CLAIMED
from pipeline.dead_letters import DeadLetters, LetterId
from pipeline.messages import Failure, GenerateRequest, PrefilledPrompt, RawChunk, Stamp, TokenizedPrompt, WorkItem
from pipeline.params import SamplingParams
from pipeline.transport import (
    Accepted,
    AddChunk,
    Delivery,
    Effect,
    Emit,
    Outcome,
    Plan,
    Publish,
    Transaction,
    Transport,
)
from pipeline.wire import pack
from pipeline.worker import bury
from tests.pipeline.benches import POOL, take_one

TOKEN_IDS = (5, 6, 7)
PARAMS = SamplingParams(seed=11, temperature=0.5, stop=("end",))
WAY = tuple(
    Stamp(boundary=boundary, at_us=1_000_000 + number, by=None if not number else "host:1:a")
    for number, boundary in enumerate((SUBMITTED, TOKENIZER_CLAIMED, TOKENIZED, PREFILL_CLAIMED, FIRST_TOKEN))
)


def generate(request_id: str = "r", attempt: int = 3, **fields: Any) -> GenerateRequest:
    fields = {"priority": "batch", "prompt": "a prompt", "stamps": WAY[:1]} | fields
    return GenerateRequest(request_id=request_id, attempt=attempt, model="m", params=PARAMS, speculate=False, **fields)


def tokenized(request_id: str = "r", attempt: int = 3, **fields: Any) -> TokenizedPrompt:
    fields = {"priority": "batch", "stamps": WAY[:3], "num_restarts": 2} | fields
    return TokenizedPrompt(
        request_id=request_id,
        attempt=attempt,
        prompt_token_ids=TOKEN_IDS,
        params=PARAMS,
        max_tokens=9,
        speculate=False,
        **fields,
    )


def prefilled(request_id: str = "r", attempt: int = 3) -> PrefilledPrompt:
    return PrefilledPrompt(
        request_id=request_id,
        attempt=attempt,
        priority="batch",
        prompt_token_ids=TOKEN_IDS,
        first_token_id=8,
        params=PARAMS,
        max_tokens=9,
        num_prefilled_tokens=3,
        num_chunks=1,
        chunk_tokens=256,
        fingerprint=bytes(32),
        speculate=False,
        num_restarts=2,
        stamps=WAY,
    )


def raw_chunk(request_id: str = "r", attempt: int = 3) -> RawChunk:
    ref = BlobRef(pool_id=POOL, name="raw_12345678", size_bytes=1, crc32=0)
    return RawChunk(
        request_id=request_id,
        attempt=attempt,
        priority="batch",
        chunk_index=0,
        start_token=0,
        ref=ref,
        content_address=bytes(32),
    )


MESSAGES: dict[str, Callable[..., WorkItem]] = {
    "tokenizer": generate,
    "prefill": tokenized,
    "compressor": raw_chunk,
    "decode": prefilled,
}


async def bring_to(transport: Transport, stage: str, message: WorkItem) -> Delivery:
    """Take a request's message through the queues to its stage."""
    request_id, attempt = message.request_id, message.attempt
    payload = pack(message)
    admitted = payload if stage == "tokenizer" else pack(generate(request_id, attempt, priority=message.priority))
    assert await transport.admit(request_id, message.priority, admitted, attempt) == Accepted()
    effects: dict[str, tuple[str, Effect]] = {
        "prefill": ("tokenizer", Publish("prefill", message.priority, payload)),
        "compressor": ("tokenizer", Publish("compressor", message.priority, payload)),
        "decode": ("tokenizer", Plan(1, message.priority, payload)),
    }
    delivery = await take_one(transport, "tokenizer")
    if stage in effects:
        more = (Emit(b"token 0", 0, 1), AddChunk(0, b"ref")) if stage == "decode" else ()
        await commit(transport, delivery, message, *more, effects[stage][1])
        delivery = await take_one(transport, stage)
    return delivery


async def make_letter(transport: Transport, dead: DeadLetters, stage: str, message: WorkItem) -> LetterId:
    """Bury a message in a stage, as the harness does, and return the letter's id."""
    delivery = await bring_to(transport, stage, message)
    failure = Failure(stage=stage, code="too_many_tries", message="given up after 5 tries", retryable=False)
    assert await bury(transport, delivery, failure) is Outcome.OK
    return (await dead.recent([stage]))[-1].id


async def commit(transport: Transport, delivery: Delivery, message: WorkItem, *effects: Effect) -> Outcome:
    transaction = Transaction(delivery, message.request_id, message.attempt, effects, ack=True)
    return (await transport.commit([transaction]))[0]
