"""Runs the matrix: starts each stack once, sends the whole batch at once, keeps what came out.

Owns the settings of the stacks. The control, other seeds on the first stack, shows that equal outputs are not
equal for want of a difference.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from ops.in_order import in_order
from ops.outputs import Output
from ops.prove.batch import with_other_seeds
from ops.prove.matrix import Case, StackChoice, by_stack
from ops.stack import Stack
from pipeline.batch.lines import BatchLine
from pipeline.batch.results import Completion
from pipeline.client.answers import Answer
from pipeline.client.client import Client
from pipeline.errors import SluiceError
from pipeline.settings import Settings

NAMESPACE = "prove"  # a stack of somebody else on the same server keeps its own work


class ProofFailed(SluiceError):  # noqa: N818 - reads as the fact it states
    """A request failed, so there is nothing to compare."""

    retryable: ClassVar[bool] = True
    code: ClassVar[str] = "proof_failed"


@dataclass(frozen=True, slots=True)
class CaseRun:
    """The outputs of one run, by custom_id, and what it took."""

    case: Case
    outputs: dict[str, Output]
    draft_tokens: int
    accepted_tokens: int
    wall_s: float


@dataclass(frozen=True, slots=True)
class Proof:
    """All runs of a matrix, and the control."""

    runs: tuple[CaseRun, ...]
    control: CaseRun


async def run_matrix(
    settings: Settings, cases: Sequence[Case], lines: Sequence[BatchLine], note: Callable[[str], None]
) -> Proof:
    """Run every case, and the first one with other seeds.

    Raises:
        ProofFailed: a request failed.
        SluiceError: a stack did not start or did not stay.
    """
    runs: list[CaseRun] = []
    control: CaseRun | None = None
    for choice, shared in by_stack(cases).items():
        note(f"starting a stack: {choice.num_decode} x decode, chunks of {choice.chunk_tokens} tokens")
        async with Stack(_settings(settings, choice), {"decode": choice.num_decode}) as stack:
            for case in shared:
                runs.append(await _run(stack, case, lines))
                note(f"  {case.order}, speculation {case.speculate}: {runs[-1].wall_s:.1f} s")
            if control is None:
                control = await _run(stack, shared[0], with_other_seeds(lines))
                note(f"  the control, other seeds: {control.wall_s:.1f} s")
    assert control is not None, "there is at least one case"
    return Proof(tuple(runs), control)


def _settings(settings: Settings, choice: StackChoice) -> Settings:
    return settings.model_copy(update={"chunk_tokens": choice.chunk_tokens, "namespace": NAMESPACE})


async def _run(stack: Stack, case: Case, lines: Sequence[BatchLine]) -> CaseRun:
    client = stack.client()
    ordered = list(lines) if case.order == "forward" else list(reversed(lines))
    asks = [replace(line, speculate=case.speculate) for line in ordered]
    started_at = time.monotonic()
    answers = await stack.watched(_answers(client, asks))
    completions = [_completion(line, answer) for line, answer in zip(ordered, answers, strict=True)]
    return CaseRun(
        case=case,
        outputs={line.custom_id: Output.of(completion) for line, completion in zip(ordered, completions, strict=True)},
        draft_tokens=sum(completion.usage.draft_tokens for completion in completions),
        accepted_tokens=sum(completion.usage.accepted_tokens for completion in completions),
        wall_s=time.monotonic() - started_at,
    )


async def _answers(client: Client, asks: Sequence[BatchLine]) -> list[Answer]:
    """Send all at once and wait for all; the order of sending is that of the list."""
    answers: list[Answer] = []
    await in_order(asks, lambda ask: client.answer(ask, "batch"), lambda _, answer: answers.append(answer), len(asks))
    return answers


def _completion(line: BatchLine, answer: Answer) -> Completion:
    if not isinstance(answer.outcome, Completion):
        raise ProofFailed(f"{line.custom_id} failed in {answer.outcome.stage}: {answer.outcome.message}")
    return answer.outcome
