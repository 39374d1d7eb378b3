"""The reverse edge: from what decode was given back to what prefill takes, under a new attempt.

A request goes back when its KV is lost: more of it than decode should compute between its steps, or all of it, with
the pool that it lay in. It keeps what was emitted. Prefill computes the KV of prompt and output so far, chooses nothing
again, and hands it over as it does for a new one.
"""

from pipeline.messages import PrefilledPrompt
from pipeline.restart import begin_again
from pipeline.transport import Restart
from pipeline.wire import pack

MAX_RESTARTS = 3  # blobs that are lost again and again have a cause that a further restart does not mend


def send_back(message: PrefilledPrompt) -> Restart:
    """Effect that sends a request back to prefill."""
    again = begin_again(message, message.attempt + 1, message.num_restarts + 1)
    return Restart(again.attempt, pack(again))
