"""One request while it decodes: what was delivered, its engine state, its text, and what the next emission holds.

Knows nothing about how steps are scheduled. The engine's thread changes it during a step, the event loop between steps.
"""

from dataclasses import dataclass, field

from pipeline.messages import PrefilledPrompt, Stamp
from pipeline.transport import AddChunk, Delivery, Effect, Transaction
from stages.common import results
from stages.common.output_text import OutputText
from stages.engine.sampling import SampledToken
from stages.engine.sequence import EndReason, Sequence


@dataclass(slots=True)
class DecodeRequest:
    """State of a request in decode.

    Attributes:
        delivery: The lease everything is committed under.
        message: What prefill sent.
        sequence: Tokens and pages.
        text: Detokeniser and stop strings, fed with every token so far.
        stamps: When it passed which boundary.
        num_checkpoints: How many of its chunks behind those of prefill are in the pool; None to write none.
        finish_reason: Set by the step that ends it.
    """

    delivery: Delivery
    message: PrefilledPrompt
    sequence: Sequence
    text: OutputText
    stamps: tuple[Stamp, ...]
    num_checkpoints: int | None = None
    finish_reason: EndReason | None = None
    _tokens: list[SampledToken] = field(default_factory=list)
    _pieces: list[str] = field(default_factory=list)
    _checkpoints: list[AddChunk] = field(default_factory=list)
    _num_emitted: int = 0
    has_moved: bool = False
    """Whether an emission of this hold has gone through."""

    def __post_init__(self) -> None:
        self._num_emitted = len(self.sequence.output_token_ids)

    @property
    def key(self) -> str:
        """What tells this hold on the request from any other, an earlier one of this process included."""
        return key_of(self.delivery)

    def accept(self, _: Sequence, token: SampledToken, reason: EndReason | None) -> EndReason | None:
        """Take a token the engine just appended; returns why the request ends with it, or None."""
        piece, stopped = self.text.push(token.token_id)
        self._tokens.append(token)
        self._pieces.append(piece)
        return "stop" if stopped else reason

    def add_checkpoint(self, effect: AddChunk) -> None:
        """Note a chunk that is in the pool; its reference goes out with the next emission."""
        assert self.num_checkpoints is not None, "one that writes none has none"
        self.num_checkpoints += 1
        self._checkpoints.append(effect)

    def end(self, reason: EndReason) -> None:
        """Note that the request has ended."""
        self.finish_reason = reason

    def emission(self, now: Stamp) -> Transaction:
        """Everything since the last emission, and the terminal entry if the request has ended."""
        effects: list[Effect] = [results.emit(self._num_emitted, self._tokens, "".join(self._pieces))]
        self._num_emitted += len(self._tokens)
        self._tokens, self._pieces = [], []
        if self.finish_reason is None:
            effects += self._checkpoints
            self._checkpoints = []
        if self.finish_reason is not None:
            rest = self.text.finish()
            effects.append(results.finish(self.finish_reason, rest, self.sequence, (*self.stamps, now)))
        return Transaction(
            self.delivery,
            self.message.request_id,
            self.message.attempt,
            tuple(effects),
            ack=self.finish_reason is not None,
        )


def key_of(delivery: Delivery) -> str:
    """Stream, entry and claim: one receive gives all its entries one nonce, and streams number them independently."""
    return f"{delivery.stream}:{delivery.entry_id}:{delivery.nonce}"
