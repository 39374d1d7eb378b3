"""Submitting: what becomes a new batch, what goes on, what is refused, and what is given up without a trace."""

import io
import json
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from redis.asyncio import Redis

from pipeline.batch.directory import alone, spool, temporary_output
from pipeline.batch.errors import BatchFilesDamaged, BatchMismatch
from pipeline.batch.journal import Journal
from pipeline.batch.options import BatchOptions
from pipeline.batch.record import BatchState
from pipeline.batch.store import BatchStore, Feed, StepTurn, line_request_id
from pipeline.batch.submit import GivenUp, Prepared, end_given_up, prepare, submit
from pipeline.errors import InvalidRequest
from pipeline.keys import Keys
from pipeline.messages import Terminal
from pipeline.transport import Finish, Transaction
from pipeline.wire import pack
from tests.pipeline.batch.files import finished
from tests.pipeline.benches import RedisBench, take, take_one

MODEL = "tiny"
Prepare = Callable[..., Prepared]
Leftovers = Callable[[], Awaitable[list[str]]]


def line(custom_id: str) -> bytes:
    body = {"model": MODEL, "prompt": "a", "seed": 1}
    return (
        json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}).encode() + b"\n"
    )


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_bytes(line("a") + b"\n" + line("b") + line("c"))
    return path


@pytest.fixture
def batches(tmp_path: Path) -> Path:
    return tmp_path / "home" / "batches"


@pytest.fixture
def prepare_(source: Path, batches: Path, tmp_path: Path) -> Prepare:
    """Prepare the batch of the test, with some of its options changed."""

    def call(
        *, stdin: BinaryIO | None = None, restart: bool = False, tick: Callable[[], None] = lambda: None, **fields: Any
    ) -> Prepared:
        named = {
            "source": source,
            "target": tmp_path / "out.jsonl",
            "errors": tmp_path / "out.errors.jsonl",
            "model": MODEL,
            "stack_model": MODEL,
        }
        return prepare(BatchOptions(**named | fields), batches, stdin, tick, restart=restart)

    return call


@pytest.fixture
def store(raw_redis: Redis, namespace: str) -> BatchStore:
    return BatchStore(raw_redis, "test", Keys(namespace))


def finish(prepared: Prepared, *indexes: int, reason: str = "stop") -> None:
    with Journal(prepared.directory, prepared.num_lines) as journal:
        journal.append([finished(index, reason) for index in indexes])


def names_in(path: Path) -> set[str]:
    return {child.name for child in path.iterdir()}


# Files


def test_a_new_batch_has_a_directory_and_knows_its_input(prepare_: Prepare, batches: Path) -> None:
    prepared = prepare_()
    assert (prepared.num_lines, prepared.num_finished, prepared.is_new) == (3, 0, True)
    assert prepared.directory.manifest() == prepared.manifest
    assert batches.stat().st_mode & 0o777 == 0o700
    assert names_in(prepared.directory.path) == {"manifest.json"}


def test_the_same_again_is_the_same_batch_and_knows_what_is_finished(prepare_: Prepare, source: Path) -> None:
    first = prepare_()
    finish(first, 2)
    moved = source.rename(source.with_name("moved.jsonl"))
    again = prepare_(source=moved, window=7, timeout_s=60)
    assert (again.is_new, again.num_finished) == (False, 1)
    assert again.manifest.batch_id == first.manifest.batch_id
    assert again.directory.manifest() == again.manifest
    assert (again.manifest.options.source, again.manifest.options.window) == (moved, 7)


def test_another_output_is_another_batch(prepare_: Prepare, tmp_path: Path) -> None:
    first, second = prepare_(), prepare_(target=tmp_path / "other.jsonl")
    assert second.is_new
    assert second.manifest.batch_id != first.manifest.batch_id
    assert second.directory.path != first.directory.path


def test_what_differs_is_said_and_nothing_is_touched(prepare_: Prepare, source: Path, tmp_path: Path) -> None:
    first = prepare_()
    finish(first, 0)
    before = first.directory.manifest()
    source.write_bytes(line("a"))
    with pytest.raises(BatchMismatch) as error:
        prepare_(stack_model="other", speculate=False, errors=tmp_path / "e")
    assert error.value.fields == ("input", "errors", "model", "speculate")
    said = str(error.value)
    assert f"the unfinished batch {first.manifest.batch_id}" in said
    assert "another input" in said
    assert "speculate 'true' instead of 'false'" in said
    assert "model 'tiny' instead of 'other'" in said
    assert "--restart" in said
    assert first.directory.manifest() == before
    assert first.directory.finished_lines.exists()


def test_two_at_once_find_the_same_batch(prepare_: Prepare) -> None:
    start = threading.Barrier(8)

    def one(_: int) -> Prepared:
        start.wait(10)
        return prepare_()

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(one, range(8)))
    assert len({prepared.manifest.batch_id for prepared in found}) == 1
    assert sum(prepared.is_new for prepared in found) == 1


@pytest.mark.parametrize("data", [b"", b"\n \n\t\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\r\n"])
def test_an_input_without_requests_is_refused(prepare_: Prepare, source: Path, batches: Path, data: bytes) -> None:
    source.write_bytes(data)
    with pytest.raises(InvalidRequest, match=r"input: .* has no requests"):
        prepare_()
    assert names_in(batches) <= {".lock"}


def test_lines_that_are_all_wrong_are_requests_too(prepare_: Prepare, source: Path) -> None:
    source.write_bytes(b"{\nnonsense\n" + b"x" * (2 << 20))
    assert prepare_().num_lines == 3


@pytest.mark.parametrize("field", ["target", "errors"])
def test_an_output_that_cannot_be_a_file_is_refused(
    prepare_: Prepare, source: Path, tmp_path: Path, field: str
) -> None:
    name = {"target": "output", "errors": "errors"}[field]
    os.mkfifo(tmp_path / "pipe")
    cases = {
        tmp_path: "is a directory",
        Path("/dev/null"): "is no regular file",
        tmp_path / "pipe": "is no regular file",
        source: "is the input",
        tmp_path / "half\udc80": "is not UTF-8",
    }
    (tmp_path / "link").hardlink_to(source)
    cases[tmp_path / "link"] = "is the input"
    for path, problem in cases.items():
        with pytest.raises(InvalidRequest, match=f"{name}: .*{problem}"):
            prepare_(**{field: path})
    with pytest.raises(OSError, match=r"Not a directory|exists"):
        prepare_(**{field: source / "out.jsonl"})


def test_directories_of_the_output_are_made(prepare_: Prepare, tmp_path: Path) -> None:
    prepare_(target=tmp_path / "a" / "b" / "out.jsonl")
    assert (tmp_path / "a" / "b").is_dir()


def test_an_input_that_is_not_there_or_no_file_is_refused(prepare_: Prepare, tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(InvalidRequest, match=f"input: {path} is not a file"):
            prepare_(source=path)


def test_a_damaged_manifest_is_said_so_and_can_be_given_up(prepare_: Prepare) -> None:
    first = prepare_()
    (first.directory.path / "manifest.json").write_text("{")
    with pytest.raises(BatchFilesDamaged, match="--restart"):
        prepare_()
    again = prepare_(restart=True)
    assert (again.is_new, again.given_up) == (True, None)


# Standard input


def test_standard_input_is_copied(prepare_: Prepare, source: Path, batches: Path) -> None:
    data = source.read_bytes()
    prepared = prepare_(source=Path("-"), stdin=io.BytesIO(data))
    assert prepared.directory.input_copy.read_bytes() == data
    assert prepared.manifest.options.source == prepared.directory.input_copy
    assert prepared.directory.input_copy.stat().st_mode & 0o777 == 0o600
    assert names_in(batches) == {".lock", prepared.directory.path.name}
    again = prepare_(source=Path("-"), stdin=io.BytesIO(data))
    assert (again.is_new, again.manifest.batch_id) == (False, prepared.manifest.batch_id)
    assert not prepare_(source=source).is_new  # the same lines from a file


def test_standard_input_without_requests_leaves_nothing(prepare_: Prepare, batches: Path) -> None:
    with pytest.raises(InvalidRequest, match="standard input has no requests"):
        prepare_(stdin=io.BytesIO(b"\n"))
    assert names_in(batches) == {".lock"}


@pytest.fixture
def pipe() -> Iterator[tuple[BinaryIO, BinaryIO]]:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as ours, os.fdopen(writing, "wb", buffering=0) as theirs:
        yield ours, theirs


def test_a_pipe_is_read_to_its_end(prepare_: Prepare, pipe: tuple[BinaryIO, BinaryIO]) -> None:
    ours, theirs = pipe
    theirs.write(line("a"))
    more = iter([line("b"), b"", line("c")[:5], line("c")[5:]])

    def write_more() -> None:
        piece = next(more, None)
        if piece is None:
            theirs.close()
        elif piece:
            theirs.write(piece)

    prepared = prepare_(source=Path("-"), stdin=ours, tick=write_more)
    assert prepared.directory.input_copy.read_bytes() == line("a") + line("b") + line("c")


def test_a_pipe_that_says_nothing_does_not_hold_up_the_end(
    prepare_: Prepare, pipe: tuple[BinaryIO, BinaryIO], batches: Path
) -> None:
    num_ticks = 0

    def give_up_soon() -> None:
        nonlocal num_ticks
        num_ticks += 1
        if num_ticks == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        prepare_(source=Path("-"), stdin=pipe[0], tick=give_up_soon)
    assert names_in(batches) == {".lock"}


def test_what_killed_commands_left_is_cleared_up(prepare_: Prepare, batches: Path) -> None:
    batches.mkdir(parents=True)
    (batches / ".input-dead").write_bytes(b"x")
    (batches / ".removed-1").mkdir()
    with spool(batches) as (living, _):
        prepared = prepare_()
        assert names_in(batches) == {".lock", living.name, prepared.directory.path.name}


# Records


async def in_state(store: BatchStore, batch_id: str, state: BatchState, **fields: Any) -> None:
    record = await store.read(batch_id)
    await store.move(batch_id, [record.state], state, fields)


async def test_a_new_batch_waits_to_be_validated(prepare_: Prepare, store: BatchStore) -> None:
    prepared = prepare_(timeout_s=60)
    record = await store.read(await submit(store, prepared))
    assert (record.id, record.state, record.recovered) == (prepared.manifest.batch_id, "validating", False)
    assert (record.directory, record.options) == (str(prepared.directory.path), prepared.manifest.options)
    assert 60_000 <= record.deadline_ms - record.created_ms < 80_000


@pytest.mark.parametrize("state", ["validating", "in_progress", "cancelling", "expiring", "finalizing"])
async def test_one_that_goes_on_is_joined(prepare_: Prepare, store: BatchStore, state: BatchState) -> None:
    batch_id = await submit(store, prepare_())
    await in_state(store, batch_id, state, cursor=2, admitted=2, succeeded=1)
    before = await store.read(batch_id)
    assert before.deadline_ms == 0
    assert await submit(store, prepare_(window=9, timeout_s=60)) == batch_id
    after = await store.read(batch_id)
    assert (after.options.window, after.deadline_ms > 0) == (9, True)
    assert after.model_copy(update={"options": before.options, "deadline_ms": 0}) == before
    await submit(store, prepare_())
    assert (await store.read(batch_id)).deadline_ms == 0


@pytest.mark.parametrize("state", ["completed", "cancelled", "expired"])
async def test_one_that_is_over_stays_so(prepare_: Prepare, store: BatchStore, state: BatchState) -> None:
    batch_id = await submit(store, prepare_())
    await in_state(store, batch_id, state)
    before = await store.read(batch_id)
    await submit(store, prepare_(timeout_s=60))
    assert await store.read(batch_id) == before


async def test_one_that_failed_begins_again_with_what_is_on_the_disk(prepare_: Prepare, store: BatchStore) -> None:
    prepared = prepare_()
    batch_id = await submit(store, prepared)
    counts = {"cursor": 3, "admitted": 3, "collected": 1, "succeeded": 1, "total": 3}
    await in_state(store, batch_id, "in_progress", **counts)
    number = await store.revive(batch_id, "feed")
    assert number is not None
    before = StepTurn(batch_id, "feed", number, "mine")
    assert await store.begin(before) == "ok"
    ended = {"error": "disk full", "ending": "cancelled", "cancel_requested": 1, "ended_ms": 5}
    await in_state(store, batch_id, "failed", **ended)
    finish(prepared, 0, 2)
    finish(prepared, 1, reason="error")
    assert await submit(store, prepare_()) == batch_id
    record = await store.read(batch_id)
    assert (record.state, record.recovered, record.cursor, record.admitted, record.collected) == (
        *("validating", True, 0, 0, 0),
    )
    assert (record.succeeded, record.failed) == (2, 1)
    assert (record.error, record.ending, record.cancel_requested, record.ended_ms) == ("", "", False, 0)
    await in_state(store, batch_id, "in_progress")
    assert await store.begin(before) == "stale"  # whoever fed it before does not go on
    assert await store.feed(before, 0, Feed("request", b"x")) == "moved"
    assert await store.revive(batch_id, "feed") is not None


async def test_a_record_that_the_server_lost_is_made_again_from_the_files(
    prepare_: Prepare, store: BatchStore, raw_redis: Redis
) -> None:
    prepared = prepare_()
    batch_id = await submit(store, prepared)
    finish(prepared, 1)
    await raw_redis.delete(store.keys.batch(batch_id), store.keys.batches())
    assert await submit(store, prepared) == batch_id  # the same preparation: finished lines are counted anew
    record = await store.read(batch_id)
    assert (record.state, record.recovered, record.succeeded, record.failed) == ("validating", True, 1, 0)
    assert [one.id for one in await store.all()] == [batch_id]


# Giving up


def test_starting_over_removes_what_was_finished(prepare_: Prepare) -> None:
    first = prepare_()
    finish(first, 0, 2)
    partial = temporary_output(first.manifest.options.target, first.manifest.options.errors, first.manifest.batch_id)
    for path in partial:
        path.write_bytes(b"half")
    again = prepare_(restart=True, speculate=False)
    assert again.given_up == GivenUp(first.manifest.batch_id, frozenset({0, 2}))
    assert (again.is_new, again.num_finished) == (True, 0)
    assert again.manifest.batch_id != first.manifest.batch_id
    assert names_in(again.directory.path) == {"manifest.json"}
    assert not any(path.exists() for path in partial)


def test_starting_over_where_nothing_is_there_is_a_start(prepare_: Prepare) -> None:
    prepared = prepare_(restart=True)
    assert (prepared.is_new, prepared.given_up) == (True, None)


def test_starting_over_is_not_begun_with_an_input_that_is_refused(prepare_: Prepare, source: Path) -> None:
    first = prepare_()
    finish(first, 0)
    source.write_bytes(b"")
    with pytest.raises(InvalidRequest):
        prepare_(restart=True)
    assert first.directory.manifest() == first.manifest
    assert first.directory.finished_lines.exists()


def test_a_damaged_journal_can_be_given_up(prepare_: Prepare) -> None:
    first = prepare_()
    with Journal(first.directory, 300) as journal:
        journal.append([finished(index) for index in (0, 200)])
    with pytest.raises(BatchFilesDamaged):
        prepare_()
    index = first.directory.finished_index
    index.write_bytes(index.read_bytes().replace((200).to_bytes(4, "little"), bytes(4), 1))
    given_up = prepare_(restart=True).given_up
    assert given_up == GivenUp(first.manifest.batch_id, frozenset())


async def test_lines_in_flight_of_a_batch_that_was_given_up_end_without_a_trace(
    prepare_: Prepare, store: BatchStore, redis_bench: RedisBench, leftovers: Leftovers
) -> None:
    stage = await redis_bench.join()
    first = prepare_()
    batch_id = await submit(store, first)
    await in_state(store, batch_id, "in_progress", total=3, feed_nonce="mine")
    for index in range(3):
        await store.feed(StepTurn(batch_id, "feed", 0, "mine"), index, Feed("request", str(index).encode()))
    terminal = pack(Terminal(finish_reason="stop"))
    over = await take_one(stage, "tokenizer")
    effects = (Finish(terminal, "finished"),)
    await stage.commit([Transaction(over, line_request_id(batch_id, 0), 0, effects, ack=True)])
    finish(first, 0)  # and not acknowledged

    again = prepare_(restart=True)
    assert again.given_up is not None
    await end_given_up(store, stage.cancel, again.given_up)
    assert (await store.read(batch_id)).state == "cancelled"
    assert [await redis_bench.state_of(line_request_id(batch_id, index)) for index in range(3)] == [
        *("finished", "cancelled", "cancelled"),
    ]
    for delivery in await take(stage, "tokenizer", 2):  # a stage is told at its next commit
        index = int(delivery.payload)
        await stage.commit([Transaction(delivery, line_request_id(batch_id, index), 0, effects, ack=True)])
    assert await leftovers() == []
    await end_given_up(store, stage.cancel, again.given_up)  # twice is as good as once


async def test_a_batch_that_never_had_a_record_is_given_up_all_the_same(
    store: BatchStore, redis_bench: RedisBench
) -> None:
    stage = await redis_bench.join()
    await end_given_up(store, stage.cancel, GivenUp("batch_1", frozenset()))


async def test_the_lock_is_free_while_a_pipe_is_read(
    prepare_: Prepare, pipe: tuple[BinaryIO, BinaryIO], batches: Path
) -> None:
    ours, theirs = pipe
    theirs.write(line("a"))

    def others_go_on() -> None:
        with alone(batches):
            theirs.close()

    assert prepare_(source=Path("-"), stdin=ours, tick=others_go_on).num_lines == 1
