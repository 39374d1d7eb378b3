"""Batches as the server keeps them: records, the line of steps that drive each, and lines that are done.

Owns the conversation about batches with the server; what happens together is written in scripts/batch_*.lua.
Knows nothing about files, and of requests only their names: a line's request is `{batch}-{index of the line}`.
"""

import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, cast, get_args

from redis.asyncio import Redis

from pipeline.batch.directory import Manifest
from pipeline.batch.errors import UnknownBatch
from pipeline.batch.record import OVER, STEPS, BatchRecord, BatchState, StepName, states_of
from pipeline.clock import Monotonic, monotonic_s
from pipeline.connect import connection_pool
from pipeline.keys import BATCH_TTL_S, MAX_QUEUE, RESULT_TTL_S, Keys
from pipeline.redis_calls import Arg, RedisCalls, command, commands, read_stream
from pipeline.redis_durable import script_on_disk
from pipeline.time_limit import time_limit_ms

STEP_LEASE_S = 5.0  # a killed jobs process loses its steps after this
STEP_GRACE_S = 3.0  # in which a step's job begins; arq polls many times in it
KEPT_WINDOWS = 2  # of lines that ended and wait for a slow disk; while there are more, none are fed
PATIENCE_S = 10.0
COLLECTED_TTL_S = 60  # a line that was collected can be looked at for a minute
EPOCH = "0-0"

FeedKind = Literal["request", "refused", "skip"]
FeedReply = Literal["ok", "busy", "moved"]
StepReply = Literal["ok", "over", "stale", "held"]


@dataclass(frozen=True, slots=True)
class StepTurn:
    """One turn of a step: the job that has it is the only one that works."""

    batch_id: str
    step: StepName
    number: int
    nonce: str


@dataclass(frozen=True, slots=True)
class Feed:
    """What becomes of one line; a request has its bytes and its attempt."""

    kind: FeedKind
    payload: bytes = b""
    attempt: int = 0
    timeout_s: float | None = None
    """The request is given up so long after it was fed; None is never."""


@dataclass(frozen=True, slots=True)
class DoneLine:
    """A line that ended and waits to be collected."""

    entry_id: str
    index: int


@dataclass(frozen=True, slots=True)
class Collected:
    """A done line whose result is on the disk."""

    line: DoneLine
    outcome: Literal["succeeded", "failed", "dropped"]
    prompt_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Sighting:
    """As much of a batch as decides what it needs next."""

    id: str
    state: BatchState
    deadline_ms: int


class BatchStore:
    """The batches of one namespace. Every call may raise a ServerError; all may be repeated."""

    def __init__(
        self,
        client: Redis,
        address: str,
        keys: Keys,
        *,
        patience_s: float = PATIENCE_S,
        monotonic: Monotonic = monotonic_s,
        strict: bool = False,
    ) -> None:
        """Wire it up; whoever made the client closes it.

        Args:
            client: Of the server; its calls have a limit of their own (store_client).
            address: The server's, for messages.
            keys: Of the stack.
            patience_s: How long a call is repeated while the server is away.
            monotonic: The clock of that.
            strict: Whether lines count as fed only when they are on the server's disk.
        """
        self.keys = keys
        self._client = client
        self._address = address
        self._strict = strict
        self._calls = RedisCalls(client, address, patience_s, monotonic)

    # Records

    async def create(self, manifest: Manifest, directory: str, recovered: Mapping[str, int] | None = None) -> bool:
        """Make the record of a batch, in the state validating; False where it has one.

        Args:
            manifest: Whose record it is.
            directory: Where its files are.
            recovered: Counts of what its files hold, where it is not new.
        """
        fields: dict[str, Arg] = {
            "options": manifest.options.model_dump_json(),
            "directory": directory,
            "input_sha256": manifest.input_sha256,
        }
        if recovered is not None:
            fields |= {**recovered, "recovered": 1}
        batch_id = manifest.batch_id
        words = [word for pair in fields.items() for word in pair]
        keys = [self.keys.batch(batch_id), self.keys.batch_done(batch_id), self.keys.batches()]
        return await self._calls.script("batch_create", keys, [batch_id, len(fields), *words]) == 1

    async def read(self, batch_id: str) -> BatchRecord:
        """Return a batch's record.

        Raises:
            UnknownBatch: it has none.
        """
        reply = await command(self._calls, self._client, "HGETALL", self.keys.batch(batch_id))
        fields = {name.decode(): value.decode() for name, value in cast("dict[bytes, bytes]", reply).items()}
        if not fields:
            raise UnknownBatch(batch_id)
        return BatchRecord.model_validate(fields)

    async def all(self) -> list[BatchRecord]:
        """Return the records of all batches, oldest first."""
        return await self._read_all((await self.survey())[1])

    async def recent(self, num_ended: int) -> list[BatchRecord]:
        """Return the records of all batches that go on and of the last few that ended, oldest first."""
        batches = (await self.survey())[1]
        ended = [batch.id for batch in batches if batch.state in OVER]
        left_out = frozenset(ended[: len(ended) - num_ended] if num_ended else ended)
        return await self._read_all([batch for batch in batches if batch.id not in left_out])

    async def _read_all(self, batches: Sequence[Sighting]) -> list[BatchRecord]:
        records: list[BatchRecord] = []
        for batch in batches:
            with suppress(UnknownBatch):  # it expired in this moment
                records.append(await self.read(batch.id))
        return records

    async def survey(self) -> tuple[int, list[Sighting]]:
        """Return the server's time in ms, and all batches, oldest first.

        Those whose record has expired leave the index.
        """
        index = self.keys.batches()
        members = cast("list[bytes]", await command(self._calls, self._client, "ZRANGE", index, 0, -1))
        names = [member.decode() for member in members]
        asked = [["TIME"], *(["HMGET", self.keys.batch(name), "state", "deadline_ms"] for name in names)]
        time, *fields = await commands(self._calls, self._client, asked, "survey")
        gone = [name for name, (state, _) in zip(names, fields, strict=True) if state is None]
        if gone:
            await command(self._calls, self._client, "ZREM", index, *gone)
        found = [
            Sighting(name, cast("BatchState", state.decode()), int(deadline_ms or 0))
            for name, (state, deadline_ms) in zip(names, fields, strict=True)
            if state is not None
        ]
        return 1000 * int(time[0]) + int(time[1]) // 1000, found

    async def move(
        self,
        batch_id: str,
        origins: Sequence[BatchState],
        to: BatchState | None,
        fields: Mapping[str, Arg] | None = None,
    ) -> BatchState:
        """Move a batch from one of these states to another, and return its state afterwards.

        Where `to` is None it stays in the state that it is in, and only fields are set. A field's value NOW is the
        server's time in ms; later(seconds) is so much later. A batch that was cancelled before it could begin moves to
        cancelling instead of in_progress.

        Raises:
            UnknownBatch: it has no record.
        """
        ttl_s = 0 if to is None or to in STEPS else BATCH_TTL_S
        lines = line_request_id(batch_id, "")
        names = [self.keys.batch(""), self.keys.request(lines), self.keys.results(lines)]
        words = [word for pair in (fields or {}).items() for word in pair]
        keys = [self.keys.batch(batch_id), self.keys.batch_done(batch_id), self.keys.batches()]
        args: list[Arg] = [to or "", ttl_s, RESULT_TTL_S, *names, len(origins), *origins, *words]
        reply: bytes = await self._calls.script("batch_move", keys, args)
        if not reply:
            raise UnknownBatch(batch_id)
        return cast("BatchState", reply.decode())

    async def cancel(self, batch_id: str) -> bool:
        """Say that a batch is to end early; False where it is over, or about to be.

        Raises:
            UnknownBatch: it has no record.
        """
        # Without an index its lines cannot be told apart yet: it is cancelled as soon as it was validated.
        if await self.move(batch_id, ["validating"], "validating", {"cancel_requested": 1}) == "validating":
            return True
        return await self.move(batch_id, ["in_progress"], "cancelling") == "cancelling"

    async def saw(self, batch_id: str) -> None:
        """Note that somebody who waited for a batch knows that it is over."""
        await self._calls.script("batch_seen", [self.keys.batch(batch_id)], [])

    # Steps

    async def begin(self, turn: StepTurn) -> StepReply:
        """Take a step's turn, or keep it; anything but "ok" means that it is not this job's."""
        return cast("StepReply", await self._step("begin", turn, STEP_LEASE_S))

    async def end(self, turn: StepTurn, pause_s: float = 0.0) -> StepReply:
        """Give a step's turn up; the next one may be asked for after a pause."""
        return cast("StepReply", await self._step("end", turn, pause_s))

    async def revive(self, batch_id: str, step: StepName) -> int | None:
        """Return the number under which a step that nobody works on has to run now; None for no need.

        Its job has STEP_GRACE_S to begin; then it counts as lost.
        """
        reply = await self._step("revive", StepTurn(batch_id, step, 0, ""), STEP_GRACE_S)
        return int(reply) if reply else None

    async def _step(self, verb: str, turn: StepTurn, time_s: float) -> str:
        args: list[Arg] = [verb, turn.step, turn.number, turn.nonce, round(1000 * time_s), *states_of(turn.step)]
        reply: bytes = await self._calls.script("batch_step", [self.keys.batch(turn.batch_id)], args)
        return reply.decode()

    # Lines

    async def feed(
        self,
        turn: StepTurn,
        cursor: int,
        line: Feed,
        max_queue: int = MAX_QUEUE,
        *,
        more_follow: bool = False,
    ) -> FeedReply:
        """Feed the line at the cursor, which moves on with it; the turn must be one of feed.

        Args:
            turn: Whose lines they are.
            cursor: The line's index.
            line: What becomes of it. One that begins anew stays busy until its attempt has grown.
            max_queue: The bound of the queue.
            more_follow: Whether the next line comes at once: then the disk, where it matters, is waited for with that.
        """
        batch_id = turn.batch_id
        keys = [
            self.keys.batch(batch_id),
            self.keys.batch_done(batch_id),
            self.keys.request(line_request_id(batch_id, cursor)),
            self.keys.results(line_request_id(batch_id, cursor)),
            self.keys.stream("tokenizer", "batch"),
            self.keys.stream("prefill", "batch"),
            self.keys.deadlines(),
        ]
        args: list[Arg] = [cursor, line.kind, line.payload, max_queue, turn.nonce, line.attempt]
        args.append(time_limit_ms(line.timeout_s))
        if self._strict and not more_follow:
            reply = await script_on_disk(self._calls, self._client, self._address, "batch_feed", keys, args)
        else:
            reply = await self._calls.script("batch_feed", keys, args)
        return cast("FeedReply", reply.decode())

    async def room(self, batch_id: str, window: int) -> int:
        """Return how many lines may be fed so that `window` are in flight, and few wait to be collected."""
        batch = self.keys.batch(batch_id)
        counts = await command(self._calls, self._client, "HMGET", batch, "admitted", "collected")
        admitted, collected = (int(count or 0) for count in cast("list[bytes | None]", counts))
        done = cast("int", await command(self._calls, self._client, "XLEN", self.keys.batch_done(batch_id)))
        return min(window - (admitted - collected - done), KEPT_WINDOWS * window - (admitted - collected))

    async def wait_done(self, batch_id: str, after: str, num: int, block_s: float) -> list[DoneLine]:
        """Return lines that ended and were not collected, after an entry; waits up to block_s for the first."""
        stream = self.keys.batch_done(batch_id)
        wait_s = block_s or None
        reply = await self._calls.call(lambda: read_stream(self._client, {stream: after}, num, wait_s), "wait_done")
        if not reply:
            return []
        return [DoneLine(entry_id.decode(), int(fields[b"line"])) for entry_id, fields in reply[0][1]]

    async def results(self, batch_id: str, lines: Sequence[DoneLine]) -> dict[int, list[tuple[bytes, bytes]]]:
        """Return the result streams of lines by index, each as (entry id, payload), in one round trip.

        Lines that do not wait to be collected any more are left out: the server lost its data meanwhile.
        """
        if not lines:
            return {}
        done, streams = self.keys.batch_done(batch_id), [line_request_id(batch_id, line.index) for line in lines]
        asked = [["XRANGE", self.keys.results(stream), "-", "+"] for stream in streams]
        asked += [["XRANGE", done, line.entry_id, line.entry_id] for line in lines]
        reply = await commands(self._calls, self._client, asked, "results")
        return {
            line.index: [(entry_id, fields[b"p"]) for entry_id, fields in entries]
            for line, entries, still_waits in zip(lines, reply[: len(lines)], reply[len(lines) :], strict=True)
            if still_waits
        }

    async def acknowledge(self, batch_id: str, lines: Sequence[Collected]) -> BatchState:
        """Count lines whose results are on the disk, and return the batch's state: finalizing when all are.

        Raises:
            UnknownBatch: it has no record.
        """
        keys = [self.keys.batch(batch_id), self.keys.batch_done(batch_id)]
        args: list[Arg] = [COLLECTED_TTL_S, len(lines)]
        for collected in lines:
            request_id = line_request_id(batch_id, collected.line.index)
            keys += [self.keys.request(request_id), self.keys.results(request_id)]
            args += [collected.line.entry_id, collected.outcome, collected.prompt_tokens, collected.output_tokens]
        reply: bytes = await self._calls.script("batch_collected", keys, args)
        if not reply:
            raise UnknownBatch(batch_id)
        return cast("BatchState", reply.decode())


def store_client(url: str, max_connections: int) -> Redis:
    """Return a client for a BatchStore, whose calls have a limit of their own (redis_calls.py); aclose() it.

    Raises:
        ServerUrlInvalid: the address cannot be read.
    """
    return Redis.from_pool(connection_pool(url, max_connections, answer_timeout_s=None))


def line_request_id(batch_id: str, index: int | Literal[""]) -> str:
    """Return the id of a line's request; without an index, what those of all lines begin with."""
    return f"{batch_id}-{index}"


def later(time_s: float) -> str:
    """Return what stands for the server's time and so many seconds more, as the value of a field."""
    return f"now+{round(1000 * time_s)}"


NOW = later(0)


def fresh_steps() -> dict[str, Arg]:
    """Return the fields that end all turns, also where somebody who had one does not know it yet."""
    fields: dict[str, Arg] = {}
    for name in get_args(StepName):
        fields |= {f"{name}_number": NOW, f"{name}_nonce": "", f"{name}_until_ms": 0}
    return fields


def new_nonce() -> str:
    """Return a name for one job's turn."""
    return secrets.token_hex(8)
