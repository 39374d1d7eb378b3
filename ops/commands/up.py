"""`sluice up`: a stack in the foreground, for other commands of the same home to use."""

import sys

from ops.commands.common import ModelOption, NumDecode, NumPrefill, command_settings, execute, replicas
from ops.running import UpLock
from ops.stack import Stack


def up(model: ModelOption = None, decode: NumDecode = None, prefill: NumPrefill = None) -> None:
    """Run a stack until Ctrl-C; `sluice run` and `sluice generate` then use it instead of starting one.

    The stages' logs are shown here and kept under the home, in logs/.
    """
    execute(_up(model, replicas(prefill=prefill, decode=decode)), log_level="info")


async def _up(model: str | None, number_of: dict[str, int]) -> int:
    settings = command_settings(model)
    settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = UpLock(settings.home)
    try:
        async with Stack(settings, number_of, echo=_relay) as stack:
            lock.announce(stack.settings)
            _say(f"ready after {stack.startup_s:.1f} s: {settings.model} at {stack.settings.redis_url}")
            _say("Ctrl-C stops it")
            raise await stack.wait_failed()
    finally:
        lock.release()


def _relay(name: str, line: str) -> None:
    print(f"{name:<12} | {line}", flush=True)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
