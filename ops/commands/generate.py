"""`sluice generate`: one request, its text streamed as it comes."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated

import typer

from ops.commands.common import EXIT_FAILED, ModelOption, command_settings, complain, execute
from ops.session import Answer, NewRequest
from ops.stack import choose_stack
from pipeline.batch.results import Completion
from pipeline.errors import InvalidRequest
from pipeline.messages import ChatMessage, Delta
from pipeline.params import is_unicode, parse_params
from pipeline.settings import Settings

EXAMPLES = """\b
Examples:
  sluice generate "Why is the sky blue?"
  sluice generate --temperature 0.8 --seed 7 --system "You are a pirate." "Hello!"
  sluice generate --raw --max-tokens 32 --json "Once upon a time"
"""

# Without one, the template adds the model's persona, and with that persona the model answers plain questions worse.
DEFAULT_SYSTEM = "You are a helpful assistant. Answer briefly and correctly."

MODEL_SAMPLING: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {"smollm2-135m-instruct": MappingProxyType({"temperature": 0.2, "top_p": 0.9})}  # its authors' advice
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the command line asks for."""

    prompt: str
    system: str | None
    raw: bool
    speculate: bool
    sampling: Mapping[str, object]


def generate(  # noqa: PLR0913 - one parameter for each option
    prompt: Annotated[str, typer.Argument(help="What to say to the model; - reads standard input.")],
    *,
    model: ModelOption = None,
    system: Annotated[
        str | None,
        typer.Option(help=f"The system message of the chat. [default: {DEFAULT_SYSTEM}]", show_default=False),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without a chat.")] = False,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens to generate.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. [default: the model's own]")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling. [default: the model's own]")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; up to 4 times.")] = None,
    speculate: Annotated[
        bool, typer.Option("--speculate/--no-speculate", help="Draft tokens; never changes the text.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
) -> None:
    """Ask the model for one answer and print it as it comes."""
    chosen = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "stop": stop or None,
    }
    sampling = {name: value for name, value in chosen.items() if value is not None}
    text = sys.stdin.read() if prompt == "-" else prompt
    execute(_generate(model, Wanted(text, system, raw, speculate, sampling), as_json=as_json))


async def _generate(model: str | None, wanted: Wanted, *, as_json: bool) -> int:
    settings = command_settings(model)
    ask = new_request(wanted, settings)
    async with await choose_stack(settings, {}) as stack:
        session = stack.session()
        on_delta = (lambda _: None) if as_json else _print_text
        answer = await stack.watched(session.answer(ask, "interactive", on_delta))
    if as_json:
        print(json.dumps(summary(answer), ensure_ascii=False))
    else:
        _finish_text(answer)
    return 0 if isinstance(answer.outcome, Completion) else EXIT_FAILED


def new_request(wanted: Wanted, settings: Settings) -> NewRequest:
    """Return the request, or raise InvalidRequest that names the option."""
    for name, text in (("prompt", wanted.prompt), ("system", wanted.system or "")):
        if not is_unicode(text):
            raise InvalidRequest(name, "is not Unicode text")
    if not wanted.prompt:
        raise InvalidRequest("prompt", "is empty")
    if wanted.raw and wanted.system is not None:
        raise InvalidRequest("system", "belongs to a chat, and --raw is none")
    params = parse_params({**MODEL_SAMPLING.get(settings.model, {}), **wanted.sampling})
    system = DEFAULT_SYSTEM if wanted.system is None else wanted.system
    messages = (ChatMessage(role="system", content=system), ChatMessage(role="user", content=wanted.prompt))
    return NewRequest(
        model=settings.model,
        prompt=wanted.prompt if wanted.raw else None,
        messages=None if wanted.raw else messages,
        params=params,
        speculate=wanted.speculate,
    )


def summary(answer: Answer) -> dict[str, object]:
    """Return an answer as the object that --json prints."""
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
    return head | {"text": None, "finish_reason": "error", "error": outcome.model_dump()}


def _print_text(delta: Delta) -> None:
    print(delta.text, end="", flush=True)


def _finish_text(answer: Answer) -> None:
    outcome = answer.outcome
    if not isinstance(outcome, Completion):
        print(flush=True)
        complain(f"{outcome.stage}: {outcome.message}")
        return
    print(answer.held_back, flush=True)
    if sys.stderr.isatty():
        ttft = "-" if answer.timing.ttft_ms is None else f"{answer.timing.ttft_ms:.0f} ms"
        tpot = "-" if answer.timing.tpot_ms is None else f"{answer.timing.tpot_ms:.1f} ms"
        print(
            f"[{outcome.usage.completion_tokens} tokens, {outcome.finish_reason}, TTFT {ttft}, TPOT {tpot}, "
            f"seed {answer.submitted.seed}]",
            file=sys.stderr,
        )
