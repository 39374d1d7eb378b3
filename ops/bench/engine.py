"""Times the engine alone beside plain torch, in one run: machines differ more than engines do.

Owns what is timed and how: runners take turns, steps are timed one by one, medians count. Importing it loads torch
and numba, so it comes after `prepare_environment`.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kv_store.codecs.registry import codec_named
from ops.bench.naive import NaiveModel
from ops.bench.runners import EngineRunner, NaiveRunner, Runner
from ops.measuring import markdown_table, measured_on
from ops.offline import arithmetic, offline

CONTEXT_TOKENS = 300
PREFILL_TOKENS = 512
WARM_STEPS = 2
TOKEN_STRIDE = 6007  # a prime: spreads ids over any vocabulary


@dataclass(frozen=True, slots=True)
class Plan:
    """What to time."""

    model_name: str
    model_path: Path
    weight_cache: Path
    codec_name: str
    num_threads: int
    batches: Sequence[int]
    num_steps: int
    num_repetitions: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of one runner at one size; batch None is prefill."""

    runner: str
    batch: int | None
    num_tokens: int
    """That one call computes."""
    calls_ms: tuple[float, ...]

    @property
    def tokens_per_s(self) -> float:
        """By the median call."""
        return 1000 * self.num_tokens / statistics.median(self.calls_ms)


def run(plan: Plan, note: Callable[[str], None] = lambda _: None) -> tuple[dict[str, object], str]:
    """Time everything, and return the record and the table."""
    note("loading both models")
    with offline(plan.model_path, plan.weight_cache, plan.num_threads) as loaded:
        max_tokens = max(PREFILL_TOKENS + 1, CONTEXT_TOKENS + WARM_STEPS + plan.num_steps + 1)
        engine = EngineRunner(loaded.model, codec_named(plan.codec_name), max(plan.batches), max_tokens)
        runners: list[Runner] = [engine, NaiveRunner(NaiveModel(loaded.source, loaded.config))]
    timings = time_runners(plan, runners, loaded.config.vocab_size, note)
    record: dict[str, object] = {
        "model": plan.model_name,
        "model_sha256": loaded.model_sha256,
        "kv_codec": plan.codec_name,
        "context_tokens": CONTEXT_TOKENS,
        "prefill_tokens": PREFILL_TOKENS,
        "measured_on": measured_on(),
        "engine": arithmetic(),
        "timings": [asdict(timing) | {"tokens_per_s": timing.tokens_per_s} for timing in timings],
    }
    return record, table(timings)


def time_runners(
    plan: Plan, runners: Sequence[Runner], vocab_size: int, note: Callable[[str], None] = lambda _: None
) -> list[Timing]:
    """Time all sizes with all runners, which take turns at each."""
    calls: dict[tuple[str, int | None], list[float]] = {}
    for runner in runners:
        _time_prefill(runner, vocab_size)  # the first call fetches weights and compiled kernels
    for repetition in range(plan.num_repetitions):
        for batch in (None, *plan.batches):
            note(f"repetition {repetition + 1}: {'prefill' if batch is None else f'batch {batch}'}")
            for runner in runners:
                times = (
                    _time_prefill(runner, vocab_size) if batch is None else _time_steps(runner, batch, plan, vocab_size)
                )
                calls.setdefault((runner.name, batch), []).extend(times)
    return [
        Timing(name, batch, PREFILL_TOKENS if batch is None else batch, tuple(times))
        for (name, batch), times in calls.items()
    ]


def table(timings: Sequence[Timing]) -> str:
    """Return tokens per second by size, runner beside runner; the last column is the first over the last."""
    names = list(dict.fromkeys(timing.runner for timing in timings))
    found = {(timing.batch, timing.runner): timing.tokens_per_s for timing in timings}
    rows: list[tuple[str, ...]] = []
    for batch in dict.fromkeys(timing.batch for timing in timings):
        rates = [found[batch, name] for name in names]
        size = f"prefill of {PREFILL_TOKENS}" if batch is None else f"decode, batch {batch}"
        rows.append((size, *(f"{rate:.0f}" for rate in rates), f"{rates[0] / rates[-1]:.1f}"))
    return markdown_table(("tok/s", *names, "ratio"), rows)


def _time_prefill(runner: Runner, vocab_size: int) -> list[float]:
    token_ids = _token_ids(PREFILL_TOKENS, vocab_size)
    return [_timed(lambda: runner.prefill(token_ids))]


def _time_steps(runner: Runner, batch: int, plan: Plan, vocab_size: int) -> list[float]:
    runner.begin(_token_ids(CONTEXT_TOKENS, vocab_size), batch, WARM_STEPS + plan.num_steps)
    for _ in range(WARM_STEPS):
        runner.step()
    return [_timed(runner.step) for _ in range(plan.num_steps)]


def _timed(call: Callable[[], object]) -> float:
    """Milliseconds that a call takes."""
    started_at = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - started_at)


def _token_ids(num_tokens: int, vocab_size: int) -> list[int]:
    """Ids that are all over the vocabulary; a step's time does not depend on them."""
    return [(index + 1) * TOKEN_STRIDE % vocab_size for index in range(num_tokens)]
