"""`sluice generate`: one request, its text streamed as it comes; Ctrl-C cancels it."""

import json
import sys
from typing import Annotated

import typer

from ops.commands.asking import (
    MaxTokensOption,
    PromptArgument,
    RawOption,
    SeedOption,
    SpeculateOption,
    StopOption,
    SystemOption,
    TemperatureOption,
    TimeoutOption,
    TopPOption,
    Wanted,
    chosen,
    new_request,
    read_prompt,
)
from ops.commands.common import EXIT_FAILED, ModelOption, command_settings, complain, execute
from ops.stack import choose_stack, with_model_of_stack
from pipeline.batch.results import Completion
from pipeline.client.answers import Answer
from pipeline.messages import Delta

EXAMPLES = """\b
Examples:
  sluice generate "Why is the sky blue?"
  sluice generate --temperature 0.8 --seed 7 --system "You are a pirate." "Hello!"
  sluice generate --raw --max-tokens 32 --json "Once upon a time"
"""


def generate(  # noqa: PLR0913 - one parameter for each option
    prompt: PromptArgument,
    *,
    model: ModelOption = None,
    system: SystemOption = None,
    raw: RawOption = False,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = None,
    stop: StopOption = None,
    speculate: SpeculateOption = True,
    timeout: TimeoutOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
) -> None:
    """Ask the model for one answer and print it as it comes."""
    sampling = chosen(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=stop)
    wanted = Wanted(read_prompt(prompt), system, raw, speculate, sampling, timeout)
    execute(_generate(model, wanted, as_json=as_json))


async def _generate(model: str | None, wanted: Wanted, *, as_json: bool) -> int:
    settings = await with_model_of_stack(command_settings(model))
    ask = new_request(wanted, settings)
    async with await choose_stack(settings, {}, with_jobs=False) as stack:
        so_far: list[str] = []
        on_delta = (lambda delta: so_far.append(delta.text)) if as_json else _print_text
        # Interrupted here, it is cancelled when the stack is left.
        answer = await stack.watched(stack.client().answer(ask, "interactive", on_delta))
    if as_json:
        print(json.dumps(summary(answer, "".join(so_far)), ensure_ascii=False))
    else:
        _finish_text(answer)
    return 0 if isinstance(answer.outcome, Completion) else EXIT_FAILED


def summary(answer: Answer, so_far: str) -> dict[str, object]:
    """Return an answer as the object that --json prints; so_far is the text of one that fails in the middle."""
    head: dict[str, object] = {
        "request_id": answer.submitted.request_id,
        "seed": answer.submitted.seed,
        "ttft_ms": answer.timing.ttft_ms,
        "tpot_ms": answer.timing.tpot_ms,
    }
    outcome = answer.outcome
    if isinstance(outcome, Completion):
        return head | {
            "text": outcome.text,
            "token_ids": list(outcome.token_ids),
            "finish_reason": outcome.finish_reason,
            "usage": outcome.usage.model_dump(),
            "error": None,
        }
    return head | {"text": so_far or None, "finish_reason": "error", "error": outcome.model_dump()}


def _print_text(delta: Delta) -> None:
    print(delta.text, end="", flush=True)


def _finish_text(answer: Answer) -> None:
    outcome = answer.outcome
    if not isinstance(outcome, Completion):
        print(flush=True)
        complain(f"{outcome.stage}: {outcome.message}")
        return
    print(answer.terminal.text, flush=True)
    if sys.stderr.isatty():
        ttft = "-" if answer.timing.ttft_ms is None else f"{answer.timing.ttft_ms:.0f} ms"
        tpot = "-" if answer.timing.tpot_ms is None else f"{answer.timing.tpot_ms:.1f} ms"
        print(
            f"[{outcome.usage.completion_tokens} tokens, {outcome.finish_reason}, TTFT {ttft}, TPOT {tpot}, "
            f"seed {answer.submitted.seed}]",
            file=sys.stderr,
        )
