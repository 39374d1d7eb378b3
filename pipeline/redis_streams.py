"""The transport over Redis or Valkey streams.

Owns the conversation with the server: which script with which keys, and how replies are read. Knows nothing
about messages, and little about atomicity: what happens together is written in scripts/*.lua.

Two clients: `commands` answers at once, `readers` blocks, so that a waiting reader never delays a commit.
"""

import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast

import structlog
from redis.asyncio import Redis

from pipeline.clock import Monotonic, monotonic_s
from pipeline.commit_args import CommitArgs
from pipeline.errors import ServerError, StateDamaged, TransportClosed, UnknownRequest
from pipeline.keys import (
    ADMIT_RETRY_S,
    DEAD_TTL_S,
    HANDBACK,
    MAX_DEAD,
    MAX_FINISHED,
    POOLS_TTL_S,
    PROC_INDEX_TTL_S,
    Keys,
    Lane,
    Priority,
)
from pipeline.queue_state import QueueState
from pipeline.redis_calls import Arg, RedisCalls, command
from pipeline.redis_durable import script_on_disk
from pipeline.redis_receive import BLOCK_SLICE_S, StageReceiver
from pipeline.redis_results import ResultReads
from pipeline.renewal import RedisRenewal, fences
from pipeline.time_limit import time_limit_ms
from pipeline.transport import (
    Accepted,
    Admission,
    Busy,
    Delivery,
    Exists,
    FinishedRequest,
    Outcome,
    Process,
    ResultEntry,
    Transaction,
    TransportOptions,
)

T = TypeVar("T")
log = structlog.get_logger(__name__)


class _Calls(RedisCalls):
    """Calls that end with the transport: a closed client of the library would connect again, and nobody close it."""

    is_closed = False

    async def call(self, send: Callable[[], Awaitable[T]], what: str) -> T:
        async def send_if_open() -> T:
            if self.is_closed:  # looked at before each sending: closing cuts off those that wait for an answer
                raise TransportClosed(self._address)
            return await send()

        return await super().call(send_if_open, what)


class RedisStreams:
    """A Transport; see there for what each call promises."""

    def __init__(
        self,
        commands: Redis,
        readers: Redis,
        address: str,
        options: TransportOptions,
        keys: Keys,
        monotonic: Monotonic = monotonic_s,
    ) -> None:
        self._commands = commands
        self._address = address
        self._readers = readers
        self._options = options
        self._keys = keys
        self._monotonic = monotonic
        # Longer than a lease would be in vain: the work would belong to somebody else.
        self._calls = _Calls(commands, address, options.lease_s, monotonic)
        self._results = ResultReads(self._calls, readers, monotonic)
        self._renewal = RedisRenewal(self._calls, keys, options.consumer)
        self._receivers: dict[str, StageReceiver] = {}
        self._registered: set[str] = set()

    @property
    def consumer(self) -> str:
        """The name under which this process holds entries."""
        return self._options.consumer

    async def admit(
        self, request_id: str, priority: Priority, payload: bytes, attempt: int = 0, timeout_s: float | None = None
    ) -> Admission:
        """Accept a request: create its state and give it to the tokenizer, in one step."""
        keys = [
            self._keys.request(request_id),
            self._keys.stream("tokenizer", priority),
            self._keys.stream("prefill", priority),
            self._keys.deadlines(),
        ]
        ticket = secrets.token_hex(8)
        args: list[Arg] = [ticket, self._options.max_queue, payload, attempt, time_limit_ms(timeout_s)]
        if self._options.strict:
            reply = await script_on_disk(self._calls, self._commands, self._address, "admit", keys, args)
        else:
            reply = await self._calls.script("admit", keys, args)
        return {b"accepted": Accepted(), b"exists": Exists(), b"busy": Busy(ADMIT_RETRY_S)}[reply]

    async def cancel(self, request_id: str, terminal: bytes) -> bool:
        """End a request now, whoever works on it; False where it had ended already."""
        keys = [self._keys.request(request_id), self._keys.results(request_id), self._keys.finished()]
        args = [request_id, self._keys.chunks_prefix(request_id), terminal, self._options.result_ttl_s, MAX_FINISHED]
        reply: bytes = await self._calls.script("cancel", keys, args)
        if reply == b"unknown":
            raise UnknownRequest(request_id)
        return reply == b"cancelled"

    async def finished(self, num: int) -> list[FinishedRequest]:
        """Return the last requests that ended, oldest first."""
        reply = await self._command("XREVRANGE", self._keys.finished(), "+", "-", "COUNT", num)
        entries = cast("list[tuple[bytes, dict[bytes, bytes]]]", reply)
        return [FinishedRequest(fields[b"id"].decode(), fields[b"p"]) for _, fields in reversed(entries)]

    async def receive(self, stage: str, max_items: int, block_s: float) -> list[Delivery]:
        """Take up to max_items entries: interactive before batch, given-up ones before new ones."""
        if stage not in self._receivers:
            self._receivers[stage] = StageReceiver(
                stage, self._calls, self._readers, self._options, self._keys, self._monotonic
            )
        return await self._receivers[stage].receive(max_items, block_s)

    async def renew(self, deliveries: Sequence[Delivery]) -> list[bool]:
        """Extend the leases; False means lost, which no later renewal can undo."""
        return await self._renewal.renew(deliveries)

    async def commit(self, transactions: Sequence[Transaction]) -> list[Outcome]:
        """Carry out transactions in order, in one round trip; a refused one does not touch the others."""
        if not transactions:
            return []
        arguments = CommitArgs(self._keys, self._options.pool_id, self._options.lease_s)
        arguments.args += [self.consumer, secrets.token_hex(8), self._options.result_ttl_s]
        arguments.args += [MAX_DEAD, DEAD_TTL_S, MAX_FINISHED]
        arguments.add_all(transactions)
        reply: list[bytes] = await self._calls.script("commit", arguments.keys, arguments.args)
        words = [word.decode(errors="replace") for word in reply]
        damaged = [
            f"request {transaction.request_id}, {transaction.delivery.stream}: {word}"
            for transaction, word in zip(transactions, words, strict=True)
            if word.startswith("damaged: ")
        ]
        if damaged:
            raise StateDamaged(tuple(damaged), tuple(None if w.startswith("damaged: ") else w for w in words))
        return [Outcome(word) for word in words]

    async def hand_back(self, deliveries: Sequence[Delivery]) -> None:
        """Give entries up unprocessed: claimable at once, not counted as a try."""
        if not deliveries:
            return
        keys = [
            name for d in deliveries for name in (d.stream, self._keys.claims(d.stream), self._keys.tries(d.stream))
        ]
        await self._calls.script("hand_back", keys, [self.consumer, HANDBACK, *fences(deliveries)])

    async def dead_letter(self, delivery: Delivery, reason: str) -> None:
        """Move an entry that belongs to no known request to the dead stream, unless it is lost."""
        stream = delivery.stream
        keys = [stream, self._keys.claims(stream), self._keys.tries(stream), self._keys.dead(delivery.stage)]
        args = [self.consumer, *fences([delivery]), MAX_DEAD, DEAD_TTL_S, delivery.payload, reason]
        await self._calls.script("dead_letter", keys, args)

    async def chunks(self, request_id: str, attempt: int) -> dict[int, bytes]:
        """Return the sealed chunks of an attempt by index."""
        key = self._keys.chunks(request_id, attempt)
        reply = await self._command("HGETALL", key)
        return {int(index): ref for index, ref in cast("dict[bytes, bytes]", reply).items()}

    async def read_results(self, request_id: str, after: int, block_s: float) -> list[ResultEntry]:
        """Return entries after the first `after` tokens, waiting up to block_s for one; a page at a time."""
        stream = self._keys.results(request_id)
        deadline = self._results.last_tick(block_s)
        while True:
            until_s = min(deadline, self._results.last_tick(BLOCK_SLICE_S))
            if entries := await self._results.read(stream, after, until_s):
                return [_result_entry(entry_id, fields) for entry_id, fields in entries]
            if not await self._command("EXISTS", self._keys.request(request_id)):
                raise UnknownRequest(request_id)
            if self._monotonic() >= deadline:
                return []

    async def queue_length(self, stage: str, priority: Lane) -> int:
        """Return how many entries wait or are being worked on."""
        stream = self._keys.stream(stage, priority, self._options.pool_id)
        return cast("int", await self._command("XLEN", stream))

    async def num_waiting(self, stage: str, lane: Lane) -> int:
        """Return how many entries nobody works on, apart from those of dead processes."""
        stream = self._keys.stream(stage, lane, self._options.pool_id)
        [numbers] = cast("list[bytes]", await self._calls.script("queues", [stream], [HANDBACK, stage]))
        return QueueState.parse(stage, lane, numbers).num_waiting

    async def register(self, stage: str, info: bytes, ttl_s: float) -> None:
        """Announce this process for ttl_s seconds; info replaces what it announced before."""
        self._registered.add(stage)
        keys = [self._keys.process(stage, self.consumer), self._keys.processes(), self._keys.pools()]
        args: list[Arg] = [info, round(1000 * ttl_s), f"{stage}:{self.consumer}", PROC_INDEX_TTL_S]
        await self._calls.script("register", keys, [*args, self._options.pool_id or "", POOLS_TTL_S])

    async def processes(self) -> list[Process]:
        """Return the processes whose registration has not run out, by stage and consumer."""
        index = self._keys.processes()
        members = sorted(m.decode() for m in cast("list[bytes]", await self._command("SMEMBERS", index)))
        if not members:
            return []
        named = [(stage, name) for stage, _, name in (member.partition(":") for member in members)]
        infos = await self._command("MGET", *(self._keys.process(stage, name) for stage, name in named))
        infos = cast("list[bytes | None]", infos)
        if expired := [member for member, info in zip(members, infos, strict=True) if info is None]:
            # One that registers again right now is missing until it renews, a third of its TTL later.
            await self._command("SREM", index, *expired)
        return [
            Process(stage, name, info) for (stage, name), info in zip(named, infos, strict=True) if info is not None
        ]

    async def _command(self, *words: Arg) -> object:
        return await command(self._calls, self._commands, *words)

    async def close(self) -> None:
        """Release connections and this consumer's name; entries still held stay leased until they expire.

        Calls that are made or wait from now on raise TransportClosed.
        """
        self._calls.is_closed = True
        try:
            await self._take_leave()
        except ServerError as error:
            log.info("left_without_goodbye", problem=error.problem)  # all of it runs out by itself
        finally:
            await self._results.end(TransportClosed(self._address))
            await self._readers.aclose()
            await self._commands.aclose()

    async def _take_leave(self) -> None:
        once = RedisCalls(self._commands, self._address, patience_s=0, monotonic=self._monotonic)
        keys = [key for receiver in self._receivers.values() for key in receiver.streams]
        stages = [stage for stage, receiver in self._receivers.items() for _ in receiver.streams]
        if keys:
            await once.script("retire", keys, [self.consumer, *stages])
        execute = cast("Any", self._commands.execute_command)  # pyright: ignore[reportUnknownMemberType]
        for stage in self._registered:
            key, member = self._keys.process(stage, self.consumer), f"{stage}:{self.consumer}"
            await once.call(lambda key=key: execute("DEL", key), "DEL")
            await once.call(lambda member=member: execute("SREM", self._keys.processes(), member), "SREM")


def _result_entry(entry_id: bytes, fields: dict[bytes, bytes]) -> ResultEntry:
    major, minor = entry_id.split(b"-")
    return ResultEntry(int(minor) if major == b"0" else None, fields[b"p"])
