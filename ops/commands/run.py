"""`sluice run`: a file of requests in, a file of results out, in the same order."""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
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
from pipeline.batch.lines import BatchLine, BatchLineError, read_batch
from pipeline.batch.results import encode_line, refused_line, result_line
from pipeline.errors import InvalidRequest
from pipeline.messages import Delta, Failure
from pipeline.settings import Settings
from stages.gguf.model_files import resolve

EXAMPLES = """\b
Examples:
  sluice run -i examples/prompts.jsonl -o results.jsonl
  sluice run -i prompts.jsonl -o results.jsonl --decode 2 --no-table
  sluice run -i prompts.jsonl -o results.jsonl --json > figures.json
"""

COUNT_BYTES = 1 << 20
PIPE_WIDTH = 120  # a table in a log file has no terminal to ask
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
    window: Annotated[int, typer.Option(min=1, max=MAX_WINDOW, help="Most requests in flight at a time.")] = 64,
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
    """Run a file of requests through a stack and write the results in the order of the input.

    The input is OpenAI's batch format, for /v1/chat/completions and /v1/completions. A line that is wrong
    does not stop the others: its place in the output holds an error, and standard error says what it is.
    The output file appears when everything is done; what a stopped run had finished is in OUTPUT.partial.
    """
    options = RunOptions(source, target, window, speculate, table, as_json)
    execute(_run(model, replicas(prefill=prefill, decode=decode), options))


async def _run(model: str | None, number_of: dict[str, int], options: RunOptions) -> int:
    settings = command_settings(model)
    if options.target.exists() and options.target.samefile(options.source):
        raise InvalidRequest("output", f"is the input, {options.source}")
    output = OutputFile(options.target)
    try:
        with output:
            report = await _serve(settings, number_of, options, output)
    except BaseException:
        if output.num_lines:
            print(f"{output.num_lines} finished lines are in {output.partial}", file=sys.stderr)
        raise
    return EXIT_FAILED if report.num_failed else 0


async def _serve(settings: Settings, number_of: dict[str, int], options: RunOptions, output: OutputFile) -> RunReport:
    """Start a stack, send the file through it, and show the figures when it has stopped again."""
    with options.source.open("rb") as file, make_progress(count_lines(options.source), sys.stderr) as progress:
        progress.note("starting the stack")
        async with await choose_stack(settings, number_of, progress.note) as stack:
            progress.start()
            names = TokenNames(resolve(settings.model, settings.home))
            run = BatchRun(stack.session(), settings.model, output, progress, names)
            started_at = time.monotonic()
            lines = chosen_lines(file, served_name(settings), speculate=options.speculate)
            await stack.watched(in_order(lines, run.serve, run.take, options.window))
            wall_s = time.monotonic() - started_at
    figures = {"startup_s": round(stack.startup_s, 3), "output": str(options.target)}
    _show(run.report, wall_s, figures, options)
    return run.report


class BatchRun:
    """What happens to one line, and where its result goes."""

    def __init__(
        self, session: Session, model: str, output: OutputFile, progress: RunProgress, names: TokenNames
    ) -> None:
        """Wire it up; `model` is what the stages call the model."""
        self.report = RunReport()
        self._session = session
        self._model = model
        self._output = output
        self._progress = progress
        self._names = names

    async def serve(self, line: BatchLine | BatchLineError) -> Answer | None:
        """Return the answer to a line; None where there was nothing to ask."""
        if isinstance(line, BatchLineError):
            self._progress.line(failed=True)
            self._progress.note(str(line))
            return None
        request = NewRequest(self._model, line.prompt, line.messages, line.params, line.speculate)
        answer = await self._session.answer(request, "batch", self._saw)
        failed = isinstance(answer.outcome, Failure)
        self._progress.line(failed=failed)
        if isinstance(answer.outcome, Failure):
            outcome = answer.outcome
            problem = f"{outcome.stage} failed: {outcome.message}"
            self._progress.note(str(BatchLineError(line.line_number, line.custom_id, outcome.code, problem, None)))
        return answer

    def take(self, line: BatchLine | BatchLineError, answer: Answer | None) -> None:
        """Write the result of a line, after those of all lines before it."""
        if isinstance(line, BatchLineError):
            self.report.add_refusal(line)
            self._output.write(encode_line(refused_line(line)))
            return
        assert answer is not None, "every request has an answer"
        submitted = answer.submitted
        self.report.add_answer(line.custom_id, line.line_number, answer)
        record = result_line(line, submitted.request_id, submitted.created_s, answer.outcome, self._names.token_bytes)
        self._output.write(encode_line(record))

    def _saw(self, delta: Delta) -> None:
        self._progress.tokens(len(delta.token_ids))


def chosen_lines(file: BinaryIO, model: str, *, speculate: bool) -> Iterator[BatchLine | BatchLineError]:
    """Yield the lines of a file, without speculation where the command line says so."""
    for line in read_batch(file, model):
        yield line if speculate or isinstance(line, BatchLineError) else replace(line, speculate=False)


def count_lines(path: Path) -> int:
    """Return how many lines a file has, for the progress bar."""
    num_lines, last = 0, b"\n"
    with path.open("rb") as file:
        while block := file.read(COUNT_BYTES):
            num_lines += block.count(b"\n")
            last = block[-1:]
    return num_lines + (last != b"\n")


def _show(report: RunReport, wall_s: float, figures: dict[str, object], options: RunOptions) -> None:
    if options.as_json:
        print(json.dumps(report.summary(wall_s) | figures, ensure_ascii=False))
        return
    if options.table and report.num_lines:
        width = None if sys.stdout.isatty() else PIPE_WIDTH
        Console(width=width).print(report.table())
    print(report.totals(wall_s))
    print(f"results: {options.target}")
