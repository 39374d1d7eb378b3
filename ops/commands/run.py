"""`sluice run`: a file of requests in, a file of results out, in the same order."""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO

import typer
from rich.console import Console

from ops.commands.common import (
    EXIT_FAILED,
    ModelOption,
    NumDecode,
    NumPrefill,
    command_settings,
    execute,
    replicas,
    served_name,
)
from ops.in_order import in_order
from ops.output_file import OutputFile
from ops.progress import RunProgress, make_progress
from ops.report import RunReport
from ops.session import Answer, NewRequest, Session
from ops.stack import choose_stack
from ops.token_names import TokenNames
from pipeline.batch_lines import BatchLine, BatchLineError, read_batch
from pipeline.batch_results import Completion, encode_line, refused_line, result_line
from pipeline.errors import InvalidRequest
from pipeline.messages import Delta
from pipeline.model_files import resolve
from pipeline.settings import Settings

COUNT_BYTES = 1 << 20
MAX_WINDOW = 200  # each request in flight is followed on a connection of its own


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What the command line asks for."""

    source: Path
    target: Path
    window: int
    speculate: bool
    table: bool
    as_json: bool


def run(  # noqa: PLR0913 - one parameter for each option
    *,
    source: Annotated[
        Path, typer.Option("-i", "--input", exists=True, dir_okay=False, help="Requests, one JSON line each.")
    ],
    target: Annotated[Path, typer.Option("-o", "--output", help="Results, one JSON line each.")],
    model: ModelOption = None,
    window: Annotated[
        int, typer.Option(min=1, max=MAX_WINDOW, help="Most requests in flight at a time.")
    ] = 64,
    decode: NumDecode = None,
    prefill: NumPrefill = None,
    speculate: Annotated[
        bool, typer.Option("--speculate/--no-speculate", help="Draft tokens; never changes the text.")
    ] = True,
    table: Annotated[bool, typer.Option("--table/--no-table", help="Print a row for each request.")] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object with all figures instead of the table.")
    ] = False,
) -> None:
    r"""Run a file of requests through a stack and write the results in the order of the input.

    The input is OpenAI's batch format, for /v1/chat/completions and /v1/completions. A line that is wrong
    does not stop the others: its place in the output holds an error, and standard error says what it is.
    The output file appears when everything is done; what a stopped run had finished is in OUTPUT.partial.

    Examples:

    \b
    sluice run -i examples/prompts.jsonl -o results.jsonl
    sluice run -i prompts.jsonl -o results.jsonl --decode 2 --no-table
    sluice run -i prompts.jsonl -o results.jsonl --json > figures.json
    """
    options = RunOptions(source, target, window, speculate, table, as_json)
    execute(_run(model, replicas(prefill=prefill, decode=decode), options))


async def _run(model: str | None, number_of: dict[str, int], options: RunOptions) -> int:
    settings = command_settings(model)
    if options.target.exists() and options.target.samefile(options.source):
        raise InvalidRequest("output", f"is the input, {options.source}")
    output = OutputFile(options.target)
    report = RunReport()
    try:
        with output, options.source.open("rb") as file:
            wall_s = await _serve(settings, number_of, options, file, output, report)
    except BaseException:
        if output.num_lines:
            print(f"{output.num_lines} finished lines are in {output.partial}", file=sys.stderr)
        raise
    _show(report, wall_s, options)
    return EXIT_FAILED if report.num_failed else 0
