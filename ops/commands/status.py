"""`sluice status`: what a stack is made of and what it has to do, at this moment."""

import json
from typing import Annotated

import typer

from ops.commands.common import EXIT_FAILED, complain, execute, output_console
from ops.finding import find_stack
from ops.status.page import page
from ops.status.state import watching
from pipeline.settings import load_settings

EXAMPLES = """\b
Examples:
  sluice status
  sluice status --json | jq .requests
  until sluice status > /dev/null; do sleep 1; done     # wait until all stages are there
"""


def status(*, as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Show processes, queues, KV pool, requests and server of the running stack.

    That is the stack of `sluice up` in this home, else the one at SLUICE_REDIS_URL. Exit code 0: every stage of the
    Procfile has a process; 1: one is missing, or the server does not answer; 2: there is no stack.
    """
    execute(_status(as_json=as_json))


async def _status(*, as_json: bool) -> int:
    async with watching(await find_stack(load_settings())) as watch:
        now = await watch.look()
    if as_json:
        print(json.dumps(now.as_json()))
    else:
        output_console().print(page(now))
    if now.missing:
        complain(f"no process of: {', '.join(now.missing)}")
    return EXIT_FAILED if now.missing else 0
