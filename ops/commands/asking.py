"""What `generate` and `enqueue` share: the options that say what to ask for, and the request they make.

Owns the defaults of a single chat. Knows nothing about where the request goes.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated

import typer

from pipeline.batch.options import served_name
from pipeline.client.asks import NewRequest, check_text
from pipeline.errors import InvalidRequest
from pipeline.messages import ChatMessage
from pipeline.params import is_unicode, parse_params
from pipeline.settings import Settings
from pipeline.time_limit import check_time_limit

# Without one, the template adds the model's persona, and with that persona the model answers plain questions worse.
DEFAULT_SYSTEM = "You are a helpful assistant. Answer briefly and correctly."

MODEL_SAMPLING: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {"smollm2-135m-instruct": MappingProxyType({"temperature": 0.2, "top_p": 0.9})}  # its authors' advice
)

PromptArgument = Annotated[str, typer.Argument(help="What to say to the model; - reads standard input.")]
SystemOption = Annotated[
    str | None,
    typer.Option("--system", help=f"The system message of the chat. [default: {DEFAULT_SYSTEM}]", show_default=False),
]
RawOption = Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without a chat.")]
MaxTokensOption = Annotated[
    int | None, typer.Option("--max-tokens", help="Most tokens to generate. [default: SLUICE_DEFAULT_MAX_TOKENS, 256]")
]
TemperatureOption = Annotated[
    float | None, typer.Option("--temperature", help="0 is greedy. [default: the model's own]")
]
TopPOption = Annotated[float | None, typer.Option("--top-p", help="Nucleus sampling. [default: the model's own]")]
SeedOption = Annotated[int | None, typer.Option("--seed", help="The same seed gives the same text.")]
StopOption = Annotated[list[str] | None, typer.Option("--stop", help="End before this text; up to 4 times.")]
SpeculateOption = Annotated[
    bool, typer.Option("--speculate/--no-speculate", help="Draft tokens; never changes the text.")
]

TimeoutOption = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        help="Give the request up when it has not ended so long after it was accepted. [default: never]",
    ),
]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the command line asks for."""

    prompt: str
    system: str | None
    raw: bool
    speculate: bool
    sampling: Mapping[str, object]
    timeout_s: float | None = None


def read_prompt(prompt: str) -> str:
    """Return the prompt of the command line, or standard input for `-`."""
    return sys.stdin.read() if prompt == "-" else prompt


def chosen(**sampling: object) -> dict[str, object]:
    """Return the sampling parameters that the command line gives."""
    return {name: value for name, value in sampling.items() if value not in (None, [])}


def new_request(wanted: Wanted, settings: Settings) -> NewRequest:
    """Return the request, or raise InvalidRequest that names the option."""
    check_text("prompt", wanted.prompt)
    if not is_unicode(wanted.system or ""):
        raise InvalidRequest("system", "is not Unicode text")
    if wanted.raw and wanted.system is not None:
        raise InvalidRequest("system", "belongs to a chat, and --raw is none")
    timeout_s = None if wanted.timeout_s is None else check_time_limit("timeout", wanted.timeout_s)
    params = parse_params({**MODEL_SAMPLING.get(served_name(settings.model), {}), **wanted.sampling})
    system = DEFAULT_SYSTEM if wanted.system is None else wanted.system
    messages = (ChatMessage(role="system", content=system), ChatMessage(role="user", content=wanted.prompt))
    return NewRequest(
        model=settings.model,
        prompt=wanted.prompt if wanted.raw else None,
        messages=None if wanted.raw else messages,
        params=params,
        speculate=wanted.speculate,
        timeout_s=timeout_s,
    )
