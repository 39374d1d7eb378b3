"""Back pressure: decode is made four times slower, and far more requests come than it can do. Does anything grow?

Owns the flood and the samples; bounds.py judges them. The stack is one of its own. Knows nothing about how work is held
back: it only looks at queues, credits, blobs, memory and the door.

    first     the flood on a stack as it is, for the time of a step
    then      the same with a delay of three times that in front of each step, for as long as asked
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from kv_store.pool import FilePool
from ops.bench.bounds import Flooded, Sample, bounds_of, picture, verdicts
from ops.bench.proc import MIB, resident_mib
from ops.bench.prompts import Prompts
from ops.chaos.homes import new_home
from ops.chaos.processes import pids_of
from ops.measuring import measured_on
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

NUM_CLIENTS = 8
PAUSE_S = 0.2  # of a client that was refused; well-behaved ones wait ten times as long
POOL_BYTES = 192 * MIB  # less than what decode has slots for: the pool's bound holds before that of requests
MAX_QUEUE = 32
RESULT_TTL_S = 30  # results that nobody reads must not be what grows; requests end more often than that
NUM_STEPPED = 8  # requests whose steps are looked at, of a stack as it is
STEP_TIMEOUT_S = 180.0
SAMPLE_S = 0.5
MAX_SAMPLES = 300  # in the record
END_TIMEOUT_S = 60.0
END_POLL_S = 0.1
SERVER, SERVER_DATA = "server", "server's data"


class StepUnknown(SluiceError):  # noqa: N818 - reads as the fact it states
    """No request ended, so nobody knows how long a step takes."""

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


async def run(
    plan: Plan, settings: Settings, model_path: Path, note: Callable[[str], None]
) -> tuple[dict[str, object], str, str]:
    """Measure a step, then flood a stack whose steps are slower; return the record, the verdicts and a picture.

    Raises:
        StepUnknown: no request ended in the time.
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
                if seconds is None and len(await _ended(stack)) >= NUM_STEPPED + stack.settings.max_num_seqs:
                    break
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
        ended = await _ended(stack)
        await flood.take_back()
        await watch.until_empty()
    if not ended:
        raise StepUnknown(f"no request ended within {watch.samples[-1].at_s:.0f} s; give it more time")
    # Those of the first round began while slots filled; where there are others, they say more.
    steps_ms = [step_ms(terminal) for terminal in ended[stack.settings.max_num_seqs :] or ended]
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
            credits_mib=round(sum(int(credit.split(b" ")[0].partition(b":")[2]) for credit in held) / MIB, 2),
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
