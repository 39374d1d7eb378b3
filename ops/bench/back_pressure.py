"""Back pressure: decode is made four times slower, and far more requests come than it can do. Does anything grow?

Owns the flood, the samples, the bound of each series, and the verdict. The stack is one of its own. Knows nothing
about how work is held back: it only looks at queues, credits, blobs, memory and the door.

    first     the flood on a stack as it is, for the time of a step
    then      the same with a delay of three times that in front of each step, for as long as asked
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from kv_store.pool import FilePool
from ops.bench.chart import Chart, Line, panels
from ops.bench.proc import MIB, resident_mib
from ops.bench.prompts import Prompts
from ops.chaos.homes import new_home
from ops.chaos.processes import pids_of
from ops.measuring import markdown_table, measured_on
from ops.stack import Stack
from pipeline.boundaries import FINISHED, KV_LOADED
from pipeline.client.asks import NewRequest, new_request_id
from pipeline.client.client import Client
from pipeline.client.errors import QueueFull
from pipeline.clock import monotonic_s
from pipeline.connect import open_client
from pipeline.errors import SluiceError
from pipeline.keys import MAX_FINISHED, Keys
from pipeline.messages import Terminal
from pipeline.params import SamplingParams
from pipeline.queue_state import read_queues
from pipeline.redis_calls import RedisCalls
from pipeline.settings import Settings
from pipeline.wire import unpack
from stages.prefill.room import READ_AHEAD

NUM_CLIENTS = 8
PAUSE_S = 0.2  # of a client that was refused; well-behaved ones wait ten times as long
POOL_BYTES = 192 * MIB  # less than what decode has slots for: the pool's bound holds before that of requests
MAX_QUEUE = 32
RESULT_TTL_S = 30  # results that nobody reads must not be what grows; requests end more often than that
MIN_ENDED = 8  # requests whose steps are looked at
STEP_TIMEOUT_S = 180.0
SAMPLE_S = 0.5
MAX_SAMPLES = 300  # in the record
GROWTH, SLACK_MIB = 1.1, 4.0  # of memory that is flat: logs that are bounded by number fill up meanwhile
END_TIMEOUT_S = 60.0
END_POLL_S = 0.1
RATE_S = 5.0
PANEL_HEIGHT = 260
SERVER, SERVER_DATA = "server", "server's data"
BLOBS, CREDITS, WITH_CREDIT = "blobs", "credits", "requests with credit"
IN_FRONT, COMPRESSOR, DECODE = "in front of prefill", "in compressor's queue", "in decode's queue"

Unit = Literal["MiB", "requests", "entries"]


class StepUnknown(SluiceError):  # noqa: N818 - reads as the fact it states
    """Too few requests ended to tell how long a step takes."""

    retryable = True
    code = "step_unknown"


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run."""

    seconds: float
    factor: float
    """How many times slower decode is."""
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Sample:
    """A stack at one moment."""

    at_s: float
    """Since the flood began."""
    blobs_mib: float
    credits_mib: float
    """What requests may fill of the pool."""
    num_credits: int
    num_in_front: int
    """Entries of tokenizer and prefill, which the door counts."""
    num_compressor: int
    num_decode: int
    num_accepted: int
    """So far."""
    num_refused: int
    memory_mib: dict[str, float]
    """Of each process, and what the server says that it uses for data."""


@dataclass(frozen=True, slots=True)
class Bounded:
    """What became of one series."""

    name: str
    unit: Unit
    most: float
    bound: float
    is_configured: bool
    """Whether the bound is a setting's, or what the series itself was a while before."""

    @property
    def holds(self) -> bool:
        """Return whether it stayed at or below its bound."""
        return self.most <= self.bound


@dataclass(frozen=True, slots=True)
class Flooded:
    """What a flood came to."""

    samples: list[Sample]
    num_accepted: int
    num_refused: int
    step_ms: float
    num_ended: int
    """Requests that came to their end in that time; of the last thousand."""


async def run(
    plan: Plan, settings: Settings, model_path: Path, note: Callable[[str], None]
) -> tuple[dict[str, object], str, str]:
    """Measure a step, then flood a stack whose steps are slower; return the record, the verdicts and a picture.

    Raises:
        StepUnknown: too few requests ended.
    """
    fields: dict[str, object] = {
        "model": str(model_path),
        "kv_pool_bytes": POOL_BYTES,
        "max_queue": MAX_QUEUE,
        "result_ttl_s": RESULT_TTL_S,
    }
    note("measuring a step")
    async with _stack(settings, fields) as stack:
        usual = await stack.watched(_flood(stack, plan, None))
    delay_s = round((plan.factor - 1) * usual.step_ms / 1000, 6)
    note(f"a step takes {usual.step_ms:.0f} ms; flooding a stack that waits {1000 * delay_s:.0f} ms before each")
    async with _stack(settings, fields | {"fault": f"decode.step=delay:{delay_s:f}x*"}) as stack:
        slowed = await stack.watched(_flood(stack, plan, plan.seconds))
        bounded = bounds_of(slowed.samples, stack.settings)
    record: dict[str, object] = {
        "measured_on": measured_on(),
        "model": model_path.stem,
        "seconds": plan.seconds,
        "prompt_tokens": plan.prompt_tokens,
        "output_tokens": plan.output_tokens,
        "usual_step_ms": usual.step_ms,
        "slowed_step_ms": slowed.step_ms,
        "num_accepted": slowed.num_accepted,
        "num_refused": slowed.num_refused,
        "num_ended": slowed.num_ended,
        "bounds": [asdict(one) for one in bounded],
        "samples": [asdict(one) for one in slowed.samples[:: -(-len(slowed.samples) // MAX_SAMPLES)]],
    }
    return record, verdicts(usual, slowed, bounded), picture(slowed.samples, bounded)


def verdicts(usual: Flooded, slowed: Flooded, bounded: Sequence[Bounded]) -> str:
    """Return a line for each series, and what the door did."""
    rows = [
        (
            one.name,
            f"{one.most:.1f} {one.unit}",
            f"{one.bound:.1f}",
            "set" if one.is_configured else "flat",
            "ok" if one.holds else "EXCEEDED",
        )
        for one in bounded
    ]
    offered = slowed.num_accepted + slowed.num_refused
    lines = (
        f"a step of decode: {usual.step_ms:.0f} ms, slowed {slowed.step_ms:.0f} ms",
        f"door: {offered} requests came, {slowed.num_accepted} were accepted, {slowed.num_refused} were told to come "
        f"again (429): {'ok' if slowed.num_refused else 'NEVER BUSY, so this was no flood'}",
        f"ended meanwhile: {slowed.num_ended}",
    )
    return "\n\n".join((markdown_table(("series", "most", "bound", "kind", "verdict"), rows), "\n".join(lines)))


def bounds_of(samples: Sequence[Sample], settings: Settings) -> list[Bounded]:
    """Return each series with its bound.

    Memory of processes has no bound that is set: its second half is held against its second quarter. The first one is
    left out, in which slots and queues fill.
    """
    pool_mib = settings.kv_pool_bytes / MIB
    most_requests = min(settings.max_decode_queue, READ_AHEAD * settings.max_num_seqs)

    def configured(name: str, unit: Unit, of: Callable[[Sample], float], bound: float) -> Bounded:
        return Bounded(name, unit, max(map(of, samples)), bound, is_configured=True)

    found = [
        configured(BLOBS, "MiB", lambda sample: sample.blobs_mib, pool_mib),
        configured(CREDITS, "MiB", lambda sample: sample.credits_mib, pool_mib),
        configured(WITH_CREDIT, "requests", lambda sample: sample.num_credits, most_requests),
        configured(IN_FRONT, "entries", lambda sample: sample.num_in_front, settings.max_queue),
        # A chunk of each: prompts are shorter than one.
        configured(COMPRESSOR, "entries", lambda sample: sample.num_compressor, most_requests),
        configured(DECODE, "entries", lambda sample: sample.num_decode, most_requests),
    ]
    for name in samples[0].memory_mib:
        values = [sample.memory_mib[name] for sample in samples if name in sample.memory_mib]
        earlier = values[len(values) // 4 : len(values) // 2] or values
        bound = GROWTH * max(earlier) + SLACK_MIB
        found.append(Bounded(name, "MiB", max(values[len(values) // 2 :]), bound, is_configured=False))
    return found


def picture(samples: Sequence[Sample], bounded: Sequence[Bounded]) -> str:
    """Return the samples as a picture, with the bounds that are set."""
    bounds = {one.name: one.bound for one in bounded if one.is_configured}

    def line(name: str, of: Callable[[Sample], float]) -> Line:
        return Line(name, [(sample.at_s, of(sample)) for sample in samples])

    def bound(name: str, label: str) -> Line:
        return Line(label, [(0.0, bounds[name]), (samples[-1].at_s, bounds[name])], is_bound=True)

    memory = [
        Line(name, [(sample.at_s, sample.memory_mib[name]) for sample in samples if name in sample.memory_mib])
        for name in samples[0].memory_mib
    ]
    pool = [
        line(CREDITS, lambda sample: sample.credits_mib),
        bound(CREDITS, "the pool"),
        line(BLOBS, lambda sample: sample.blobs_mib),
    ]
    behind = [
        line(WITH_CREDIT, lambda sample: sample.num_credits),
        bound(WITH_CREDIT, "twice decode's slots"),
        line(DECODE, lambda sample: sample.num_decode),
        line(COMPRESSOR, lambda sample: sample.num_compressor),
    ]
    in_front = [line(IN_FRONT, lambda sample: sample.num_in_front), bound(IN_FRONT, "the door's bound")]
    door = [
        Line("accepted", per_second([(sample.at_s, sample.num_accepted) for sample in samples])),
        Line("refused", per_second([(sample.at_s, sample.num_refused) for sample in samples])),
    ]
    return panels(
        [
            (Chart("KV pool: what requests may fill, and what is full", "s", "MiB", PANEL_HEIGHT), pool),
            (Chart("From prefill to the end: requests with credit, and queues", "s", "", PANEL_HEIGHT), behind),
            (Chart("In front of prefill: tokenizer's and prefill's queue", "s", "", PANEL_HEIGHT), in_front),
            (Chart("The door", "s", "a second", PANEL_HEIGHT), door),
            (Chart("Memory of all processes", "s", "MiB", PANEL_HEIGHT), memory),
        ]
    )


def per_second(counted: Sequence[tuple[float, int]], over_s: float = RATE_S) -> list[tuple[float, float]]:
    """Return how fast something that is counted grows, at each moment over the time of over_s before it.

    `counted` are seconds and counts so far, the result seconds and rates; it begins with 0 at the first moment.
    """
    rates = [(counted[0][0], 0.0)]
    first = 0
    for at_s, count in counted[1:]:
        while at_s - counted[first][0] > over_s:
            first += 1
        begun_s, before = counted[first]
        rates.append((at_s, (count - before) / (at_s - begun_s) if at_s > begun_s else rates[-1][1]))
    return rates


@asynccontextmanager
async def _stack(settings: Settings, fields: dict[str, object]) -> AsyncIterator[Stack]:
    with new_home(settings, **fields) as own:
        async with Stack(own) as stack:
            yield stack


async def _flood(stack: Stack, plan: Plan, seconds: float | None) -> Flooded:
    """Flood a stack for so long, or until enough requests have ended; afterwards nothing of it is left."""
    flood = _Flood(stack, plan)
    async with _Watch.open(stack, flood) as watch:
        clients = [asyncio.create_task(flood.ask_on()) for _ in range(NUM_CLIENTS)]
        try:
            deadline = monotonic_s() + (STEP_TIMEOUT_S if seconds is None else seconds)
            while monotonic_s() < deadline:
                await _first_failure(clients, SAMPLE_S)
                await watch.look()
                if seconds is None and len(await _ended(stack)) >= MIN_ENDED + stack.settings.max_num_seqs:
                    break
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
        ended = await _ended(stack)
        await flood.take_back()
        await watch.until_empty()
    # Those of the first round began while slots filled; they say less.
    steps_ms = [step_ms(terminal) for terminal in ended[stack.settings.max_num_seqs :]]
    if len(steps_ms) < MIN_ENDED:
        raise StepUnknown(f"{len(ended)} requests ended; {MIN_ENDED + stack.settings.max_num_seqs} are needed")
    return Flooded(watch.samples, flood.num_accepted, flood.num_refused, median(steps_ms), len(ended))


async def _first_failure(tasks: Iterable[asyncio.Task[None]], timeout_s: float) -> None:
    """Wait for so long; raise what ended one of the tasks, if one has."""
    done, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        task.result()


async def _ended(stack: Stack) -> list[Terminal]:
    """The last requests that came to their end, oldest first; they are known for RESULT_TTL_S after the last one."""
    finished = [unpack(one.terminal, Terminal) for one in await stack.transport.finished(MAX_FINISHED)]
    return [terminal for terminal in finished if terminal.finish_reason == "length"]


def step_ms(terminal: Terminal) -> float:
    """Return how long each step of decode took a request; its first token is prefill's."""
    assert terminal.usage is not None, "one that did not fail has it"
    at_us = {stamp.boundary: stamp.at_us for stamp in terminal.stamps}
    return (at_us[FINISHED] - at_us[KV_LOADED]) / 1000 / (terminal.usage.completion_tokens - 1)


class _Flood:
    """Clients that ask again and again, whether or not anything is done; nobody reads the results."""

    def __init__(self, stack: Stack, plan: Plan) -> None:
        self.num_accepted = 0
        self.num_refused = 0
        self._client: Client = stack.client()
        self._model = stack.settings.model
        self._prompts = Prompts(Path(stack.settings.model))
        self._plan = plan
        # No more than that can be inside.
        self._newest: deque[str] = deque(maxlen=stack.settings.max_queue + stack.settings.max_decode_queue)

    async def ask_on(self) -> None:
        """Ask until cancelled."""
        params = SamplingParams(temperature=0, seed=0, max_tokens=self._plan.output_tokens, ignore_eos=True)
        while True:
            number = self.num_accepted + self.num_refused
            prompt = self._prompts.prompt(number, self._plan.prompt_tokens)
            ask = NewRequest(self._model, prompt, None, params, speculate=False)
            try:
                request_id = new_request_id()
                await self._client.submit(ask, request_id=request_id, timeout_s=0)
            except QueueFull:
                self.num_refused += 1
                await asyncio.sleep(PAUSE_S)
            else:
                self.num_accepted += 1
                self._newest.append(request_id)

    async def take_back(self) -> None:
        """Cancel what has not ended."""
        await self._client.cancel_many(self._newest)


class _Watch:
    """Looks at a stack again and again."""

    def __init__(self, flood: _Flood, redis: Any, pool: FilePool, keys: Keys, pids: Mapping[str, int]) -> None:
        self.samples: list[Sample] = []
        self._flood = flood
        self._redis = redis
        self._pool = pool
        self._keys = keys
        self._calls = RedisCalls(redis, "the bench's server", 0)
        self._pids = pids
        self._started_at = monotonic_s()

    @classmethod
    @asynccontextmanager
    async def open(cls, stack: Stack, flood: _Flood) -> AsyncIterator["_Watch"]:
        """Open what is looked at."""
        redis: Any = open_client(stack.settings)
        try:
            with FilePool.open(stack.settings.pool_dir, stack.settings.kv_pool_bytes) as pool:
                pids = pids_of(stack) | {SERVER: int((await redis.info("server"))["process_id"])}
                yield cls(flood, redis, pool, Keys(stack.settings.namespace), pids)
        finally:
            await redis.aclose()

    async def look(self) -> None:
        """Take a sample."""
        held = (await self._redis.hgetall(self._keys.credits(self._pool.pool_id))).values()
        entries = await self._entries()
        memory = {name: resident for name, pid in self._pids.items() if (resident := resident_mib(pid)) is not None}
        memory[SERVER_DATA] = (await self._redis.info("memory"))["used_memory"] / MIB
        usage = await asyncio.to_thread(self._pool.usage)
        sample = Sample(
            at_s=round(monotonic_s() - self._started_at, 2),
            blobs_mib=round(usage.used_bytes / MIB, 2),
            credits_mib=round(sum(int(credit.partition(b":")[2]) for credit in held) / MIB, 2),
            num_credits=len(held),
            num_in_front=entries["tokenizer"] + entries["prefill"],
            num_compressor=entries["compressor"],
            num_decode=entries["decode"],
            num_accepted=self._flood.num_accepted,
            num_refused=self._flood.num_refused,
            memory_mib={name: round(value, 2) for name, value in memory.items()},
        )
        self.samples.append(sample)

    async def until_empty(self) -> None:
        """Return when nothing is in the queues any more; what takes too long is left to the stack's own end."""
        deadline = monotonic_s() + END_TIMEOUT_S
        while any((await self._entries()).values()):
            if monotonic_s() > deadline:
                return
            await asyncio.sleep(END_POLL_S)

    async def _entries(self) -> dict[str, int]:
        """Entries of each stage, in work or not, all in one moment."""
        queues = await read_queues(self._calls, self._keys, self._pool.pool_id)
        return {
            stage: sum(queue.num_entries for queue in queues if queue.stage == stage)
            for stage in dict.fromkeys(queue.stage for queue in queues)
        }
