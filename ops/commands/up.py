"""`sluice up`: a stack in the foreground, for other commands of the same home to use."""

import sys
from typing import Annotated

import typer

from ops.commands.common import ModelOption, NumDecode, NumPrefill, command_settings, execute, replicas
from ops.control.server import ControlServer
from ops.running import UpLock
from ops.stack import Stack
from pipeline.server_url import read_address

NAME_WIDTH = len("compressor-64")


def up(
    model: ModelOption = None,
    tokenizer: Annotated[
        int | None, typer.Option("--tokenizer", min=1, max=64, metavar="N", help="Tokenizer processes.")
    ] = None,
    prefill: NumPrefill = None,
    compressor: Annotated[
        int | None, typer.Option("--compressor", min=1, max=64, metavar="N", help="Compressor processes.")
    ] = None,
    decode: NumDecode = None,
) -> None:
    """Run a stack until Ctrl-C; `sluice run` and `sluice generate` then use it instead of starting one.

    The stages' logs are shown here and kept under the home, in logs/. `sluice scale` changes how many processes
    there are while it runs.
    """
    number_of = replicas(tokenizer=tokenizer, prefill=prefill, compressor=compressor, decode=decode)
    execute(_up(model, number_of), log_level="info")


async def _up(model: str | None, number_of: dict[str, int]) -> int:
    settings = command_settings(model)
    settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = UpLock(settings.home)
    try:
        stack = Stack(settings, number_of, echo=_relay)
        async with ControlServer(settings.home, lambda: stack.supervisor), stack:
            lock.announce(stack.settings)
            where = read_address(stack.settings.redis_url or "").shown  # the address itself may hold a password
            _say(f"ready after {stack.startup_s:.1f} s: {settings.model} at {where}")
            _say("Ctrl-C stops it")
            raise await stack.wait_failed()
    finally:
        lock.release()


def _relay(name: str, line: str) -> None:
    print(f"{name:<{NAME_WIDTH}} | {line}", flush=True)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
