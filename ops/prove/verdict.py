"""What the runs of a matrix prove: equal, different, or nothing because a choice had no effect.

Owns the judgement and its table. Knows nothing about stacks.
"""

from collections.abc import Iterator, Sequence

from ops.measuring import markdown_table
from ops.outputs import differences, digest
from ops.prove.batch import is_sampled
from ops.prove.run import CaseRun, Proof
from pipeline.batch.lines import BatchLine

MAX_SHOWN = 8  # differences of one run; a real one is usually in all requests


def problems(proof: Proof, lines: Sequence[BatchLine]) -> list[str]:
    """Return what speaks against the proof; nothing means that every run gave the same."""
    return [*_unequal(proof), *_without_effect(proof), *_control(proof, lines)]


def table(proof: Proof) -> str:
    """Return a row for each run, and one for the control."""
    header = ("decode processes", "chunk tokens", "order", "speculation", "tokens", "accepted drafts", "digest", "")
    expected = digest(proof.runs[0].outputs)
    rows = [_row(run, expected, "equal", "DIFFERENT") for run in proof.runs]
    rows.append(_row(proof.control, expected, "other seeds: NOT DIFFERENT", "other seeds"))
    return markdown_table(header, rows)


def _row(run: CaseRun, expected: str, if_equal: str, if_not: str) -> tuple[str, ...]:
    found = digest(run.outputs)
    return (
        str(run.case.num_decode),
        str(run.case.chunk_tokens),
        run.case.order,
        "on" if run.case.speculate else "off",
        str(sum(len(output.token_ids) for output in run.outputs.values())),
        f"{run.accepted_tokens} of {run.draft_tokens}",
        found,
        if_equal if found == expected else if_not,
    )


def _unequal(proof: Proof) -> Iterator[str]:
    first = proof.runs[0]
    for run in proof.runs[1:]:
        found = differences(first.outputs, run.outputs)
        yield from (f"{run.case}: {difference}" for difference in found[:MAX_SHOWN])
        if len(found) > MAX_SHOWN:
            yield f"{run.case}: and {len(found) - MAX_SHOWN} more requests differ"


def _without_effect(proof: Proof) -> Iterator[str]:
    """Speculation that accepts nothing, or drafts when it is off, compares nothing."""
    for run in proof.runs:
        if run.case.speculate and not run.accepted_tokens:
            yield f"{run.case}: no draft was accepted, so speculation was not tried"
        if not run.case.speculate and run.draft_tokens:
            yield f"{run.case}: {run.draft_tokens} tokens were drafted although speculation is off"


def _control(proof: Proof, lines: Sequence[BatchLine]) -> Iterator[str]:
    """Another seed must change sampled requests, and greedy ones not."""
    first, other = proof.runs[0].outputs, proof.control.outputs
    sampled = {line.custom_id for line in lines if is_sampled(line)}
    changed = {custom_id for custom_id in first if first[custom_id] != other[custom_id]}
    if not changed & sampled:
        yield "control: other seeds changed no sampled request"
    for custom_id in sorted(changed - sampled):
        yield f"control: {custom_id} is greedy, and another seed changed it"
