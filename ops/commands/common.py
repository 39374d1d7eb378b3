"""What all commands share: options, settings, and how an ending becomes an exit code.

Owns the exit codes. Knows nothing about any one command.

    0    everything asked for was done
    1    some requests failed, or something broke that may work the next time
    2    the command line, a setting or a file is wrong: the same again will fail again
    130  Ctrl-C           143  SIGTERM
"""

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kv_store.errors import KvStoreError
from pipeline.errors import SluiceError
from pipeline.logs import LogLevel, configure_logs
from pipeline.settings import Settings, load_settings

PIPE_WIDTH = 120  # a table in a log file has no terminal to ask
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM

ModelOption = Annotated[
    str | None,
    typer.Option("--model", "-m", help="Name of a model, or path to a GGUF file. [default: SLUICE_MODEL]"),
]
NumDecode = Annotated[int | None, typer.Option("--decode", min=1, max=64, metavar="N", help="Decode processes.")]
NumPrefill = Annotated[int | None, typer.Option("--prefill", min=1, max=64, metavar="N", help="Prefill processes.")]


def command_settings(model: str | None, **overrides: object) -> Settings:
    """Return the settings, with the command line's on top and the model's path made absolute."""
    settings = load_settings(**overrides) if model is None else load_settings(model=model, **overrides)
    if "/" in settings.model or settings.model.endswith(".gguf"):
        path = Path(settings.model).expanduser().absolute()
        settings = settings.model_copy(update={"model": str(path)})
    return settings


def replicas(**asked: int | None) -> dict[str, int]:
    """Return how many processes of each stage the command line asks for, where it does."""
    return {stage: number for stage, number in asked.items() if number is not None}


def execute(work: Coroutine[Any, Any, int], log_level: LogLevel = "error") -> None:
    """Run a command to its end, whichever it is, and leave with its exit code."""
    configure_logs("sluice", log_level)
    raise typer.Exit(_exit_code(work))


def _exit_code(work: Coroutine[Any, Any, int]) -> int:
    try:
        return asyncio.run(_stoppable(work))
    except (SluiceError, KvStoreError) as error:
        complain(str(error))
        return EXIT_FAILED if error.retryable else EXIT_USAGE
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return EXIT_INTERRUPTED
    except asyncio.CancelledError:
        return EXIT_TERMINATED
    except BrokenPipeError:  # `sluice ... | head`; Python would complain once more when it flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:
        complain(str(error))
        return EXIT_USAGE


async def _stoppable(work: Coroutine[Any, Any, int]) -> int:
    """Let SIGTERM and a closed terminal end the work as Ctrl-C does, so that it clears up."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return await work


def output_console() -> Console:
    """Return a console on standard output, as wide as a page should be where that is no terminal."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)


def complain(problem: str) -> None:
    """Print why the command fails."""
    print(f"error: {problem}", file=sys.stderr)
