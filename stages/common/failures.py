"""Ending a request with an error its author can read."""

from pipeline import wire
from pipeline.messages import Failure, Stamp, Terminal
from pipeline.transport import Finish


def fail(failure: Failure, stamps: tuple[Stamp, ...] = ()) -> Finish:
    """Effect that ends a request with that failure."""
    return Finish(wire.pack(Terminal(finish_reason="error", failure=failure, stamps=stamps)), "failed")
