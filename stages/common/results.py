"""The records that prefill and decode append to a result stream, built from what the engine chose."""

from collections.abc import Sequence

from pipeline import wire
from pipeline.messages import Delta, FinishReason, Stamp, Terminal, TokenLogprobs, Usage
from pipeline.transport import Emit, Finish
from stages.engine.sampling import SampledToken
from stages.engine.sequence import Sequence as EngineSequence


def emit(first_index: int, tokens: Sequence[SampledToken], text: str) -> Emit:
    """Effect that appends tokens first_index, first_index + 1, ... with the text they completed."""
    with_logprobs = tokens[0].logprob is not None
    delta = Delta(
        first_index=first_index,
        token_ids=tuple(token.token_id for token in tokens),
        text=text,
        logprobs=tuple(_logprobs(token) for token in tokens) if with_logprobs else None,
    )
    return Emit(wire.pack(delta), first_index, len(tokens))


def finish(reason: FinishReason, text: str, sequence: EngineSequence, stamps: tuple[Stamp, ...]) -> Finish:
    """Effect that ends a request that produced what it should; `text` is what was held back."""
    usage = Usage(
        prompt_tokens=len(sequence.prompt_token_ids),
        completion_tokens=len(sequence.output_token_ids),
        draft_tokens=sequence.num_draft_tokens,
        accepted_tokens=sequence.num_accepted_tokens,
        recomputed_tokens=sequence.num_recomputed_tokens,
    )
    terminal = Terminal(finish_reason=reason, text=text, usage=usage, stamps=stamps)
    return Finish(wire.pack(terminal), "finished")


def _logprobs(token: SampledToken) -> TokenLogprobs:
    assert token.logprob is not None, "a request has logprobs for all of its tokens or for none"
    return TokenLogprobs(token_id=token.token_id, logprob=token.logprob, top=token.top)
