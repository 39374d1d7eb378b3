"""The reverse edge: from what decode was given back to what prefill takes, under a new attempt.

A request goes back when its KV is lost: more of it than decode should compute between its steps, or all of it, with
the pool that it lay in. It keeps what was emitted. Prefill computes the KV of prompt and output so far, chooses nothing
again, and hands it over as it does for a new one.
"""

from pipeline.boundaries import SUBMITTED, TOKENIZED, TOKENIZER_CLAIMED
from pipeline.messages import PrefilledPrompt, TokenizedPrompt
from pipeline.transport import Restart
from pipeline.wire import pack

MAX_RESTARTS = 3  # blobs that are lost again and again have a cause that a further restart does not mend
_KEPT_BOUNDARIES = frozenset({SUBMITTED, TOKENIZER_CLAIMED, TOKENIZED})


def restarted(message: PrefilledPrompt) -> TokenizedPrompt:
    """What prefill computes again."""
    return TokenizedPrompt(
        request_id=message.request_id,
        attempt=message.attempt + 1,
        priority=message.priority,
        prompt_token_ids=message.prompt_token_ids,
        params=message.params,
        max_tokens=message.max_tokens,
        speculate=message.speculate,
        num_restarts=message.num_restarts + 1,
        # The way that was in vain is left out: no boundary is crossed twice.
        stamps=tuple(stamp for stamp in message.stamps if stamp.boundary in _KEPT_BOUNDARIES),
    )


def send_back(message: PrefilledPrompt) -> Restart:
    """Effect that sends a request back to prefill."""
    again = restarted(message)
    return Restart(again.attempt, pack(again))
