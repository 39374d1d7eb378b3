"""The messages between processes: one class a hop, and the records a client reads.

Owns their fields and bounds. Knows nothing about encoding (wire.py) or delivery (transport.py). A message
carries references to KV, never tensors.

    GenerateRequest -> tokenizer -> TokenizedPrompt -> prefill -> RawChunk -> compressor -> SealedChunk
                                                       prefill -> PrefilledPrompt -> decode
    result stream: Delta, Delta, ... Terminal
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kv_store.ref import BlobRef
from pipeline.keys import Priority
from pipeline.params import SamplingParams

MAX_ID_CHARS = 200  # a request id becomes part of key names and log lines

RequestId = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS, pattern=r"^[A-Za-z0-9_.:-]+$")]
Count = Annotated[int, Field(ge=0)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Digest = Annotated[bytes, Field(min_length=32, max_length=32)]
FinishReason = Literal["stop", "length", "cancelled", "error"]


class Message(BaseModel):
    """Frozen, closed and strict: a tuple is not a list, a bool is not a number."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Stamp(Message):
    """When a request crossed a boundary (boundaries.py), in epoch microseconds.

    `by` is the consumer name of the process that crossed it, `chunk` the index of the chunk, where it is one's.
    """

    boundary: str
    at_us: Annotated[int, Field(ge=0, lt=2**57)]  # a date that every language can write
    by: str | None = None
    chunk: Count | None = None


class Stamped(Message):
    """A message that remembers where it has been."""

    stamps: tuple[Stamp, ...] = ()

    def stamped(self, boundary: str, at_us: int, by: str | None = None, chunk: int | None = None) -> Self:
        """Return a copy with one more stamp."""
        stamps = (*self.stamps, Stamp(boundary=boundary, at_us=at_us, by=by, chunk=chunk))
        return self.model_copy(update={"stamps": stamps})


class WorkItem(Stamped):
    """What every hop carries: which request, which attempt, which queue."""

    request_id: RequestId
    attempt: Annotated[int, Field(ge=0, lt=2**32)] = 0  # epoch seconds of its admission, or a number that grows
    priority: Priority


class ChatMessage(Message):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class GenerateRequest(WorkItem):
    """What a client asks for; params.seed is always set: admission draws one where the user did not."""

    kind: Literal["generate_request"] = "generate_request"
    model: str
    prompt: str | None = None
    messages: tuple[ChatMessage, ...] | None = None
    params: SamplingParams
    speculate: bool = True

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("needs either a prompt or messages")
        if self.params.seed is None:
            raise ValueError("params.seed must be drawn before admission")
        return self


class TokenizedPrompt(WorkItem):
    """Tokenizer to prefill; max_tokens is resolved against the default and the model's length."""

    kind: Literal["tokenized_prompt"] = "tokenized_prompt"
    prompt_token_ids: Annotated[tuple[TokenId, ...], Field(min_length=1)]
    params: SamplingParams
    max_tokens: Annotated[int, Field(ge=1)]
    speculate: bool = True
    num_restarts: Count = 0


class RawChunk(WorkItem):
    """Prefill to compressor: the cache pages of one chunk, verbatim, in a blob."""

    kind: Literal["raw_chunk"] = "raw_chunk"
    chunk_index: Count
    start_token: Count
    ref: BlobRef
    content_address: Digest


class PrefilledPrompt(WorkItem):
    """Prefill to decode, delivered when all num_chunks chunks are sealed; token 0 is out already.

    The chunks hold the first num_prefilled_tokens tokens: the prompt, and of a request that was sent back to prefill
    also the output that was out by then, but for its newest token.
    """

    kind: Literal["prefilled_prompt"] = "prefilled_prompt"
    prompt_token_ids: Annotated[tuple[TokenId, ...], Field(min_length=1)]
    first_token_id: TokenId
    params: SamplingParams
    max_tokens: Annotated[int, Field(ge=1)]
    num_prefilled_tokens: Annotated[int, Field(ge=1)]
    num_chunks: Annotated[int, Field(ge=1)]
    chunk_tokens: Annotated[int, Field(ge=1)]
    fingerprint: Digest
    speculate: bool = True
    num_restarts: Count = 0


MESSAGES: Final[Mapping[str, type[WorkItem]]] = MappingProxyType(
    {"tokenizer": GenerateRequest, "prefill": TokenizedPrompt, "compressor": RawChunk, "decode": PrefilledPrompt}
)
"""What lies in the queues of each stage."""


class SealedChunk(Stamped):
    """The compressor's result, or one of decode's checkpoints; kept with the request until it ends."""

    kind: Literal["sealed_chunk"] = "sealed_chunk"
    chunk_index: Count
    ref: BlobRef
    content_address: Digest


class TokenLogprobs(Message):
    """Log probabilities at one position: of the chosen token, and of the best ones as (token id, logprob)."""

    token_id: TokenId
    logprob: float
    top: tuple[tuple[TokenId, float], ...] = ()


class Delta(Message):
    """Some output tokens; text may lag behind them while a stop string or a character is incomplete."""

    kind: Literal["delta"] = "delta"
    first_index: Count
    token_ids: Annotated[tuple[TokenId, ...], Field(min_length=1)]
    text: str
    logprobs: tuple[TokenLogprobs, ...] | None = None


class Failure(Message):
    """Why a request failed, for its author: where, a code for machines, a sentence, and whether to retry."""

    stage: str
    code: str
    message: str
    field: str | None = None
    retryable: bool


class Usage(Message):
    """Counts of tokens; draft_tokens were proposed, accepted_tokens of them came out.

    recomputed_tokens are positions that the last process to hold the request had to compute although an earlier one
    had: after a crash, or because a blob was lost.
    """

    prompt_tokens: Count
    completion_tokens: Count
    draft_tokens: Count = 0
    accepted_tokens: Count = 0
    recomputed_tokens: Count = 0


class Terminal(Stamped):
    """The last entry of every result stream; text is what was held back until the end."""

    kind: Literal["terminal"] = "terminal"
    finish_reason: FinishReason
    text: str = ""
    usage: Usage | None = None
    failure: Failure | None = None
