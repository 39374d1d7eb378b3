"""A request that begins again with its prompt: because its KV was lost, or because somebody replays it.

Owns what is kept of it, which is all that decides its text. Knows nothing about why.
"""

from pipeline.boundaries import SUBMITTED, TOKENIZED, TOKENIZER_CLAIMED
from pipeline.messages import PrefilledPrompt, Stamp, Stamped, TokenizedPrompt

_KEPT_BOUNDARIES = frozenset({SUBMITTED, TOKENIZER_CLAIMED, TOKENIZED})


def stamps_so_far(message: Stamped) -> tuple[Stamp, ...]:
    """The way up to prefill: what came behind was in vain, and no boundary is crossed twice."""
    return tuple(stamp for stamp in message.stamps if stamp.boundary in _KEPT_BOUNDARIES)


def begin_again(message: TokenizedPrompt | PrefilledPrompt, attempt: int, num_restarts: int = 0) -> TokenizedPrompt:
    """What prefill takes for the same text under another attempt."""
    return TokenizedPrompt(
        request_id=message.request_id,
        attempt=attempt,
        priority=message.priority,
        prompt_token_ids=message.prompt_token_ids,
        params=message.params,
        max_tokens=message.max_tokens,
        speculate=message.speculate,
        num_restarts=num_restarts,
        stamps=stamps_so_far(message),
    )
