"""Dead letters: what no stage could process, for whoever looks into it, tries it again or throws it away.

Owns how a letter is named, read and replayed; the step itself is scripts/replay.lua. Knows nothing about who writes
letters (worker.py: bury).

A letter lies in its stage's dead stream until it is replayed or dropped, or until the stream expires. Replayed, its
request begins a new life under the old id: from its text where it died in the tokenizer, else from its token ids.

    letter of    holds             what goes on          goes to
    tokenizer    GenerateRequest   the same              tokenizer
    prefill      TokenizedPrompt   the same              prefill
    decode       PrefilledPrompt   its TokenizedPrompt   prefill: the KV is gone
    compressor   RawChunk          nothing: a chunk is nothing without the others
"""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Self, cast

from redis.asyncio import Redis

from pipeline import wire
from pipeline.clock import Monotonic, monotonic_s
from pipeline.errors import InvalidRequest, StateDamaged, WireError
from pipeline.keys import STAGES, Keys
from pipeline.messages import MESSAGES, GenerateRequest, PrefilledPrompt, TokenizedPrompt, WorkItem
from pipeline.redis_calls import Arg, RedisCalls, command, commands
from pipeline.redis_durable import script_on_disk
from pipeline.restart import begin_again, stamps_so_far

PATIENCE_S = 10.0
PAGE = 16  # letters read at a time: one of them may have tens of MB

_MAX_ID_PART: Final = 2**64 - 1  # of the two in an entry's id
_MAX_ATTEMPT: Final = 2**32 - 1  # as WorkItem allows

ReplayOutcome = Literal[
    "replayed",
    "unknown",  # there is no such letter, or not any more
    "unreadable",  # its bytes are no message of the stage
    "chunk",  # it is a piece of a request
    "exhausted",  # there is no larger attempt
    "running",  # its request has not ended
    "superseded",  # its request had a later life, or was answered
    "uncollected",  # its batch has yet to collect the failure
    "busy",  # the queue or the server's memory is full
]


@dataclass(frozen=True, slots=True)
class LetterId:
    """Names a letter as `stage:entry`, such as decode:1764470000000-0; an entry's id begins with its time."""

    stage: str
    at_ms: int
    """Epoch, by the server's clock."""
    number: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the id that a text writes.

        Raises:
            InvalidRequest: it is none.
        """
        stage, _, entry_id = text.partition(":")
        parts = entry_id.split("-")
        digits = len(parts) == 2 and all(part.isascii() and part.isdigit() and len(part) <= 20 for part in parts)
        if stage not in STAGES or not digits or max(map(int, parts)) > _MAX_ID_PART:
            known = ", ".join(STAGES)
            raise InvalidRequest(
                "letter", f"{text[:60]!r} is not STAGE:ENTRY, such as decode:1764470000000-0, with a stage of {known}"
            )
        return cls(stage, *map(int, parts))

    @property
    def entry_id(self) -> str:
        """The entry's id in its stage's dead stream."""
        return f"{self.at_ms}-{self.number}"

    def __str__(self) -> str:
        return f"{self.stage}:{self.entry_id}"


@dataclass(frozen=True, slots=True)
class Letter:
    """What is known of a letter without a look at what its payload means."""

    id: LetterId
    reason: str
    stream: str
    """The work stream in which it lay, and `entry` its id there."""
    entry: str
    tries: int
    num_bytes: int
    request_id: str | None
    """None where the payload names none."""
    attempt: int | None


@dataclass(frozen=True, slots=True)
class OpenLetter:
    """A letter with its message; `message` or `problem`, which says why there is none, is None."""

    letter: Letter
    message: WorkItem | None
    problem: str | None


@dataclass(frozen=True, slots=True)
class Replay:
    """What became of the attempt to replay a letter; request and attempt where the payload names one."""

    outcome: ReplayOutcome
    request_id: str | None = None
    attempt: int | None = None
    """Of the new life, where there is one."""


class DeadLetters:
    """The dead letters of one namespace. Every call may raise a ServerError; all may be repeated."""

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
            client: Of the transport's server (connect.open_client).
            address: What messages call the server.
            keys: Of the stack.
            patience_s: How long a call is repeated while the server is away.
            monotonic: The clock of that.
            strict: Whether a request counts as replayed only when it is on the server's disk.
        """
        self._client = client
        self._address = address
        self._strict = strict
        self._keys = keys
        self._calls = RedisCalls(client, address, patience_s, monotonic)

    async def count(self, stages: Iterable[str] = STAGES) -> int:
        """Return how many letters there are."""
        asked = [("XLEN", self._keys.dead(stage)) for stage in stages]
        return sum(await commands(self._calls, self._client, asked, "count"))

    async def recent(self, stages: Iterable[str] = STAGES, num: int | None = None) -> list[Letter]:
        """Return the last `num` letters of some stages, or all of them, oldest first.

        Raises:
            StateDamaged: an entry is no letter.
        """
        found = [letter for stage in stages for letter in await self._of_stage(stage, num)]
        found.sort(key=lambda letter: (letter.id.at_ms, letter.id.number))
        return found if num is None else found[-num:]

    async def read(self, letter_id: LetterId) -> OpenLetter | None:
        """Return one letter with its message; None where there is none of this id."""
        found = await self._fetch(letter_id)
        if found is None:
            return None
        letter = _letter(letter_id, found)
        try:
            return OpenLetter(letter, wire.unpack(found[b"p"], MESSAGES[letter_id.stage]), None)
        except WireError as error:
            return OpenLetter(letter, None, str(error))

    async def request_state(self, request_id: str) -> str | None:
        """Return the state that a request is in; None where it is not known any more."""
        state = cast("bytes | None", await self._command("HGET", self._keys.request(request_id), "state"))
        return None if state is None else state.decode(errors="replace")

    async def replay(self, letter_id: LetterId, max_queue: int) -> Replay:
        """Give a letter's request another life under its id: the old results go, and so does the letter.

        The new attempt is larger than the old one, so what is left of the old life is refused. max_queue is the bound
        of the queues in front of prefill, as for admission.
        """
        opened = await self.read(letter_id)
        if opened is None:
            return Replay("unknown")
        message, request_id = opened.message, opened.letter.request_id
        if message is None:
            return Replay("unreadable", request_id)
        time = cast("list[bytes]", await self._command("TIME"))
        attempt = max(message.attempt + 1, int(time[0]))
        if attempt > _MAX_ATTEMPT:
            return Replay("exhausted", request_id)
        again = reborn(message, attempt)
        if again is None:
            return Replay("chunk", request_id)
        outcome = await self._replay(letter_id, message.attempt, again, max_queue)
        return Replay(outcome, request_id, attempt if outcome == "replayed" else None)

    async def drop(self, letter_id: LetterId) -> bool:
        """Delete a letter; False where there is none of this id."""
        return await self._command("XDEL", self._keys.dead(letter_id.stage), letter_id.entry_id) == 1

    async def drop_all(self, stages: Iterable[str] = STAGES) -> int:
        """Delete all letters of some stages, and return how many there were; sent again, as many as are left."""
        counts = [await self._command("XTRIM", self._keys.dead(stage), "MAXLEN", 0) for stage in stages]
        return sum(cast("list[int]", counts))

    async def _replay(
        self, letter_id: LetterId, letter_attempt: int, again: GenerateRequest | TokenizedPrompt, max_queue: int
    ) -> ReplayOutcome:
        ticket = secrets.token_hex(8)
        doors = {stage: self._keys.stream(stage, again.priority) for stage in ("tokenizer", "prefill")}
        target = doors["tokenizer" if isinstance(again, GenerateRequest) else "prefill"]
        keys = [
            self._keys.dead(letter_id.stage),
            self._keys.request(again.request_id),
            self._keys.results(again.request_id),
            *doors.values(),
            target,
        ]
        args: list[Arg] = [letter_id.entry_id, ticket, max_queue, letter_attempt, again.attempt, wire.pack(again)]
        if self._strict:
            reply = await script_on_disk(self._calls, self._client, self._address, "replay", keys, args)
        else:
            reply = await self._calls.script("replay", keys, args)
        return cast("ReplayOutcome", reply.decode())

    async def _of_stage(self, stage: str, num: int | None) -> list[Letter]:
        """The last letters of one stage, newest first, a page at a time: payloads are not kept."""
        found: list[Letter] = []
        end = "+"
        while num is None or len(found) < num:
            page = PAGE if num is None else min(PAGE, num - len(found))
            entries = await self._entries(stage, "XREVRANGE", end, "-", "COUNT", page)
            found += [_letter(LetterId.parse(f"{stage}:{entry_id.decode()}"), fields) for entry_id, fields in entries]
            if len(entries) < page:
                break
            end = f"({found[-1].id.entry_id}"
        return found

    async def _fetch(self, letter_id: LetterId) -> dict[bytes, bytes] | None:
        entries = await self._entries(letter_id.stage, "XRANGE", letter_id.entry_id, letter_id.entry_id)
        return entries[0][1] if entries else None

    async def _entries(self, stage: str, name: str, *words: Arg) -> Sequence[tuple[bytes, dict[bytes, bytes]]]:
        reply = await self._command(name, self._keys.dead(stage), *words)
        return cast("list[tuple[bytes, dict[bytes, bytes]]]", reply)

    async def _command(self, *words: Arg) -> object:
        return await command(self._calls, self._client, *words)


def reborn(message: WorkItem, attempt: int) -> GenerateRequest | TokenizedPrompt | None:
    """Return what a new life of a letter's request begins with; None for a message that no life begins with."""
    if isinstance(message, GenerateRequest):
        return message.model_copy(update={"attempt": attempt, "stamps": stamps_so_far(message)})
    if isinstance(message, TokenizedPrompt | PrefilledPrompt):
        return begin_again(message, attempt)
    return None


def _letter(letter_id: LetterId, fields: Mapping[bytes, bytes]) -> Letter:
    try:
        payload = fields[b"p"]
        request_id, attempt = wire.read_identity(payload) or (None, None)
        return Letter(
            id=letter_id,
            reason=fields[b"reason"].decode(errors="replace"),
            stream=fields[b"stream"].decode(errors="replace"),
            entry=fields[b"entry"].decode(errors="replace"),
            tries=int(fields[b"tries"]),
            num_bytes=len(payload),
            request_id=request_id,
            attempt=attempt,
        )
    except (KeyError, ValueError) as error:
        raise StateDamaged((f"dead letter {letter_id}: {error!r}",)) from None
