"""Ending a request with an error its author can read."""

from pipeline import wire
from pipeline.boundaries import FINISHED
from pipeline.clock import now_us
from pipeline.messages import Failure, Stamp, Terminal
from pipeline.transport import Finish


def fail(failure: Failure, stamps: tuple[Stamp, ...] = (), by: str | None = None) -> Finish:
    """Effect that ends a request with that failure now; `stamps` is what is known of its way."""
    stamps = (*stamps, Stamp(boundary=FINISHED, at_us=now_us(), by=by))
    return Finish(wire.pack(Terminal(finish_reason="error", failure=failure, stamps=stamps)), "failed")
