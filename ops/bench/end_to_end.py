"""The end-to-end benchmark: real stacks, one after the other, under the same load.

Owns which stacks are compared: with the compressor, and with prefill sealing its own blobs; each with and without
speculation as asked. A stack is started once for all its passes and warmed with texts that are not measured.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import msgpack

from ops.bench.figures import Figures, phase_table, speed_table
from ops.bench.load import Pass, asks_of, run_pass
from ops.downloads.datasets import SHAREGPT, first_turns
from ops.measuring import measured_on
from ops.progress import make_progress
from ops.stack import Stack
from pipeline.settings import Settings
from pipeline.transport import Transport

NAMESPACE = "bench"  # a stack of somebody else on the same server keeps its own work
WARM_REQUESTS = 4
WARM_TOKENS = 16

Speculation = Literal["on", "off", "both"]
_SPECULATE: dict[Speculation, tuple[bool, ...]] = {"on": (True,), "off": (False,), "both": (True, False)}


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run."""

    model_name: str
    num_requests: int
    output_tokens: int
    concurrency: int
    speculation: Speculation
    num_repetitions: int
    replicas: dict[str, int]


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of pass."""

    seal_in_prefill: bool
    speculate: bool

    def __str__(self) -> str:
        sealing = "sealed in prefill" if self.seal_in_prefill else "compressor"
        return f"{sealing}, {'speculation' if self.speculate else 'no speculation'}"


@dataclass(frozen=True, slots=True)
class CasePass:
    """A pass and what kind it was."""

    case: Case
    figures: Figures
    run: Pass


async def run(plan: Plan, settings: Settings, dataset_path: Path) -> tuple[dict[str, object], str]:
    """Run everything, and return the record and the tables."""
    turns = first_turns(dataset_path, plan.num_requests + WARM_REQUESTS)
    passes: list[CasePass] = []
    fingerprint: dict[str, str] = {}
    for _ in range(plan.num_repetitions):
        for seal_in_prefill in (False, True):
            chosen = settings.model_copy(update={"seal_in_prefill": seal_in_prefill, "namespace": NAMESPACE})
            async with Stack(chosen, plan.replicas) as stack:
                fingerprint = await engine_parts(stack.transport)
                passes += await _stack_passes(plan, stack, turns, seal_in_prefill=seal_in_prefill)
    return _record(plan, settings, fingerprint, passes), tables(passes)


def tables(passes: Sequence[CasePass]) -> str:
    """Return the figures of all passes."""
    named = [(str(one.case), one.figures) for one in passes]
    return f"{speed_table(named)}\n\n{phase_table(named)}"


async def engine_parts(transport: Transport) -> dict[str, str]:
    """Return what the stack's bits depend on, as its decode processes announce it."""
    for process in await transport.processes():
        if process.stage == "decode":
            return dict(msgpack.unpackb(process.info)["parts"])
    return {}


def _cases(plan: Plan, *, seal_in_prefill: bool) -> Iterator[Case]:
    for speculate in _SPECULATE[plan.speculation]:
        yield Case(seal_in_prefill, speculate)


async def _stack_passes(plan: Plan, stack: Stack, turns: Sequence[str], *, seal_in_prefill: bool) -> list[CasePass]:
    measured, warming = turns[: plan.num_requests], turns[plan.num_requests :]
    client = stack.client()
    warm = asks_of(warming, plan.model_name, WARM_TOKENS, speculate=True)
    await stack.watched(run_pass(client, warm, plan.concurrency))
    passes: list[CasePass] = []
    for case in _cases(plan, seal_in_prefill=seal_in_prefill):
        asks = asks_of(measured, plan.model_name, plan.output_tokens, speculate=case.speculate)
        with make_progress(len(asks), sys.stderr) as progress:
            progress.note(str(case))
            one = await stack.watched(
                run_pass(
                    client,
                    asks,
                    plan.concurrency,
                    lambda num: progress.add(num_tokens=num),
                    lambda _: progress.add(num_done=1),
                )
            )
        passes.append(CasePass(case, Figures.of(one), one))
    return passes


def _record(
    plan: Plan, settings: Settings, fingerprint: dict[str, str], passes: Sequence[CasePass]
) -> dict[str, object]:
    # Paths and addresses are this machine's business; sealing differs from pass to pass.
    left_out = {"home", "kv_pool_dir", "redis_url", "model", "namespace", "seal_in_prefill"}
    return {
        "model": plan.model_name,
        "dataset": {"requirement": SHAREGPT.requirement, "wheel_sha256": SHAREGPT.wheel_sha256},
        "num_requests": plan.num_requests,
        "output_tokens": plan.output_tokens,
        "concurrency": plan.concurrency,
        "replicas": plan.replicas,
        "settings": settings.model_dump(mode="json", exclude=left_out),
        "measured_on": measured_on(),
        "fingerprint": fingerprint,
        "passes": [
            {"case": asdict(one.case), "figures": asdict(one.figures), "raw": asdict(one.run)} for one in passes
        ],
    }
