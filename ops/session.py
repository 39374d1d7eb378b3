"""The client's side of a request: submit it, follow its results, time them.

Owns request ids, seeds of requests that have none, and patience: no wait is endless, because a session in
which nothing at all has moved for a while gives up. Knows nothing about processes; whoever runs them watches
them (stack.py). Memory is bounded by the caller, who decides how many requests are in flight.
"""

import asyncio
import secrets
import string
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

from pipeline.batch.results import Completion, outcome_of
from pipeline.clock import Monotonic, monotonic_s, now_us
from pipeline.errors import ServerUnreachable, SluiceError
from pipeline.keys import Priority
from pipeline.messages import ChatMessage, Delta, Failure, GenerateRequest, Stamp, Terminal
from pipeline.params import MAX_SEED, SamplingParams
from pipeline.transport import Busy, Transport
from pipeline.wire import pack, unpack

BLOCK_S = 2.0  # how long one read waits; also how often the patience is looked at
STALL_TIMEOUT_S = 300.0  # far above the longest prefill, far below a night
RETRY_S = 0.25
ID_CHARS = 26  # 134 bits: nobody guesses one, and no two are equal

T = TypeVar("T")


class Stalled(SluiceError):  # noqa: N818 - reads as the fact it states
    """Nothing moved for so long that waiting on makes no sense."""

    retryable: ClassVar[bool] = True
    code: ClassVar[str] = "stalled"


class Ask(Protocol):
    """What a client wants generated; a batch line is one. Exactly one of prompt and messages is set."""

    @property
    def model(self) -> str: ...  # noqa: D102
    @property
    def prompt(self) -> str | None: ...  # noqa: D102
    @property
    def messages(self) -> tuple[ChatMessage, ...] | None: ...  # noqa: D102
    @property
    def params(self) -> SamplingParams: ...  # noqa: D102
    @property
    def speculate(self) -> bool: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class NewRequest:
    """An Ask that is not a batch line."""

    model: str
    prompt: str | None
    messages: tuple[ChatMessage, ...] | None
    params: SamplingParams
    speculate: bool = True


@dataclass(frozen=True, slots=True)
class Submitted:
    """A request that was accepted."""

    request_id: str
    seed: int
    created_s: int
    """Epoch seconds."""
    started_at: float
    """On the session's monotonic clock, before the request was sent."""


@dataclass(slots=True)
class Timing:
    """When the tokens of one request arrived at this client, on the session's monotonic clock."""

    started_at: float
    first_at: float | None = None
    last_at: float | None = None
    num_tokens: int = 0

    def saw(self, delta: Delta, at: float) -> None:
        """Take note of a delta."""
        if self.first_at is None:
            self.first_at = at
        self.last_at = at
        self.num_tokens += len(delta.token_ids)

    @property
    def ttft_ms(self) -> float | None:
        """Time to the first token, waiting in queues included."""
        return None if self.first_at is None else 1000 * (self.first_at - self.started_at)

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first."""
        if self.first_at is None or self.last_at is None or self.num_tokens < 2:
            return None
        return 1000 * (self.last_at - self.first_at) / (self.num_tokens - 1)


@dataclass(frozen=True, slots=True)
class Answer:
    """A request that has ended, one way or the other."""

    submitted: Submitted
    outcome: Completion | Failure
    timing: Timing
    held_back: str
    """Text that came with the end, after the last delta."""


class Session:
    """Requests of one client over one transport."""

    def __init__(
        self,
        transport: Transport,
        *,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        block_s: float = BLOCK_S,
        monotonic: Monotonic = monotonic_s,
    ) -> None:
        self.monotonic = monotonic
        self._transport = transport
        self._stall_timeout_s = stall_timeout_s
        self._block_s = block_s
        self._moved_at = monotonic()
        self._unfinished: set[str] = set()

    @property
    def unfinished(self) -> frozenset[str]:
        """Requests that were submitted here and whose end was not seen."""
        return frozenset(self._unfinished)

    async def submit(self, ask: Ask, priority: Priority) -> Submitted:
        """Send a request; a full queue is waited for.

        Raises:
            Stalled: the queue stayed full, or the server away, and nothing else moved meanwhile.
        """
        if not self._unfinished:
            self._moved_at = self.monotonic()  # idling is no stall
        request = _new_request(ask, priority)
        started_at = self.monotonic()
        self._unfinished.add(request.request_id)
        payload = pack(request)
        while isinstance(
            admission := await self._patiently(lambda: self._transport.admit(request.request_id, priority, payload)),
            Busy,
        ):
            self._check_stalled("the queue is full")
            await asyncio.sleep(admission.retry_after_s)
        # Exists is as good: the id is ours alone, so an earlier try got through and its answer did not.
        self._moved_at = self.monotonic()
        assert request.params.seed is not None
        return Submitted(request.request_id, request.params.seed, request.stamps[0].at_us // 1_000_000, started_at)

    async def follow(self, request_id: str) -> AsyncIterator[Delta | Terminal]:
        """Yield what comes out of a request from its first token on; the terminal is the last.

        Raises:
            UnknownRequest: the server no longer knows the request.
            Stalled: no request of this session moved for too long.
        """
        num_tokens = 0
        while True:
            after = num_tokens
            entries = await self._patiently(
                lambda after=after: self._transport.read_results(request_id, after, self._block_s)
            )
            if not entries:
                self._check_stalled("no token arrived")
            for entry in entries:
                self._moved_at = self.monotonic()
                if entry.offset is None:
                    self._unfinished.discard(request_id)
                    yield unpack(entry.data, Terminal)
                    return
                num_tokens = entry.offset
                yield unpack(entry.data, Delta)

    async def answer(self, ask: Ask, priority: Priority, on_delta: Callable[[Delta], None] = lambda _: None) -> Answer:
        """Submit a request and return its end; `on_delta` sees each delta as it comes."""
        submitted = await self.submit(ask, priority)
        timing = Timing(submitted.started_at)
        deltas: list[Delta] = []
        async for entry in self.follow(submitted.request_id):
            if isinstance(entry, Terminal):
                return Answer(submitted, outcome_of(deltas, entry), timing, entry.text)
            timing.saw(entry, self.monotonic())
            deltas.append(entry)
            on_delta(entry)
        raise AssertionError("results end with a terminal")

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat a call while the server is away; every call here may be repeated."""
        while True:
            try:
                result = await call()
            except ServerUnreachable as error:
                self._check_stalled(str(error))
                await asyncio.sleep(RETRY_S)
            else:
                _notice_cancellation()
                return result

    def _check_stalled(self, problem: str) -> None:
        stood_s = self.monotonic() - self._moved_at
        if stood_s >= self._stall_timeout_s:
            raise Stalled(f"nothing moved for {stood_s:.0f} s: {problem}; {len(self._unfinished)} unfinished")


def _notice_cancellation() -> None:
    """Raise a cancellation that was swallowed.

    On Python 3.11, asyncio.wait_for, through which the client library sends, returns instead of raising when
    what it waits for is done in the same moment. A loop of such calls would never end.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _new_request(ask: Ask, priority: Priority) -> GenerateRequest:
    seed = ask.params.seed
    if seed is None:
        seed = secrets.randbelow(MAX_SEED + 1)
    return GenerateRequest(
        request_id=new_request_id(),
        priority=priority,
        model=ask.model,
        prompt=ask.prompt,
        messages=ask.messages,
        params=ask.params.model_copy(update={"seed": seed}),
        speculate=ask.speculate,
        stamps=(Stamp(boundary="submitted", at_us=now_us()),),
    )


def new_request_id() -> str:
    """Return an id that nobody has and nobody can guess."""
    alphabet = string.ascii_lowercase + string.digits
    return "req_" + "".join(secrets.choice(alphabet) for _ in range(ID_CHARS))
