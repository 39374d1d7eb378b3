"""A stack whose answers the test writes: one request at a time, delta by delta."""

from collections.abc import Sequence

from pipeline.client.client import Client
from pipeline.messages import Delta, GenerateRequest, Terminal, TokenLogprobs, Usage
from pipeline.transport import Delivery, Effect, Emit, Finish, Outcome, Transaction, Transport
from pipeline.wire import pack, unpack
from tests.pipeline.benches import take_one


def delta(first: int, size: int) -> Delta:
    """Tokens that tell where they are: token n is n + 1000, its text <n>, its logprob -n."""
    indices = range(first, first + size)
    return Delta(
        first_index=first,
        token_ids=tuple(index + 1000 for index in indices),
        text="".join(f"<{index}>" for index in indices),
        logprobs=tuple(TokenLogprobs(token_id=index + 1000, logprob=-float(index)) for index in indices),
    )


def tokens_of(entries: Sequence[Delta | Terminal]) -> list[int]:
    return [token_id for entry in entries if isinstance(entry, Delta) for token_id in entry.token_ids]


def text_of(entries: Sequence[Delta | Terminal]) -> str:
    return "".join(entry.text for entry in entries)


class Work:
    """One request in a stage's hands."""

    def __init__(self, transport: Transport, delivery: Delivery) -> None:
        self.request = unpack(delivery.payload, GenerateRequest)
        self._transport = transport
        self._delivery = delivery
        self._num_tokens = 0

    @classmethod
    async def taken(cls, transport: Transport) -> "Work":
        return cls(transport, await take_one(transport, "tokenizer"))

    async def emit(self, *sizes: int) -> Outcome:
        """Commit a delta of each size."""
        effects: list[Effect] = []
        for size in sizes:
            effects.append(Emit(pack(delta(self._num_tokens, size)), self._num_tokens, size))
            self._num_tokens += size
        return await self._commit(*effects)

    async def finish(self, text: str = "") -> Outcome:
        usage = Usage(prompt_tokens=3, completion_tokens=self._num_tokens)
        end = Terminal(finish_reason="stop", text=text, usage=usage)
        return await self._commit(Finish(pack(end), "finished"), ack=True)

    async def _commit(self, *effects: Effect, ack: bool = False) -> Outcome:
        transaction = Transaction(self._delivery, self.request.request_id, self.request.attempt, effects, ack)
        return (await self._transport.commit([transaction]))[0]


async def ended(client: Client, stage: Transport, *sizes: int, text: str = "") -> str:
    """Enqueue a request and answer it with deltas of these sizes; its id."""
    submitted = await client.enqueue("hello", model="tiny")
    work = await Work.taken(stage)
    await work.emit(*sizes)
    assert await work.finish(text) is Outcome.OK
    return submitted.request_id
