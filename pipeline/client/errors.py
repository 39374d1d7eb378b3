"""What ends a client's patience; the other errors that it raises are the pipeline's (pipeline/errors.py).

SluiceError
├── NoStack      nothing says where a stack is
├── QueueFull    the door stayed closed while enqueue waited      (retryable)
└── Stalled      nothing moved while somebody waited for tokens   (retryable)
"""

from pipeline.errors import SluiceError


class NoStack(SluiceError):  # noqa: N818 - reads as the fact it states
    """Nothing says where a stack is."""

    code = "no_stack"


class QueueFull(SluiceError):  # noqa: N818 - reads as the fact it states
    """The queue was full for as long as the caller was ready to wait; nothing was enqueued."""

    retryable = True
    code = "queue_full"

    def __init__(self, request_id: str, waited_s: float) -> None:
        super().__init__(f"the queue was full for {waited_s:.0f} s; request {request_id} was not accepted")
        self.request_id = request_id
        self.waited_s = waited_s


class Stalled(SluiceError):  # noqa: N818
    """Nothing moved for so long that waiting on makes no sense; the request itself goes on, if anybody works on it."""

    retryable = True
    code = "stalled"

    def __init__(self, problem: str, stood_s: float) -> None:
        super().__init__(f"nothing moved for {stood_s:.0f} s: {problem}")
        self.stood_s = stood_s
