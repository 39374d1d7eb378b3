"""The engine's side of a decode step, run in its thread: plan, run, sample, commit, write back what is full."""

from collections.abc import Sequence

from pipeline import faults
from stages.decode.checkpoints import Checkpoints
from stages.decode.request import DecodeRequest
from stages.engine import stepping
from stages.engine.engine import Engine


def step(
    engine: Engine, requests: Sequence[DecodeRequest], num_speculative_tokens: int, checkpoints: Checkpoints
) -> None:
    """Advance every request by at least one token."""
    faults.reach_in_thread("decode.step")
    planned = stepping.plan([request.sequence for request in requests], num_speculative_tokens)
    logits = stepping.run(planned, engine.model, engine.cache)
    first = 0
    for request, rows in zip(requests, planned, strict=True):
        last = first + len(rows.token_ids)
        reason = stepping.commit(rows, logits[first:last], request.accept)
        if reason is not None:
            request.end(reason)
        else:
            checkpoints.write_due(request)
        first = last
