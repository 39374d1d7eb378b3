"""What it costs to take a request over when decode was killed: with checkpoints, without, and beside a fresh prefill.

Owns the kill, and which moments are measured between. The stack is one of its own; each request is alone in it. Knows
nothing about how a request is taken over.

    killed ----- start -----> ready ----- lease -----> claimed ----- take-over -----> first new delta at the client
           of a new process         what is left of it          KV is loaded, the rest
                                                                computed again, one step

When a process claims, it says so itself: an injected fault that does nothing logs each time that its point is reached.
Times are the epoch's, of processes on one host.
"""

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from ops.bench.load import LoadFailed
from ops.bench.prompts import Prompts
from ops.chaos.homes import new_home
from ops.chaos.processes import all_ready, pids_of
from ops.measuring import markdown_table, measured_on
from ops.stack import Stack
from ops.supervision.crashes import RestartPolicy
from pipeline.boundaries import FIRST_TOKEN, KV_LOADED, PREFILL_CLAIMED
from pipeline.client.answers import Answer
from pipeline.client.asks import NewRequest
from pipeline.client.client import Client
from pipeline.clock import now_us
from pipeline.errors import SluiceError
from pipeline.messages import Delta
from pipeline.params import SamplingParams
from pipeline.settings import Settings

LEASE_S = 2.0  # shorter than a process takes to start, so that the new one need not wait long
CLAIM_POINT = "decode.claimed"
CLAIM_LOG = f"{CLAIM_POINT}=delay:0.000001x*"
MORE_TOKENS = 32  # after those that are out when the process is killed: enough to be seen going on
POLICY = RestartPolicy(first_delay_s=0.05, max_delay_s=0.2, max_in_a_row=1000)
PROCESS = "decode"
LOG_TIMEOUT_S = 10.0
LOG_POLL_S = 0.05

T = TypeVar("T")


class NotTakenOver(SluiceError):  # noqa: N818 - reads as the fact it states
    """A request that was to be taken over was not, so there is nothing to measure."""

    retryable = True
    code = "not_taken_over"


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run."""

    prompt_tokens: tuple[int, ...]
    emitted_tokens: int
    num_repetitions: int


@dataclass(frozen=True, slots=True)
class TakeOver:
    """One request that outlived its process."""

    size: int
    """Tokens of the prompt, as planned."""
    keep_kv: bool
    prompt_tokens: int
    emitted_tokens: int
    """That were out when the process was killed."""
    recomputed_tokens: int
    """That the new process computed once more; of one that went back to prefill, those are not in it."""
    went_back: bool
    """Whether prefill had to compute it again."""
    start_s: float
    lease_s: float
    load_s: float
    """From the claim until its KV is in the engine's pages."""
    take_over_s: float
    """From the claim to the first new delta at the client."""


@dataclass(frozen=True, slots=True)
class FreshPrefill:
    """A prompt as long as prompt and output of the request that it is compared with."""

    size: int
    """Tokens of that request's prompt, as planned."""
    prompt_tokens: int
    compute_s: float
    """From prefill's claim to token 0."""
    second_token_s: float
    """From prefill's claim to the first delta of decode at the client: what doing it all again would take."""


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of one size."""

    with_checkpoints: TakeOver
    without: TakeOver
    fresh: FreshPrefill


async def run(
    plan: Plan, settings: Settings, model_path: Path, note: Callable[[str], None]
) -> tuple[dict[str, object], str]:
    """Measure all sizes, both ways; return the record and the table.

    Raises:
        LoadFailed: a request failed.
        NotTakenOver: one ended before its process was killed, or nobody claimed it.
    """
    taken: list[TakeOver] = []
    fresh: list[FreshPrefill] = []
    for keep_kv in (True, False):
        note(f"a stack {'with' if keep_kv else 'without'} checkpoints")
        fields = {"model": str(model_path), "lease_s": LEASE_S, "keep_kv": keep_kv, "fault": CLAIM_LOG}
        with new_home(settings, **fields) as own:
            async with Stack(own, policy=POLICY) as stack:
                trial = _Trial(stack, plan, note)
                taken_now, fresh_now = await stack.watched(trial.run())
        taken += taken_now
        fresh += fresh_now
    rows = medians(taken, fresh)
    record: dict[str, object] = {
        "measured_on": measured_on(),
        "model": model_path.stem,
        "emitted_tokens": plan.emitted_tokens,
        "chunk_tokens": settings.chunk_tokens,
        "lease_s": LEASE_S,
        "take_overs": [asdict(one) for one in taken],
        "fresh_prefills": [asdict(one) for one in fresh],
    }
    return record, table(rows)


def medians(taken: Sequence[TakeOver], fresh: Sequence[FreshPrefill]) -> list[Row]:
    """Return a row for each size; a median is a measurement as a whole, so that its parts belong together."""
    rows: list[Row] = []
    for size in sorted({one.size for one in taken}):
        kept, lost = ([one for one in taken if one.size == size and one.keep_kv is keep] for keep in (True, False))
        beside = [one for one in fresh if one.size == size]
        rows.append(Row(_median_of(kept), _median_of(lost), _median(beside, lambda one: one.second_token_s)))
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return what a take-over takes, apart from waiting for the lease and the process, and the ratios."""
    header = (
        "tokens of prompt + output",
        "computed again",
        "take-over s",
        "of it loading",
        "without checkpoints s",
        "went back to prefill",
        "fresh prefill s",
        "to its second token",
        "with / fresh",
        "with / without",
        "start of a process s",
        "lease s",
    )
    cells: list[tuple[str, ...]] = []
    for row in rows:
        kept, lost, fresh = row.with_checkpoints, row.without, row.fresh
        cells.append(
            (
                f"{kept.prompt_tokens} + {kept.emitted_tokens}",
                f"{kept.recomputed_tokens}",
                f"{kept.take_over_s:.3f}",
                f"{kept.load_s:.3f}",
                f"{lost.take_over_s:.3f}",
                "yes" if lost.went_back else "no",
                f"{fresh.compute_s:.3f}",
                f"{fresh.second_token_s:.3f}",
                f"{kept.take_over_s / fresh.second_token_s:.2f}",
                f"{kept.take_over_s / lost.take_over_s:.2f}",
                f"{kept.start_s:.1f}",
                f"{kept.lease_s:.1f}",
            )
        )
    return markdown_table(header, cells)


class _Trial:
    """One stack, and what is done to its decode process."""

    def __init__(self, stack: Stack, plan: Plan, note: Callable[[str], None]) -> None:
        self._stack = stack
        self._plan = plan
        self._note = note
        self._client: Client = stack.client()
        self._prompts = Prompts(Path(stack.settings.model))
        self._log = stack.settings.home / "logs" / f"{PROCESS}.log"
        self._num_asked = 0

    async def run(self) -> tuple[list[TakeOver], list[FreshPrefill]]:
        """Measure every size as often as planned, sizes in turn."""
        taken: list[TakeOver] = []
        fresh: list[FreshPrefill] = []
        for repetition in range(self._plan.num_repetitions):
            for size in self._plan.prompt_tokens:
                self._note(f"repetition {repetition + 1}: prompt of {size}")
                taken.append(await self._take_over(size))
                await all_ready(self._stack)
                # Also after each kill, so that the process that decodes its second token is as new as the other was.
                fresh.append(await self._fresh_prefill(size, taken[-1].prompt_tokens + taken[-1].emitted_tokens))
        return taken, fresh

    async def _take_over(self, size: int) -> TakeOver:
        arrivals = _Arrivals(self._plan.emitted_tokens, self._kill)
        answer = await self._answer(size, self._plan.emitted_tokens + MORE_TOKENS, arrivals)
        killed_us = arrivals.killed_us
        if killed_us is None:
            raise NotTakenOver(f"the request ended before {self._plan.emitted_tokens} tokens were out")
        log = await self._entries_after(killed_us)
        ready_us, claimed_us = log["stage_ready"], log["fault_injected"]
        first_index, first_us = arrivals.first_after(claimed_us)
        usage = answer.terminal.usage
        assert usage is not None, "one that did not fail has it"
        prefilled_us = _stamp(answer, PREFILL_CLAIMED)
        return TakeOver(
            size=size,
            keep_kv=self._stack.settings.keep_kv,
            prompt_tokens=usage.prompt_tokens,
            emitted_tokens=first_index,
            recomputed_tokens=usage.recomputed_tokens,
            went_back=prefilled_us > killed_us,
            start_s=(ready_us - killed_us) / 1e6,
            lease_s=(claimed_us - ready_us) / 1e6,
            load_s=(_stamp(answer, KV_LOADED) - claimed_us) / 1e6,
            take_over_s=(first_us - claimed_us) / 1e6,
        )

    async def _fresh_prefill(self, size: int, num_tokens: int) -> FreshPrefill:
        arrivals = _Arrivals()
        answer = await self._answer(num_tokens, 2, arrivals)
        claimed_us = _stamp(answer, PREFILL_CLAIMED)
        usage = answer.terminal.usage
        assert usage is not None, "one that did not fail has it"
        return FreshPrefill(
            size=size,
            prompt_tokens=usage.prompt_tokens,
            compute_s=(_stamp(answer, FIRST_TOKEN) - claimed_us) / 1e6,
            second_token_s=(arrivals.all[-1][1] - claimed_us) / 1e6,
        )

    async def _answer(self, num_prompt_tokens: int, num_tokens: int, arrivals: "_Arrivals") -> Answer:
        self._num_asked += 1
        prompt = self._prompts.prompt(self._num_asked, num_prompt_tokens)
        params = SamplingParams(temperature=0, seed=0, max_tokens=num_tokens, ignore_eos=True)
        ask = NewRequest(self._stack.settings.model, prompt, None, params, speculate=False)
        answer = await self._client.answer(ask, "interactive", arrivals.saw)
        if failure := answer.terminal.failure:
            raise LoadFailed(f"a request failed: {failure.message}")
        return answer

    def _kill(self) -> None:
        os.kill(pids_of(self._stack)[PROCESS], signal.SIGKILL)

    async def _entries_after(self, killed_us: int) -> Mapping[str, int]:
        """The first of each event that the new process logged; its lines may come a moment late."""
        deadline = time.monotonic() + LOG_TIMEOUT_S
        while True:
            found = first_events(self._log.read_text("utf-8"), killed_us)
            if {"stage_ready", "fault_injected"} <= found.keys():
                return found
            if time.monotonic() > deadline:
                raise NotTakenOver(f"the new process of {PROCESS} did not say that it claimed the request")
            await asyncio.sleep(LOG_POLL_S)


class _Arrivals:
    """When deltas arrived here; calls back once so many tokens are there."""

    def __init__(self, num_tokens: int = 0, then: Callable[[], None] | None = None) -> None:
        self.all: list[tuple[int, int]] = []
        """First index and epoch microseconds."""
        self.killed_us: int | None = None
        self._num_tokens = num_tokens
        self._then = then

    def saw(self, delta: Delta) -> None:
        self.all.append((delta.first_index, now_us()))
        if self._then is not None and delta.first_index + len(delta.token_ids) >= self._num_tokens:
            then, self._then = self._then, None
            self.killed_us = now_us()
            then()

    def first_after(self, at_us: int) -> tuple[int, int]:
        for arrival in self.all:
            if arrival[1] > at_us:
                return arrival
        raise NotTakenOver("no token arrived after the request was claimed again")


def first_events(log: str, after_us: int) -> dict[str, int]:
    """Return the time of the first entry of each event after a moment, from a stage's log; both in epoch microseconds.

    Lines that are no entries (warnings of libraries) are passed over.
    """
    found: dict[str, int] = {}
    for event, at_us in _entries(log):
        if at_us > after_us:
            found.setdefault(event, at_us)
    return found


def _entries(log: str) -> Iterator[tuple[str, int]]:
    for line in log.splitlines():
        try:
            entry: Any = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and "event" in entry and "timestamp" in entry:
            yield str(entry["event"]), round(1e6 * datetime.fromisoformat(str(entry["timestamp"])).timestamp())


def _stamp(answer: Answer, boundary: str) -> int:
    return next(stamp.at_us for stamp in answer.terminal.stamps if stamp.boundary == boundary)


def _median_of(taken: Sequence[TakeOver]) -> TakeOver:
    return _median(taken, lambda one: one.take_over_s)


def _median(values: Sequence[T], by: Callable[[T], float]) -> T:
    """Return the lower one of those in the middle."""
    return sorted(values, key=by)[(len(values) - 1) // 2]
