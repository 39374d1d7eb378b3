"""`sluice top`: the status of a stack, live."""

import sys
from typing import Annotated

import typer

from ops.commands.common import execute, output_console
from ops.finding import find_stack
from ops.status.state import watching
from ops.status.top import frame, run_top
from pipeline.errors import InvalidRequest
from pipeline.settings import load_settings


def top(*, once: Annotated[bool, typer.Option("--once", help="Print one page and leave.")] = False) -> None:
    """Watch the running stack: processes, queues, KV pool, tokens per second, and the last two minutes.

    q or Ctrl-C leaves.
    """
    execute(_top(once=once))


async def _top(*, once: bool) -> int:
    if not once and not sys.stdout.isatty():
        raise InvalidRequest("top", "needs a terminal; use --once, or `sluice status`")
    console = output_console()
    async with watching(await find_stack(load_settings())) as watch:
        if once:
            console.print(await frame(watch))
        else:
            await run_top(watch, console)
    return 0
