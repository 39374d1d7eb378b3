"""A stage that answers everything by itself: each word of the prompt, in capitals, is one token.

As a process (`answering.py`), it stands in for a whole stack behind a real server.
"""

import asyncio
import os
import signal

from pipeline.connect import open_transport
from pipeline.messages import Delta, Failure, GenerateRequest, Terminal, Usage
from pipeline.settings import load_settings
from pipeline.transport import Delivery, Effect, Emit, Finish, Transaction, Transport
from pipeline.wire import pack, unpack

LEASE_PAGE = 8
FAIL_WORD, CRASH_WORD, HANG_WORD = "FAIL", "CRASH", "HANG"


async def answer_one(transport: Transport, delivery: Delivery) -> None:
    """Emit a delta for each word, and finish with the last one."""
    request = unpack(delivery.payload, GenerateRequest)
    text = request.prompt if request.messages is None else request.messages[-1].content
    assert text is not None
    if CRASH_WORD in text:
        os.kill(os.getpid(), signal.SIGKILL)
    if HANG_WORD in text:
        return
    words = [] if FAIL_WORD in text else text.upper().split()[: request.params.max_tokens]
    for index, word in enumerate(words[:-1]):
        await commit(transport, delivery, request, (emit(index, word),), ack=False)
    last = tuple(emit(len(words) - 1, words[-1]) for _ in words[:1])
    finish = Finish(pack(terminal(request, len(words))), "failed" if not words else "finished")
    await commit(transport, delivery, request, (*last, finish), ack=True)


async def commit(
    transport: Transport, delivery: Delivery, request: GenerateRequest, effects: tuple[Effect, ...], *, ack: bool
) -> None:
    await transport.commit([Transaction(delivery, request.request_id, request.attempt, effects, ack=ack)])


def emit(index: int, word: str) -> Emit:
    return Emit(pack(Delta(first_index=index, token_ids=(index,), text=word + " ")), index, 1)


def terminal(request: GenerateRequest, num_tokens: int) -> Terminal:
    if not num_tokens:
        failure = Failure(stage="tokenizer", code="invalid_request", message="no", field="prompt", retryable=False)
        return Terminal(finish_reason="error", failure=failure)
    usage = Usage(prompt_tokens=3, completion_tokens=num_tokens, draft_tokens=2, accepted_tokens=1)
    return Terminal(finish_reason="stop", text=f"seed {request.params.seed}", usage=usage)


async def serve(transport: Transport, stopping: asyncio.Event | None = None) -> None:
    """Answer until told to stop, or cancelled."""
    while stopping is None or not stopping.is_set():
        for delivery in await transport.receive("tokenizer", LEASE_PAGE, block_s=0.2):
            await answer_one(transport, delivery)


async def main() -> None:
    transport = await open_transport(load_settings())
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    await transport.register("tokenizer", b"\x80", 60)
    await serve(transport, stopping)
    await transport.close()


if __name__ == "__main__":
    asyncio.run(main())
