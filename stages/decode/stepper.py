"""The engine's side of a decode step, run in its thread: plan, run, sample, commit for all running requests."""

from collections.abc import Sequence

from stages.decode.request import DecodeRequest
from stages.engine import stepping
from stages.engine.engine import Engine


def step(engine: Engine, requests: Sequence[DecodeRequest], num_speculative_tokens: int) -> None:
    """Advance every request by at least one token."""
    planned = stepping.plan([request.sequence for request in requests], num_speculative_tokens)
    logits = stepping.run(planned, engine.model, engine.cache)
    first = 0
    for request, rows in zip(requests, planned, strict=True):
        last = first + len(rows.token_ids)
        reason = stepping.commit(rows, logits[first:last], request.accept)
        if reason is not None:
            request.end(reason)
        first = last
