"""`python -m ops.prove`: one batch through real stacks; exit code 1 where any token, logprob or text differs."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from ops.commands.common import EXIT_FAILED, ModelOption, command_settings, complain, execute
from ops.measuring import checked_model
from ops.prove.batch import read_prompts
from ops.prove.matrix import by_stack, covering_cases, every_case
from ops.prove.run import run_matrix
from ops.prove.verdict import problems, table
from pipeline.batch.options import served_name
from pipeline.settings import Settings

PROMPTS = Path("examples/prompts.jsonl")


def prove(
    *,
    full: Annotated[bool, typer.Option("--full", help="Every combination, not only every pair.")] = False,
    prompts: Annotated[Path, typer.Option(help="A batch file.")] = PROMPTS,
    requests: Annotated[int, typer.Option(min=2, help="Lines of it to use.")] = 24,
    model: ModelOption = None,
) -> None:
    """Send one batch through stacks that differ in everything that must not matter, and compare what comes out.

    One and three decode processes, forward and backward, chunks of 64 and 512 tokens, with speculation and
    without. The control, the same batch with other seeds, must differ.

        python -m ops.prove
        python -m ops.prove --full
    """
    execute(_prove(command_settings(model), prompts, requests, full=full))


async def _prove(settings: Settings, prompts: Path, num_requests: int, *, full: bool) -> int:
    checked_model(settings)
    lines = read_prompts(prompts, served_name(settings.model), num_requests)
    cases = every_case() if full else covering_cases()
    _note(f"{len(cases)} runs of {num_requests} requests and a control, on {len(by_stack(cases))} stacks")
    proof = await run_matrix(settings, cases, lines, _note)
    print(table(proof))
    against = problems(proof, lines)
    for problem in against:
        complain(problem)
    if against:
        return EXIT_FAILED
    print(f"\nall {len(proof.runs)} runs gave the same token ids, logprobs and texts; other seeds gave others")
    return 0


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    typer.run(prove)
