"""What the queues cost: latency of each hop, round trips to the server, and CPU time beside that of computing.

Owns the load, and the readings before and after it; queue_figures.py makes figures of them. The stack is one of its
own, with one process of each stage. Knows nothing about how stages work.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ops.bench.batch_memory import BenchFailed
from ops.bench.hops import hops_of
from ops.bench.load import LoadFailed
from ops.bench.proc import cpu_seconds
from ops.bench.prompts import Prompts
from ops.bench.queue_figures import SERVER, Cost, Reading, RoundTrips, tables
from ops.chaos.homes import new_home
from ops.chaos.processes import pids_of
from ops.measuring import measured_on
from ops.stack import Stack
from pipeline.client.answers import Answer
from pipeline.client.asks import NewRequest
from pipeline.client.client import Client
from pipeline.connect import open_client
from pipeline.messages import Delta
from pipeline.params import SamplingParams
from pipeline.settings import Settings

IDLE_S = 5.0
WARM_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run."""

    prompt_tokens: int
    output_tokens: int
    concurrency: int
    seconds: float
    """How long new requests are sent at that concurrency; one at a time for half as long."""


async def run(
    plan: Plan, settings: Settings, model_path: Path, note: Callable[[str], None]
) -> tuple[dict[str, object], str]:
    """Measure an idle stack, then one request at a time, then many; return the record and the tables."""
    note("starting a stack")
    with new_home(settings, model=str(model_path)) as own:
        async with Stack(own) as stack:
            redis: Any = open_client(stack.settings)
            try:
                costs = await stack.watched(_costs(plan, stack, redis, note))
            finally:
                await redis.aclose()
    record: dict[str, object] = {
        "measured_on": measured_on(),
        "model": model_path.stem,
        "prompt_tokens": plan.prompt_tokens,
        "output_tokens": plan.output_tokens,
        "concurrency": plan.concurrency,
        "passes": [_recorded(cost) for cost in costs],
    }
    return record, tables(costs)


@dataclass(slots=True)
class Served:
    """What clients got in one pass."""

    answers: list[Answer] = field(default_factory=list)
    num_deltas: int = 0

    def saw(self, _: Delta) -> None:
        """Count a result entry."""
        self.num_deltas += 1


async def _costs(plan: Plan, stack: Stack, redis: Any, note: Callable[[str], None]) -> list[Cost]:
    load = _Load(plan, stack)
    pids = pids_of(stack) | {SERVER: int((await redis.info("server"))["process_id"])}

    async def measured(name: str, work: Callable[[], Awaitable[Served]]) -> Cost:
        note(name)
        before = await take_reading(redis, pids)
        served = await work()
        return Cost.between(
            name, before, await take_reading(redis, pids), **_counted(served, stack.settings.max_num_seqs)
        )

    note("warming up")
    await load.answer(WARM_TOKENS, Served())
    return [
        await measured("idle", partial(_nothing, IDLE_S)),
        await measured("one at a time", partial(load.run, 1, plan.seconds / 2)),
        await measured(f"{plan.concurrency} at a time", partial(load.run, plan.concurrency, plan.seconds)),
    ]


class _Load:
    """A closed loop of clients, each of which asks again as soon as it is answered."""

    def __init__(self, plan: Plan, stack: Stack) -> None:
        self._plan = plan
        self._model = stack.settings.model
        self._client: Client = stack.client()
        self._prompts = Prompts(Path(stack.settings.model))
        self._num_asked = 0

    async def run(self, concurrency: int, seconds: float) -> Served:
        """Ask for so long, and return all answers, those that came later included."""
        ends_at = time.monotonic() + seconds
        served = Served()

        async def ask_on() -> None:
            while time.monotonic() < ends_at:
                await self.answer(self._plan.output_tokens, served)

        try:
            async with asyncio.TaskGroup() as clients:
                for _ in range(concurrency):
                    clients.create_task(ask_on())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return served

    async def answer(self, num_tokens: int, served: Served) -> None:
        """Ask once, without drafts: a step is then a token of each request.

        Raises:
            LoadFailed: the request failed.
        """
        self._num_asked += 1
        prompt = self._prompts.prompt(self._num_asked, self._plan.prompt_tokens)
        params = SamplingParams(temperature=0, seed=0, max_tokens=num_tokens, ignore_eos=True)
        ask = NewRequest(self._model, prompt, None, params, speculate=False)
        answer = await self._client.answer(ask, "interactive", served.saw)
        if failure := answer.terminal.failure:
            raise LoadFailed(f"a request of the load failed: {failure.message}")
        served.answers.append(answer)


async def _nothing(seconds: float) -> Served:
    await asyncio.sleep(seconds)
    return Served()


async def take_reading(redis: Any, pids: Mapping[str, int]) -> Reading:
    """Return all counters as they are now; the answer to this question is counted after it.

    Raises:
        BenchFailed: one of the processes is gone.
    """
    info: dict[str, Any] = await redis.info("stats", "commandstats")

    def calls(command: str) -> int:
        return info.get(f"cmdstat_{command}", {}).get("calls", 0)

    trips = RoundTrips(info["total_writes_processed"], calls("evalsha") + calls("eval"), calls("xread"))
    try:
        cpu = {name: cpu_seconds(pid) for name, pid in pids.items()}
    except FileNotFoundError as error:
        raise BenchFailed(f"a process of the stack ended while it was measured: {error.filename}") from error
    return Reading(time.monotonic(), trips, cpu, time.process_time())


def _counted(served: Served, num_slots: int) -> dict[str, Any]:
    return {
        "num_requests": len(served.answers),
        "output_tokens": sum(answer.timing.num_tokens for answer in served.answers),
        "num_deltas": served.num_deltas,
        "hops": hops_of((answer.terminal.stamps for answer in served.answers), num_slots),
    }


def _recorded(cost: Cost) -> dict[str, Any]:
    derived = {"stack_cpu_s": cost.stack_cpu_s, "queue_cpu_s": cost.queue_cpu_s, "queue_share": cost.queue_share}
    return asdict(cost) | derived
