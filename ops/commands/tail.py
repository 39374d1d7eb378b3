"""`sluice tail`: what comes out of a request, from any token on, while it runs or afterwards."""

import json
from typing import Annotated

import typer

from ops.commands.common import EXIT_FAILED, complain, execute
from ops.commands.connected import stack_client
from pipeline.errors import UnknownRequest
from pipeline.messages import Delta, Terminal

EXAMPLES = """\b
Examples:
  sluice tail req_3f9...
  sluice tail --from 100 req_3f9...              go on after the first 100 tokens
  sluice tail --json req_3f9... | jq -r .text
"""


def tail(
    request_id: Annotated[str, typer.Argument(metavar="ID", help="As `sluice enqueue` printed it.")],
    *,
    after: Annotated[int, typer.Option("--from", min=0, metavar="N", help="Leave out the first N tokens.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object for each delta, and for the end.")
    ] = False,
) -> None:
    """Print the text of a request as it comes, to its end.

    As often as wanted, also after the end, until the results expire (SLUICE_RESULT_TTL_S, an hour). Ctrl-C ends the
    reading only; `sluice cancel` ends the request. Exit code 0: it was answered; 1: it failed, was cancelled, or is
    not known.
    """
    execute(_tail(request_id, after, as_json=as_json))


async def _tail(request_id: str, after: int, *, as_json: bool) -> int:
    async with stack_client() as client:
        try:
            async for entry in client.stream(request_id, after):
                print(json_line(entry) if as_json else entry.text, end="\n" if as_json else "", flush=True)
                if isinstance(entry, Terminal):
                    return _ended(entry, as_json=as_json)
        except UnknownRequest as error:
            complain(str(error))
    return EXIT_FAILED


def json_line(entry: Delta | Terminal) -> str:
    """Return a delta or the terminal as --json prints it."""
    record = entry.model_dump(mode="json", exclude={"kind", "stamps"})
    if isinstance(entry, Delta) and entry.logprobs is None:
        del record["logprobs"]
    return json.dumps(record, ensure_ascii=False)


def _ended(terminal: Terminal, *, as_json: bool) -> int:
    if not as_json:
        print(flush=True)
    if terminal.failure is not None:
        complain(f"{terminal.failure.stage}: {terminal.failure.message}")
    elif terminal.finish_reason == "cancelled":
        complain("the request was cancelled")
    return 0 if terminal.finish_reason in ("stop", "length") else EXIT_FAILED
