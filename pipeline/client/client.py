"""The client: what people call.

Owns a connection to the queues, and which of its own answers are unfinished. Everything runs on the event loop that
calls it: no thread, no signal handler, no loop of its own, so it works in a notebook. Memory is bounded by what the
caller has in flight. Knows nothing about the processes of a stack.
"""

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Self, Unpack

from pipeline.advert import read_advert
from pipeline.batch.results import Completion, outcome_of
from pipeline.client.answers import Answer, Timing
from pipeline.client.arguments import check_id, check_ids, check_num_at_a_time, check_position
from pipeline.client.asks import Ask, NewRequest, Sampling, Submitted, make_ask, new_request_id
from pipeline.client.batches import Batches
from pipeline.client.cancel import CancelOutcome, cancel, cancel_any
from pipeline.client.errors import NoStack, QueueFull
from pipeline.client.follow import BLOCK_S, ResultReader
from pipeline.client.gather import NUM_TURNS, gather
from pipeline.client.patience import PATIENCE_S, STALL_TIMEOUT_S, Patience
from pipeline.client.submit import QUEUE_TIMEOUT_S, one_after_the_other, submit
from pipeline.clock import Monotonic, monotonic_s
from pipeline.connect import open_transport
from pipeline.errors import InvalidRequest
from pipeline.keys import Keys, Priority
from pipeline.messages import ChatMessage, Delta, Failure, Terminal
from pipeline.settings import Settings, load_settings
from pipeline.transport import Transport

NUM_CALLS = 16  # of enqueue_many and cancel_many at a time: hides the round trips, and needs few connections


class Client:
    """Enqueues requests on a stack's server and reads what comes out. Open it with connect, and close it.

    A server that goes away is waited for and reached again by itself; no token is lost or comes twice. A call that
    outlasts the client's patience raises ServerUnreachable, and may be repeated.
    """

    def __init__(
        self,
        transport: Transport,
        settings: Settings,
        *,
        patience_s: float = PATIENCE_S,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        block_s: float = BLOCK_S,
        monotonic: Monotonic = monotonic_s,
    ) -> None:
        """Use a transport that somebody else opened, and closes.

        Args:
            transport: to the server.
            settings: that the transport was opened with.
            patience_s: how long the server may be away before a call fails.
            stall_timeout_s: how long to wait for results while no request of this client moves.
            block_s: how long one read waits on the server.
            monotonic: the clock of all these.
        """
        self.transport = transport
        self.settings = settings
        self.keys = Keys(settings.namespace)
        self.monotonic = monotonic
        self._patience = Patience(patience_s, stall_timeout_s, monotonic)
        self._reader = ResultReader(transport, self._patience, block_s)
        self._unanswered: set[str] = set()
        self._owns_transport = False

    @classmethod
    async def connect(
        cls,
        url: str | None = None,
        *,
        namespace: str | None = None,
        patience_s: float = PATIENCE_S,
        stall_timeout_s: float = STALL_TIMEOUT_S,
    ) -> Self:
        """Return a client of a stack; close it, or use it in an `async with`.

        Args:
            url: the server's address; SLUICE_REDIS_URL by default, else that of the `sluice up` in this home.
            namespace: the prefix of the stack's keys; SLUICE_NAMESPACE by default, or what that `sluice up` has.
            patience_s: how long the server may be away before a call fails.
            stall_timeout_s: how long to wait for results while no request of this client moves.

        Raises:
            SettingsError: a SLUICE_* variable is wrong.
            NoStack: no address was given, and nothing says where a stack is.
            ServerError: the server does not answer, or is not fit; says why.
        """
        given = {"redis_url": url, "namespace": namespace}
        settings = load_settings(**{name: value for name, value in given.items() if value is not None})
        advert = read_advert(settings.home) if settings.redis_url is None else None
        if advert is not None:
            theirs = {"redis_url": advert.redis_url, "namespace": namespace or advert.namespace}
            settings = settings.model_copy(update=theirs)
        if settings.redis_url is None:
            raise NoStack(
                f"no `sluice up` runs in {settings.home}, SLUICE_REDIS_URL is not set, and no address was given: where "
                f"is the stack?"
            )
        transport = await open_transport(settings)
        client = cls(transport, settings, patience_s=patience_s, stall_timeout_s=stall_timeout_s)
        client._owns_transport = True
        return client

    async def close(self) -> None:
        """Release the connections; requests go on, and any other client can read them.

        What still waits on this one, a stream for example, raises TransportClosed.
        """
        if self._owns_transport:
            await self.transport.close()

    def batches(self) -> Batches:
        """Return the stack's batches: files of requests as durable jobs. Close it, or use it in an `async with`."""
        return Batches(self.transport, self.settings)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def enqueue(  # noqa: PLR0913 - one for each thing that a request has
        self,
        prompt: str | None = None,
        *,
        model: str,
        messages: Sequence[ChatMessage | Mapping[str, str]] | None = None,
        priority: Priority = "interactive",
        request_id: str | None = None,
        speculate: bool = True,
        timeout_s: float = QUEUE_TIMEOUT_S,
        time_limit_s: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> Submitted:
        """Enqueue a prompt or a chat; when this returns, the request is as durable as the server is.

        Args:
            prompt: text to continue, as it is.
            model: what the stack was started with: a model's name, or the path of its file.
            messages: a chat instead of a prompt: role (system, user, assistant) and content of each turn.
            priority: interactive goes before batch.
            request_id: an id of your own, so that the call can be repeated: while the server knows the id, a second
                call enqueues nothing, whatever it asks for, and `existed` says so.
            speculate: False turns drafts off; the text is the same.
            timeout_s: how long to wait while the queue is full.
            time_limit_s: how long the request may take from its admission on, at most a day; then it is given up in
                whatever state it is, and its end is a Failure with the code `deadline_exceeded`.
            sampling: temperature, top_p, max_tokens, seed, stop and so on (docs/client.md).

        Returns:
            The id, and the seed: the given one, or one that was drawn.

        Raises:
            InvalidRequest: an argument is wrong; `field` says which. What only the stages can judge, such as the
                prompt's length, comes as the Failure of the request.
            QueueFull: there was no room.
            ServerUnreachable: the server stayed away; the request may have been accepted.
        """
        ask = make_ask(
            prompt,
            model=model,
            messages=messages,
            speculate=speculate,
            request_id=request_id,
            time_limit_s=time_limit_s,
            **sampling,
        )
        return await self.submit(ask, priority, request_id=request_id, timeout_s=timeout_s)

    def enqueue_many(
        self, asks: Iterable[NewRequest], *, priority: Priority = "batch", timeout_s: float = QUEUE_TIMEOUT_S
    ) -> AsyncGenerator[Submitted]:
        """Enqueue asks of make_ask, a few at a time, and yield what enqueue would return for each, in their order.

        Any number of them: they are taken one by one as there is room. Where one fails, as enqueue may, those behind
        the last one that came out may have been accepted or not: give them ids and repeat.
        """
        calls = (self.submit(ask, priority, request_id=ask.request_id, timeout_s=timeout_s) for ask in asks)
        return one_after_the_other(calls, NUM_CALLS)

    async def submit(
        self,
        ask: Ask,
        priority: Priority = "interactive",
        *,
        request_id: str | None = None,
        timeout_s: float = QUEUE_TIMEOUT_S,
    ) -> Submitted:
        """Enqueue what was checked before, by make_ask or as a batch line; otherwise the same as enqueue."""
        return await submit(self.transport, self._patience, ask, priority, request_id or new_request_id(), timeout_s)

    def stream(self, request_id: str, after: int = 0) -> AsyncGenerator[Delta | Terminal]:
        """Yield what comes after the first `after` tokens: deltas as they come, and a terminal last.

        Any number of readers, from anywhere, as often as wanted, until the results expire (an hour after the end).
        A slow reader costs a page of memory: more is read when it asks for more. To go on later, pass
        `delta.first_index + len(delta.token_ids)` of the last delta. An offset inside a delta gives exactly the tokens
        from there on, and the whole text of that delta, because text cannot be cut at a token.

        Raises:
            InvalidRequest: no request can have this id or offset; at once, as everywhere.
            UnknownRequest: never accepted, expired, or lost with the server's data.
            ServerUnreachable: the server stayed away; go on later.
            Stalled: no request of this client moved for too long.
            TransportClosed: the client was closed meanwhile.
        """
        check_id(request_id)
        check_position(after)
        return self._reader.follow(request_id, after)

    async def result(self, request_id: str) -> Completion | Failure:
        """Return the whole output of a request when it has ended, or why there is none; raises as stream does."""
        return await self._reader.collect(check_id(request_id))

    def gather(
        self, request_ids: Iterable[str], num_at_a_time: int = NUM_TURNS
    ) -> AsyncGenerator[tuple[str, Completion | Failure]]:
        """Yield each id with its result, in the order in which they end.

        An unknown id comes out as a Failure with the code unknown_request, and does not stop the others.

        Raises:
            InvalidRequest: no request can have one of the ids, or num_at_a_time is none.
            ServerUnreachable: the server stayed away.
            Stalled: none of them ended for too long.
        """
        check_num_at_a_time(num_at_a_time)
        return gather(self._reader, self._patience, check_ids(request_ids), num_at_a_time)

    async def cancel(self, request_id: str) -> bool:
        """End a request now, whoever works on it; False where it had ended already.

        Its readers get a terminal with the finish reason `cancelled`; what it has emitted stays readable.

        Raises:
            InvalidRequest: no request can have this id.
            UnknownRequest: there is no such request.
            ServerUnreachable: the server stayed away.
        """
        check_id(request_id)
        cancelled = await cancel(self.transport, self._patience, self._reader, request_id)
        self._unanswered.discard(request_id)
        return cancelled

    async def cancel_many(self, request_ids: Iterable[str]) -> dict[str, CancelOutcome]:
        """Cancel requests, and return for each whether it was cancelled, had ended, or is unknown.

        Raises:
            InvalidRequest: no request can have one of the ids; none is cancelled.
            ServerUnreachable: the server stayed away.
        """
        ids = check_ids(request_ids)
        calls = (cancel_any(self.transport, self._patience, self._reader, request_id) for request_id in ids)
        outcomes = dict([pair async for pair in one_after_the_other(calls, NUM_CALLS)])
        self._unanswered.difference_update(outcomes)
        return outcomes

    async def answer(
        self, ask: Ask, priority: Priority = "interactive", on_delta: Callable[[Delta], None] = lambda _: None
    ) -> Answer:
        """Enqueue a request and return its end, with times; on_delta sees each delta as it comes.

        Interrupted, it leaves the request running and its id in `unanswered`.

        Raises:
            InvalidRequest, QueueFull, UnknownRequest, ServerUnreachable, Stalled: as enqueue and stream.
        """
        request_id = new_request_id()
        self._unanswered.add(request_id)
        try:
            submitted = await self.submit(ask, priority, request_id=request_id)
        except (InvalidRequest, QueueFull):  # it was not accepted
            self._unanswered.discard(request_id)
            raise
        timing = Timing(submitted.started_at)
        deltas: list[Delta] = []
        async for entry in self.stream(request_id):
            if isinstance(entry, Terminal):
                self._unanswered.discard(request_id)
                return Answer(submitted, outcome_of(deltas, entry), timing, entry, self.monotonic())
            timing.saw(entry, self.monotonic())
            deltas.append(entry)
            on_delta(entry)
        raise AssertionError("results end with a terminal")

    @property
    def unanswered(self) -> frozenset[str]:
        """Requests of `answer` whose end was not seen and that were not cancelled: those under way, and leftovers."""
        return frozenset(self._unanswered)
