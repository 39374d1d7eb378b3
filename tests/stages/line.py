"""A pipeline in one process: the real stages on a tiny model, queues in memory, blobs in a directory of the test's own.

Each stage "process" has an engine of its own, so KV reaches decode through the pool or not at all. One that ends in
order must have given back all its pages; one that is killed just stops, as after `kill -9`.
"""

import asyncio
import dataclasses
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgpack
import numpy as np

from kv_store.blob import HEADER_BYTES, BlobKind, BlobMeta, Compression
from kv_store.layout import KvLayout
from kv_store.pool import FilePool
from kv_store.ref import BlobRef
from pipeline import wire
from pipeline.batch.results import Completion, outcome_of
from pipeline.clock import monotonic_s
from pipeline.counters import Counters
from pipeline.keys import STAGES, Priority, lanes_of
from pipeline.leases import LeaseKeeper
from pipeline.memory import MemoryQueues, MemoryTransport
from pipeline.messages import Delta, Failure, Stamp, Terminal, TokenizedPrompt
from pipeline.params import parse_params
from pipeline.transport import Outcome, Process, TakeCredit, Transaction, TransportOptions
from pipeline.worker import run_worker
from stages.compressor.stage import CompressorStage
from stages.decode.admission import Admission
from stages.decode.checkpoints import Checkpoints
from stages.decode.stage import DecodeLimits, DecodeStage
from stages.engine.config import ModelConfig
from stages.engine.engine import Engine
from stages.gguf.file import GgufFile
from stages.prefill.handover import Handover
from stages.prefill.stage import PrefillLimits, PrefillStage
from stages.text.tokenizer import Tokenizer

CHUNK_TOKENS = 64
LEASE_S = 10.0
NUM_PAGES = 16
DEADLINE_S = 20.0  # for what takes milliseconds, on a machine that may be busy
POLL_S = 0.005

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answer:
    """All that came out of one request."""

    deltas: tuple[Delta, ...]
    terminal: Terminal

    @property
    def completion(self) -> Completion:
        outcome = outcome_of(self.deltas, self.terminal)
        assert isinstance(outcome, Completion), outcome
        return outcome

    @property
    def failure(self) -> Failure:
        assert self.terminal.failure is not None, self.terminal
        return self.terminal.failure

    @property
    def result(self) -> tuple[object, ...]:
        """What must not depend on how the work was done."""
        done = self.completion
        return done.token_ids, done.text, done.logprobs, done.finish_reason


class WatchedTransport(MemoryTransport):
    """Notes commits, those that only ask apart from those that write, and can hold one of these until told to go on."""

    def __init__(
        self, queues: MemoryQueues, options: TransportOptions, hold: Callable[[Transaction], bool] | None = None
    ) -> None:
        super().__init__(queues, options)
        self._hold = hold
        self.asked: list[str] = []  # about which requests, by commits that only ask, for credit too
        self.num_refused_credits = 0
        self.num_asked_processes = 0
        self.committed: list[tuple[Transaction, Outcome]] = []
        self.holding = asyncio.Event()
        self.go_on = asyncio.Event()

    async def processes(self) -> list[Process]:
        self.num_asked_processes += 1
        return await super().processes()

    async def commit(self, transactions: Sequence[Transaction]) -> list[Outcome]:
        writing = [transaction for transaction in transactions if _writes(transaction)]
        if self._hold is not None and any(map(self._hold, writing)):
            self.holding.set()
            await soon(self.go_on.wait())
        outcomes = await super().commit(transactions)
        self.committed += [pair for pair in zip(transactions, outcomes, strict=True) if _writes(pair[0])]
        self.asked += [transaction.request_id for transaction in transactions if not _writes(transaction)]
        self.num_refused_credits += outcomes.count(Outcome.FULL)
        return outcomes


def _writes(transaction: Transaction) -> bool:
    return any(not isinstance(effect, TakeCredit) for effect in transaction.effects)


class ManualClock:
    """The clock that leases run on; it moves when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def end_leases(self) -> None:
        self.now += 2 * LEASE_S


@dataclass(slots=True)
class StageProcess:
    """One stage at work."""

    transport: WatchedTransport
    engine: Engine | None
    stopping: asyncio.Event
    task: "asyncio.Task[None]"

    async def kill(self) -> None:
        """End it without a goodbye."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@dataclass(slots=True)
class Line:
    """Queues, pool and model of one test, and whatever runs on them."""

    model_path: Path
    weight_cache: Path
    pool_directory: Path
    pool: FilePool
    tokenizer: Tokenizer
    codec: str = "fp8_e4m3"
    compression: Compression = "none"
    seal_in_prefill: bool = False
    max_decode_queue: int = 64
    keep_kv: bool = True
    max_num_seqs: int = 4
    num_pages: int = NUM_PAGES
    num_speculative_tokens: int = 4
    clock: ManualClock = field(default_factory=ManualClock)
    counters: Counters = field(default_factory=Counters)
    queues: MemoryQueues = field(init=False)

    def __post_init__(self) -> None:
        self.queues = MemoryQueues(monotonic=self.clock)
        self.announce_decode(slots=32)

    def announce_decode(self, slots: int) -> None:
        """Let it be known that a decode process is there, which prefill asks before it begins."""
        info = msgpack.packb({"parts": {}, "pool": self.pool.pool_id, "slots": slots, "pages": self.num_pages})
        assert info is not None
        self.queues.broker.registrations["decode", "announced"] = (info, math.inf)

    def transport(self, consumer: str, hold: Callable[[Transaction], bool] | None = None) -> WatchedTransport:
        options = TransportOptions(consumer, pool_id=self.pool.pool_id, lease_s=LEASE_S)
        return WatchedTransport(self.queues, options, hold)

    def engine(self, num_pages: int = NUM_PAGES) -> Engine:
        """A new one; its unwritten pages hold rubbish, as those of a busy process do."""
        engine = Engine(self.model_path, self.codec, num_pages, 1, self.weight_cache)
        for array in (engine.cache.key_scales, engine.cache.value_scales):
            array.fill(np.float32(1e30))
        return engine

    def end_text_with(self, *token_ids: int) -> None:
        """Let these tokens be the model's end of generation."""
        ending = dataclasses.replace(self.tokenizer.vocabulary, end_of_generation_ids=frozenset(token_ids))
        self.tokenizer = Tokenizer(ending)

    async def submit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        max_tokens: int,
        *,
        speculate: bool = True,
        priority: Priority = "batch",
        **params: object,
    ) -> TokenizedPrompt:
        """Put a request in front of prefill."""
        message = TokenizedPrompt(
            request_id=request_id,
            priority=priority,
            prompt_token_ids=tuple(prompt_token_ids),
            params=parse_params({"seed": 1, "temperature": 0} | params),
            max_tokens=max_tokens,
            speculate=speculate,
            stamps=(Stamp(boundary="tokenized", at_us=1),),
        )
        self.queues.broker.create_request(request_id)
        await self.append("prefill", wire.pack(message), priority)
        return message

    async def append(self, stage: str, payload: bytes, priority: Priority = "batch") -> None:
        """Add an entry to a stage's stream."""
        self.queues.broker.append(stage, priority, self.pool.pool_id, payload)
        async with self.queues.changed:
            self.queues.changed.notify_all()

    async def answer(self, request_id: str) -> Answer:
        """Follow a request to its end."""
        return await soon(self._answer(request_id))

    async def _answer(self, request_id: str) -> Answer:
        client, deltas, num_tokens = self.transport("client"), [], 0
        while True:
            for entry in await client.read_results(request_id, num_tokens, block_s=1):
                if entry.offset is None:
                    return Answer(tuple(deltas), wire.unpack(entry.data, Terminal))
                deltas.append(wire.unpack(entry.data, Delta))
                num_tokens = entry.offset

    @asynccontextmanager
    async def running(self, *stages: str) -> AsyncIterator[None]:
        """Run one process of each stage, and stop them in order."""
        async with AsyncExitStack() as stack:
            for stage in stages:
                await stack.enter_async_context(self.process(stage))
            yield

    @asynccontextmanager
    async def process(
        self, stage: str, hold: Callable[[Transaction], bool] | None = None
    ) -> AsyncIterator[StageProcess]:
        """Run one process of a stage; on leaving, it stops in order unless it was killed."""
        transport, stopping = self.transport(f"{stage}-process", hold), asyncio.Event()
        engine = None if stage == "compressor" else self.engine(self.num_pages)
        leases = LeaseKeeper(transport, LEASE_S)
        work = {"prefill": self._prefill, "compressor": self._compressor, "decode": self._decode}[stage]
        task = asyncio.create_task(work(transport, leases, engine, stopping), name=stage)
        process = StageProcess(transport, engine, stopping, task)
        try:
            yield process
            stopping.set()
            if not task.cancelled():
                await soon(task)
                assert engine is None or engine.cache.num_free_pages == engine.cache.num_pages
        finally:
            await process.kill()
            if engine is not None:
                engine.__exit__()
            if task.done() and not task.cancelled() and task.exception() is not None:
                raise RuntimeError(f"{stage} crashed") from task.exception()

    async def _prefill(
        self, transport: WatchedTransport, leases: LeaseKeeper, engine: Engine | None, stopping: asyncio.Event
    ) -> None:
        assert engine is not None
        handover = Handover(
            engine,
            self.pool,
            chunk_tokens=CHUNK_TOKENS,
            seal=self.seal_in_prefill,
            compression=self.compression,
        )
        limits = PrefillLimits(CHUNK_TOKENS, self.max_decode_queue, self.keep_kv)
        stage = PrefillStage(transport, leases, engine, self.pool, self.tokenizer, handover, limits)
        await stage.run(stopping)

    async def _compressor(
        self, transport: WatchedTransport, leases: LeaseKeeper, _: Engine | None, stopping: asyncio.Event
    ) -> None:
        stage = CompressorStage(self.pool, self.layout, self.compression)
        await run_worker(stage, transport, leases, stopping)

    async def _decode(
        self, transport: WatchedTransport, leases: LeaseKeeper, engine: Engine | None, stopping: asyncio.Event
    ) -> None:
        assert engine is not None
        admission = Admission(transport, leases, engine, self.pool, self.tokenizer, self.counters, keep_kv=self.keep_kv)
        stage = DecodeStage(
            transport,
            leases,
            engine,
            admission,
            Checkpoints(engine, self.pool, admission.format, self.compression),
            self.counters,
            DecodeLimits(self.max_num_seqs, self.num_speculative_tokens),
        )
        await stage.run(stopping)

    @property
    def layout(self) -> KvLayout:
        with GgufFile.open(self.model_path) as file:
            return ModelConfig.from_gguf(file).kv_layout

    def fill_pool(self, left_bytes: int = 0) -> BlobRef:
        """Leave only so much room in the pool, with one large blob."""
        meta = BlobMeta(
            kind=BlobKind.PAGED,
            codec_id=1,
            fingerprint=bytes(32),
            content_address=bytes(32),
            start_token=0,
            num_tokens=1,
            attempt=0,
        )
        return self.pool.write("kv_ballast", meta, [bytes(self.pool.free_bytes() - HEADER_BYTES - left_bytes)])

    def num_entries(self, stage: str) -> int:
        return sum(self.queues.broker.length(stage, lane, self.pool.pool_id) for lane in lanes_of(stage))

    def dead_letters(self, stage: str) -> list[str]:
        return [letter.reason for letter in self.queues.broker.dead.get(stage, ())]

    async def cancel(self, request_id: str) -> None:
        """End a request as its client does."""
        assert await self.transport("client").cancel(request_id, wire.pack(Terminal(finish_reason="cancelled")))

    def forget(self, request_id: str) -> None:
        """Take a request back: its state goes, entries that are not in work too."""
        del self.queues.broker._requests[request_id]
        self.queues.broker.credits.drop(request_id)  # lost with it, or removed by a sweeper
        for entries in self.queues.broker.streams.values():
            for entry_id, entry in list(entries.items()):
                identity = wire.read_identity(entry.payload)
                if not entry.delivered and identity is not None and identity[0] == request_id:
                    del entries[entry_id]

    def assert_nothing_left(self) -> None:
        """No entry waits, no request is open, no blob is there."""
        assert {stage: self.num_entries(stage) for stage in STAGES} == dict.fromkeys(STAGES, 0)
        open_requests = {k for k, v in self.queues.broker.requests().items() if v.expires_at is None}
        assert open_requests == set()
        assert self.pool.names() == []
        assert [owner for owned in self.queues.broker.credits.by_pool.values() for owner in owned] == []


async def soon(awaitable: Awaitable[T]) -> T:
    """Await something that is due at once."""
    return await asyncio.wait_for(awaitable, DEADLINE_S)


async def holds(condition: Callable[[], bool]) -> None:
    """Return when the condition holds; fail when it does not come to hold."""
    deadline = monotonic_s() + DEADLINE_S
    while not condition():
        assert monotonic_s() < deadline, "it did not come to hold"
        await asyncio.sleep(POLL_S)
