"""`sluice chaos`: make things go wrong on purpose, and see whether anything of it shows."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ops.chaos.rows import chosen
from ops.chaos.runner import ChaosOptions, run_rows
from ops.chaos.table import markdown, table
from ops.commands.common import EXIT_FAILED, command_settings, execute, output_console
from ops.measuring import checked_model
from pipeline.errors import SluiceError
from pipeline.settings import Settings

EXAMPLES = """\b
Examples:
  sluice chaos F4 F20
  sluice chaos > table.md            (a table in Markdown where the output is no terminal)
  sluice chaos --long --json > chaos.jsonl
"""


def chaos(
    *,
    rows: Annotated[list[str] | None, typer.Argument(metavar="ROW...", help="Rows such as F4; all by default.")] = None,
    long: Annotated[bool, typer.Option("--long", help="Also what takes minutes.")] = False,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Run all rows on this one. [default: a tiny one, F41 on SLUICE_MODEL]"),
    ] = None,
    keep_logs: Annotated[Path | None, typer.Option(help="Directory that gets the logs of all processes.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON line for each row.")] = False,
) -> None:
    """Kill, stop, cut off and fill up stacks of its own, and compare what clients get with runs without faults.

    Each row is one kind of fault (docs/faults.md). Without --model most rows run on a tiny model of random weights,
    which is enough to compare tokens, and a few on the model of SLUICE_MODEL. Exit code 1 where a row fails.
    """
    logs = None if keep_logs is None else keep_logs.absolute()
    execute(_chaos(rows or [], model, logs, long=long, as_json=as_json))


async def _chaos(ids: list[str], model: str | None, keep_logs: Path | None, *, long: bool, as_json: bool) -> int:
    rows = chosen(ids)
    settings = command_settings(model)
    options = ChaosOptions(
        model=None if model is None else checked_model(settings),
        real_model=_real_model(settings),
        long=long,
        keep_logs=keep_logs,
    )
    results = await run_rows(settings, rows, options, lambda line: print(line, file=sys.stderr, flush=True))
    if as_json:
        for result in results:
            print(json.dumps(dataclasses.asdict(result), ensure_ascii=False))
    elif sys.stdout.isatty():
        output_console().print(table(results))
    else:
        print(markdown(results))
    return EXIT_FAILED if any(result.verdict == "FAILED" for result in results) else 0


def _real_model(settings: Settings) -> Path | None:
    try:
        return checked_model(settings)
    except SluiceError:
        return None  # rows that need it are not run, and say why
