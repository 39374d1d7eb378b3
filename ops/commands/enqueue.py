"""`sluice enqueue`: one request into the queue of a running stack; its id comes out."""

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
from ops.commands.common import ModelOption, execute
from ops.commands.connected import stack_client
from pipeline.keys import Priority

EXAMPLES = """\b
Examples:
  sluice enqueue "Why is the sky blue?"
  ID=$(sluice enqueue --max-tokens 500 "Tell me a story."); sluice tail $ID
  sluice enqueue --priority batch --id report-7 - < report.txt
"""


def enqueue(  # noqa: PLR0913 - one parameter for each option
    prompt: PromptArgument,
    *,
    request_id: Annotated[
        str | None,
        typer.Option("--id", help="An id of your own: the same again enqueues nothing. [default: a new one]"),
    ] = None,
    priority: Annotated[Priority, typer.Option("--priority", help="Interactive goes before batch.")] = "interactive",
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
) -> None:
    """Enqueue a prompt on the running stack and print the request's id.

    That is the stack of `sluice up` in this home, else the one at SLUICE_REDIS_URL. `sluice tail ID` shows the text,
    `sluice cancel ID` ends the request. The model is the stack's unless --model says otherwise.
    """
    sampling = chosen(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=stop)
    wanted = Wanted(read_prompt(prompt), system, raw, speculate, sampling, timeout)
    execute(_enqueue(model, wanted, priority, request_id))


async def _enqueue(model: str | None, wanted: Wanted, priority: Priority, request_id: str | None) -> int:
    async with stack_client(model, lasting=True) as client:
        submitted = await client.submit(new_request(wanted, client.settings), priority, request_id=request_id)
        stages = {process.stage for process in await client.transport.processes()}
    print(submitted.request_id, flush=True)
    if submitted.existed:
        print("the id was there already: nothing was enqueued", file=sys.stderr)
    if "tokenizer" not in stages:
        print("warning: no stage of this stack runs at the moment; the request waits for one", file=sys.stderr)
    return 0
