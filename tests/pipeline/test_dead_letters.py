"""Dead letters on a real server: made as stages make them, read, and given another life that the stages take.

Everything also works for a user who may do no more than docs/redis.md says.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from kv_store.errors import BlobTooLarge
from pipeline import dead_letters
from pipeline.batch.store import EPOCH, BatchStore, Collected, Feed, StepTurn, line_request_id
from pipeline.connect import open_client, open_transport
from pipeline.dead_letters import DeadLetters, LetterId, Replay
from pipeline.errors import InvalidRequest, ServerRefused, StateDamaged
from pipeline.keys import MAX_QUEUE, STAGES, Keys
from pipeline.leases import LeaseKeeper
from pipeline.messages import Failure, GenerateRequest, Terminal, TokenizedPrompt
from pipeline.server_acl import RULE
from pipeline.settings import Settings
from pipeline.transport import (
    AddChunk,
    Delivery,
    Emit,
    Finish,
    Outcome,
    Plan,
    Publish,
    Transaction,
    Transport,
)
from pipeline.wire import pack, unpack
from pipeline.worker import bury, run_worker
from tests.pipeline.batch.files import new_manifest
from tests.pipeline.benches import POOL, RedisBench, soon, take, take_one
from tests.pipeline.letters import MESSAGES, bring_to, commit, generate, make_letter, prefilled, raw_chunk, tokenized
from tests.servers import ServerOptions, server_of_its_own

END = Finish(pack(Terminal(finish_reason="stop")), "finished")
BATCH = "batch_1"
FEEDER = "whose turn it is"
AGAIN = {
    "tokenizer": ("tokenizer", generate()),
    "prefill": ("prefill", tokenized(num_restarts=0)),
    "decode": ("prefill", tokenized(num_restarts=0)),
}
"""By stage of the letter: where its request begins again, and with what, but for the attempt."""


@pytest.fixture
def keys(namespace: str) -> Keys:
    return Keys(namespace)


@pytest.fixture
async def transport(redis_bench: RedisBench) -> Transport:
    return await redis_bench.join()


@pytest.fixture
async def dead(
    request: pytest.FixtureRequest, raw_redis: Any, valkey_url: str, keys: Keys
) -> AsyncIterator[DeadLetters]:
    """For a user who may do everything, or by BOTH_USERS also for one with no more rights than are needed."""
    if getattr(request, "param", "any") == "any":
        yield DeadLetters(raw_redis, "test", keys)
        return
    rules = RULE.format(namespace=keys.namespace)
    await raw_redis.execute_command("ACL", "SETUSER", keys.namespace, "reset", "on", ">word", *rules.split())
    client = open_client(valkey_url.replace("unix://", f"unix://{keys.namespace}:word@"))
    yield DeadLetters(client, "test", keys)
    await client.aclose()
    await raw_redis.execute_command("ACL", "DELUSER", keys.namespace)


BOTH_USERS = pytest.mark.parametrize("dead", ["any", "narrow"], indirect=True)


async def end_of(transport: Transport, request_id: str = "r") -> Terminal:
    """What the request's results end with now."""
    entry = (await transport.read_results(request_id, 0, block_s=0))[-1]
    assert entry.offset is None
    return unpack(entry.data, Terminal)


# Reading


async def test_letters_of_all_stages_are_told_newest_last(transport: Transport, dead: DeadLetters, keys: Keys) -> None:
    ids = [await make_letter(transport, dead, stage, MESSAGES[stage](f"r-{stage}")) for stage in STAGES]
    letters = await dead.recent()
    assert [letter.id for letter in letters] == ids
    assert [letter.id.stage for letter in letters] == list(STAGES)
    assert [letter.request_id for letter in letters] == [f"r-{stage}" for stage in STAGES]
    decode = letters[-1]
    assert decode.reason == "too_many_tries: given up after 5 tries"
    assert (decode.attempt, decode.tries) == (3, 1)
    assert decode.stream == keys.stream("decode", "batch", POOL)
    assert decode.num_bytes == len(pack(prefilled("r-decode")))
    assert await dead.count() == 4
    assert [letter.id for letter in await dead.recent(num=2)] == ids[-2:]
    assert [letter.id for letter in await dead.recent(["prefill"])] == ids[1:2]
    assert await dead.count(["prefill", "decode"]) == 2


async def test_more_letters_than_a_page_are_read_in_pages(
    transport: Transport, dead: DeadLetters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "PAGE", 3)
    ids = [await make_letter(transport, dead, "tokenizer", generate(f"r{number}")) for number in range(7)]
    for num in range(1, 8):
        assert [letter.id for letter in await dead.recent(num=num)] == ids[-num:]
    assert [letter.id for letter in await dead.recent()] == ids


@pytest.mark.parametrize("stage", STAGES)
async def test_a_letter_is_opened_to_the_message_that_it_holds(
    transport: Transport, dead: DeadLetters, stage: str
) -> None:
    message = MESSAGES[stage]()
    letter_id = await make_letter(transport, dead, stage, message)
    opened = await dead.read(letter_id)
    assert opened is not None
    assert (opened.message, opened.problem) == (message, None)
    assert await dead.request_state("r") == "failed"
    assert await dead.request_state("nobody") is None


async def test_unreadable_bytes_are_a_letter_with_a_problem(transport: Transport, dead: DeadLetters) -> None:
    await transport.admit("r", "interactive", b"junk")
    await transport.dead_letter(await take_one(transport, "tokenizer"), "not_msgpack: it is junk")
    [letter] = await dead.recent()
    assert (letter.request_id, letter.attempt, letter.num_bytes) == (None, None, 4)
    opened = await dead.read(letter.id)
    assert opened is not None
    assert opened.message is None
    assert opened.problem is not None
    assert "not_msgpack" in opened.problem
    assert await dead.replay(letter.id, MAX_QUEUE) == Replay("unreadable")
    assert await dead.count() == 1
    await transport.cancel("r", pack(Terminal(finish_reason="cancelled")))


async def test_a_foreign_entry_among_the_letters_is_named(dead: DeadLetters, raw_redis: Redis, keys: Keys) -> None:
    entry_id = await raw_redis.xadd(keys.dead("prefill"), {"p": b"x"})
    with pytest.raises(StateDamaged, match=f"dead letter prefill:{entry_id.decode()}"):
        await dead.recent()
    assert await dead.drop(LetterId.parse(f"prefill:{entry_id.decode()}"))
    await raw_redis.delete(keys.dead("prefill"))


@pytest.mark.parametrize(
    "text",
    [
        *("", "decode", "decode:", "decode:1", "decode:1-", "decode:-1", "decode:1-2-3", "decode:1-x", "decode:1-0 "),
        *("jobs:1-0", ":1-0", "decode:１-0", f"decode:{2**64}-0", f"decode:{'9' * 5000}-0"),
    ],
)
def test_what_is_no_name_of_a_letter_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"letter: .* is not STAGE:ENTRY"):
        LetterId.parse(text)


def test_the_name_of_a_letter_is_read_as_it_is_written() -> None:
    letter_id = LetterId.parse("decode:1764470000000-3")
    assert (letter_id.stage, letter_id.at_ms, letter_id.number) == ("decode", 1_764_470_000_000, 3)
    assert (str(letter_id), letter_id.entry_id) == ("decode:1764470000000-3", "1764470000000-3")


# Replaying


@BOTH_USERS
@pytest.mark.parametrize("stage", AGAIN)
async def test_a_replayed_request_is_taken_again_and_its_old_life_is_refused(
    dead: DeadLetters, transport: Transport, raw_redis: Redis, stage: str
) -> None:
    letter_id = await make_letter(transport, dead, stage, MESSAGES[stage]())
    failure = (await end_of(transport)).failure
    assert failure is not None
    assert failure.code == "too_many_tries"
    before_s = await server_s(raw_redis)
    replay = await dead.replay(letter_id, MAX_QUEUE)
    assert (replay.outcome, replay.request_id) == ("replayed", "r")
    assert replay.attempt is not None
    assert before_s <= replay.attempt <= before_s + 60
    assert await dead.count() == 0
    assert await transport.read_results("r", 0, block_s=0) == []

    target, expected = AGAIN[stage]
    delivery = await take_one(transport, target)
    message = unpack(delivery.payload, type(expected))
    assert message == expected.model_copy(update={"attempt": replay.attempt})
    old = message.model_copy(update={"attempt": 3})
    assert await commit(transport, delivery, old, Emit(b"late", 0, 1), END) is not Outcome.OK
    assert await transport.read_results("r", 0, block_s=0) == []
    assert await dead.replay(letter_id, MAX_QUEUE) == Replay("unknown")


async def test_a_replayed_request_runs_to_its_end_and_leaves_nothing(
    transport: Transport, redis_bench: RedisBench, dead: DeadLetters
) -> None:
    letter_id = await make_letter(transport, dead, "decode", prefilled())
    assert (await dead.replay(letter_id, MAX_QUEUE)).outcome == "replayed"
    delivery = await take_one(transport, "prefill")
    message = unpack(delivery.payload, TokenizedPrompt)
    effects = (Emit(b"token 0 again", 0, 1), AddChunk(0, b"new ref"), Plan(1, "batch", b"prefilled again"))
    assert await commit(transport, delivery, message, *effects) is Outcome.OK
    delivery = await take_one(transport, "decode")
    assert delivery.payload == b"prefilled again"
    assert await transport.chunks("r", message.attempt) == {0: b"new ref"}
    assert await commit(transport, delivery, message, Emit(b"token 1", 1, 1), END) is Outcome.OK
    entries = await transport.read_results("r", 0, block_s=0)
    assert [(entry.offset, entry.data) for entry in entries] == [
        (1, b"token 0 again"),
        (2, b"token 1"),
        (None, END.terminal),
    ]
    assert await redis_bench.leftovers() == []


async def test_what_is_left_of_the_old_life_in_a_stream_is_dropped(transport: Transport, dead: DeadLetters) -> None:
    """A chunk still waits for the compressor when the prompt is buried and replayed."""
    delivery = await bring_to(transport, "prefill", tokenized())
    chunk = Transaction(delivery, "r", 3, (Publish("compressor", "batch", pack(raw_chunk())),), ack=False)
    assert await transport.commit([chunk]) == [Outcome.OK]
    failure = Failure(stage="prefill", code="c", message="m", retryable=False)
    assert await bury(transport, delivery, failure) is Outcome.OK
    [letter] = await dead.recent()
    replay = await dead.replay(letter.id, MAX_QUEUE)
    late = await take_one(transport, "compressor")
    assert await commit(transport, late, raw_chunk(), AddChunk(0, b"old ref")) is Outcome.FENCED
    assert replay.attempt is not None
    assert await transport.chunks("r", replay.attempt) == {}
    assert await transport.receive("compressor", 1, block_s=0) == []


async def test_a_request_whose_state_has_expired_is_replayed_as_well(
    transport: Transport, dead: DeadLetters, raw_redis: Redis, keys: Keys
) -> None:
    letter_id = await make_letter(transport, dead, "prefill", tokenized())
    await raw_redis.delete(keys.request("r"), keys.results("r"))  # as time does
    assert (await dead.replay(letter_id, MAX_QUEUE)).outcome == "replayed"
    delivery = await take_one(transport, "prefill")
    assert await commit(transport, delivery, unpack(delivery.payload, TokenizedPrompt), END) is Outcome.OK


async def test_an_attempt_ahead_of_the_clock_still_grows(
    transport: Transport, dead: DeadLetters, raw_redis: Redis
) -> None:
    ahead = await server_s(raw_redis) + 100_000
    letter_id = await make_letter(transport, dead, "prefill", tokenized(attempt=ahead))
    last = await make_letter(transport, dead, "prefill", tokenized("s", attempt=2**32 - 1))
    assert await dead.replay(letter_id, MAX_QUEUE) == Replay("replayed", "r", ahead + 1)
    assert await dead.replay(last, MAX_QUEUE) == Replay("exhausted", "s")
    assert [letter.id for letter in await dead.recent()] == [last]


async def test_a_chunk_is_not_replayed(transport: Transport, dead: DeadLetters) -> None:
    letter_id = await make_letter(transport, dead, "compressor", raw_chunk())
    assert await dead.replay(letter_id, MAX_QUEUE) == Replay("chunk", "r")
    assert await dead.count() == 1
    assert (await end_of(transport)).finish_reason == "error"


async def test_a_request_that_runs_again_is_left_alone(
    transport: Transport, dead: DeadLetters, raw_redis: Redis, keys: Keys
) -> None:
    letter_id = await make_letter(transport, dead, "tokenizer", generate())
    await raw_redis.delete(keys.request("r"), keys.results("r"))
    await transport.admit("r", "batch", b"sent again", 4)
    assert await dead.replay(letter_id, MAX_QUEUE) == Replay("running", "r")
    assert (await take_one(transport, "tokenizer")).payload == b"sent again"
    assert await transport.queue_length("tokenizer", "batch") == 1
    assert await dead.count() == 1


@pytest.mark.parametrize(
    ("attempt", "state", "outcome"),
    [
        (3, "finished", "superseded"),
        (4, "failed", "superseded"),
        (4, "cancelled", "superseded"),
        (3, "cancelled", "replayed"),
    ],
)
async def test_results_of_a_later_life_are_not_thrown_away(
    transport: Transport,
    dead: DeadLetters,
    raw_redis: Redis,
    keys: Keys,
    attempt: int,
    state: Any,
    outcome: str,
) -> None:
    letter_id = await make_letter(transport, dead, "tokenizer", generate())
    await raw_redis.delete(keys.request("r"), keys.results("r"))
    await transport.admit("r", "batch", b"sent again", attempt)
    again = await take_one(transport, "tokenizer")
    await commit(transport, again, generate(attempt=attempt), Emit(b"an answer", 0, 1), Finish(b"its end", state))
    assert (await dead.replay(letter_id, MAX_QUEUE)).outcome == outcome
    entries = await transport.read_results("r", 0, block_s=0)
    assert [entry.data for entry in entries] == ([b"an answer", b"its end"] if outcome == "superseded" else [])
    assert await dead.count() == (outcome == "superseded")


async def test_two_letters_of_one_request_are_one_life(transport: Transport, dead: DeadLetters) -> None:
    """A chunk of it was buried by itself, where its request could not be ended."""
    delivery = await bring_to(transport, "tokenizer", generate())
    await commit(transport, delivery, generate(), *(Publish("prefill", "batch", pack(tokenized())) for _ in range(2)))
    first, second = await take(transport, "prefill", 2)
    await transport.dead_letter(first, "its state is damaged")
    assert await bury(transport, second, Failure(stage="prefill", code="c", message="m", retryable=False)) is Outcome.OK
    one, other = await dead.recent()
    assert (await dead.replay(one.id, MAX_QUEUE)).outcome == "replayed"
    assert await dead.replay(other.id, MAX_QUEUE) == Replay("running", "r")


async def test_a_full_queue_keeps_the_letter(transport: Transport, dead: DeadLetters) -> None:
    letter_id = await make_letter(transport, dead, "decode", prefilled())
    await transport.admit("a", "batch", b"in front of prefill")
    await transport.admit("b", "interactive", b"in another queue")
    assert await dead.replay(letter_id, 1) == Replay("busy", "r")
    assert (await end_of(transport)).finish_reason == "error"
    assert (await dead.replay(letter_id, 2)).outcome == "replayed"
    assert await transport.queue_length("prefill", "batch") == 1


async def test_a_full_server_keeps_the_letter(transport: Transport, dead: DeadLetters, raw_redis: Any) -> None:
    letter_id = await make_letter(transport, dead, "prefill", tokenized())
    await raw_redis.config_set("maxmemory", "1mb")
    try:
        assert await dead.replay(letter_id, MAX_QUEUE) == Replay("busy", "r")
    finally:
        await raw_redis.config_set("maxmemory", "0")
    assert (await dead.replay(letter_id, MAX_QUEUE)).outcome == "replayed"


class ForgetfulRedis(Redis):
    """Carries a script out, and then pretends that the reply was lost; `before_next` happens meanwhile."""

    replies_to_lose = 1
    before_next: Callable[[], Awaitable[object]] | None = None

    async def execute_command(self, *words: Any, **options: Any) -> Any:
        reply = await super().execute_command(*words, **options)
        if words[0] == "EVAL" and self.replies_to_lose:
            self.replies_to_lose -= 1
            if self.before_next is not None:
                await self.before_next()
            raise RedisConnectionError("the connection was reset")
        return reply


@pytest.mark.parametrize("meanwhile", ["nothing", "it ends", "the server fills up"])
async def test_a_replay_whose_reply_is_lost_happens_once(
    transport: Transport, dead: DeadLetters, raw_redis: Any, valkey_url: str, keys: Keys, meanwhile: str
) -> None:
    letter_id = await make_letter(transport, dead, "prefill", tokenized())
    await raw_redis.script_flush()

    async def end() -> None:
        delivery = await take_one(transport, "prefill")
        await commit(transport, delivery, unpack(delivery.payload, TokenizedPrompt), END)

    async with ForgetfulRedis.from_url(valkey_url, protocol=2) as client:
        if meanwhile == "it ends":
            client.before_next = end
        elif meanwhile == "the server fills up":
            client.before_next = lambda: raw_redis.config_set("maxmemory", "1mb")
        try:
            replay = await DeadLetters(client, "test", keys).replay(letter_id, MAX_QUEUE)
        finally:
            await raw_redis.config_set("maxmemory", "0")
        assert (replay.outcome, client.replies_to_lose) == ("replayed", 0)
    assert await transport.queue_length("prefill", "batch") == (meanwhile != "it ends")
    assert await dead.count() == 0


async def test_with_strict_durability_a_replay_is_on_the_disk_when_it_is_told(namespace: str) -> None:
    with server_of_its_own(options=ServerOptions(appendonly="yes", appendfsync="everysec")) as server:
        settings = Settings(redis_url=server.url, namespace=namespace, durability="strict")
        transport = await open_transport(settings, pool_id=POOL)
        client = open_client(settings)
        strict = DeadLetters(client, "test", Keys(namespace), strict=True)
        letter_id = await make_letter(transport, strict, "prefill", tokenized())
        assert (await strict.replay(letter_id, MAX_QUEUE)).outcome == "replayed"
        other = await make_letter(transport, strict, "decode", prefilled("s"))
        await cast("Any", client).config_set("appendonly", "no")
        with pytest.raises(ServerRefused, match="WAITAOF"):
            await strict.replay(other, MAX_QUEUE)
        await client.aclose()
        await transport.close()


# Through the harness


class Stage:
    """A tokenizer that cannot do its work until it is mended."""

    name = "tokenizer"
    is_mended = False

    async def handle(self, delivery: Delivery) -> Transaction:
        request = unpack(delivery.payload, GenerateRequest)
        if not self.is_mended:
            raise BlobTooLarge(3, 0, 2)
        publish = Publish("prefill", request.priority, pack(tokenized(request.request_id, request.attempt)))
        return Transaction(delivery, request.request_id, request.attempt, (publish,), ack=True)

    async def give_up(self, delivery: Delivery) -> Transaction | None:
        return None

    async def settled(self, transaction: Transaction, outcome: Outcome) -> None:
        assert outcome is Outcome.OK


async def test_a_request_is_served_when_its_stage_was_mended(
    transport: Transport, dead: DeadLetters, redis_bench: RedisBench
) -> None:
    stage, stopping, leases = Stage(), asyncio.Event(), LeaseKeeper(transport, 10.0)
    worker = asyncio.create_task(run_worker(stage, transport, leases, stopping))
    try:
        await transport.admit("r", "batch", pack(generate()), 3)
        [terminal] = await soon(transport.read_results("r", 0, block_s=20))
        assert unpack(terminal.data, Terminal).finish_reason == "error"
        [letter] = await dead.recent()
        stage.is_mended = True
        replay = await dead.replay(letter.id, MAX_QUEUE)
        assert replay.outcome == "replayed"
        delivery = await take_one(transport, "prefill")
    finally:
        stopping.set()
        await soon(worker)
    message = unpack(delivery.payload, TokenizedPrompt)
    assert message.attempt == replay.attempt
    assert await commit(transport, delivery, message, Emit(b"an answer", 0, 1), END) is Outcome.OK
    assert await redis_bench.leftovers() == []


# Lines of batches


async def test_a_line_is_replayed_as_a_request_of_its_own_when_its_batch_has_the_failure(
    transport: Transport, dead: DeadLetters, raw_redis: Redis, keys: Keys
) -> None:
    store, request_id = BatchStore(raw_redis, "test", keys), line_request_id(BATCH, 0)
    assert await store.create(new_manifest(Path("/nowhere"), BATCH), "/nowhere/batches/one")
    fields: dict[str, Any] = {"total": 2, "feed_nonce": FEEDER}
    assert await store.move(BATCH, ["validating"], "in_progress", fields) == "in_progress"
    line = Feed("request", pack(generate(request_id)), 3)
    assert await store.feed(StepTurn(BATCH, "feed", 0, FEEDER), 0, line) == "ok"
    failure = Failure(stage="tokenizer", code="c", message="m", retryable=False)
    assert await bury(transport, await take_one(transport, "tokenizer"), failure) is Outcome.OK
    [letter] = await dead.recent()
    assert letter.request_id == request_id

    assert await dead.replay(letter.id, MAX_QUEUE) == Replay("uncollected", request_id)
    [done] = await store.wait_done(BATCH, EPOCH, 10, 0)
    assert (await store.results(BATCH, [done]))[0][-1][0] == b"1-0"
    assert await store.acknowledge(BATCH, [Collected(done, "failed")]) == "in_progress"

    assert (await dead.replay(letter.id, MAX_QUEUE)).outcome == "replayed"
    delivery = await take_one(transport, "tokenizer")
    message = unpack(delivery.payload, GenerateRequest)
    assert await commit(transport, delivery, message, Emit(b"an answer", 0, 1), END) is Outcome.OK
    assert await store.wait_done(BATCH, EPOCH, 10, 0) == []
    assert await raw_redis.ttl(keys.request(request_id)) > 0
    record = await store.read(BATCH)
    assert (record.state, record.admitted, record.failed, record.collected) == ("in_progress", 1, 1, 1)


# Dropping


@BOTH_USERS
async def test_letters_are_dropped_one_by_one_or_all_together(
    dead: DeadLetters, transport: Transport, redis_bench: RedisBench
) -> None:
    ids = [
        await make_letter(transport, dead, stage, MESSAGES[stage](f"r{number}-{stage}"))
        for number in range(2)
        for stage in ("tokenizer", "prefill", "decode")
    ]
    assert await dead.drop(ids[0])
    assert not await dead.drop(ids[0])
    assert await dead.read(ids[0]) is None
    assert await dead.count() == 5
    assert await dead.drop_all(["decode"]) == 2
    assert [letter.id for letter in await dead.recent()] == [ids[1], ids[3], ids[4]]
    assert await dead.drop_all() == 3
    assert (await dead.recent(), await dead.count(), await dead.drop_all()) == ([], 0, 0)
    assert await redis_bench.leftovers() == []


async def server_s(raw_redis: Any) -> int:
    """The server's epoch time in seconds."""
    return (await raw_redis.time())[0]
