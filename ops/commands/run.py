"""`sluice run`: a file of requests in, a file of results out, in the same order; interrupted, it goes on."""

import asyncio
import json
import sys
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from ops import report
from ops.commands.asking import SpeculateOption
from ops.commands.common import (
    EXIT_FAILED,
    ModelOption,
    NumDecode,
    NumPrefill,
    command_settings,
    execute,
    output_console,
    replicas,
)
from ops.memory_log import memory_lines
from ops.progress import JsonProgress, RunProgress, make_progress
from ops.sampled import read_samples
from ops.serving import Serving
from ops.stack import Stack, choose_stack, with_model_of_stack
from pipeline.batch.figures import BatchSummary
from pipeline.batch.options import DEFAULT_WINDOW, MAX_ROLE_CHARS, MAX_TIMEOUT_S, MAX_WINDOW, BatchOptions
from pipeline.batch.record import BatchRecord
from pipeline.batch.submit import Prepared, check
from pipeline.client.batches import Batches, batch_options, batches_dir, prepare_in_thread, resolved, summary_of
from pipeline.errors import InvalidRequest
from pipeline.params import is_unicode
from pipeline.settings import Settings

EXAMPLES = """\b
Examples:
  sluice run -i examples/prompts.jsonl -o results.jsonl
  sluice run -i prompts.jsonl -o results.jsonl --decode 2 --no-table
  sluice run -i prompts.jsonl -o results.jsonl --json | tail -n 1 > figures.json
  generate-prompts | sluice run -i - -o results.jsonl
"""

STDIN = Path("-")
REFRESH_S = 1.0  # no progress shows more than that


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How the command shows what it does, and what it does besides."""

    restart: bool
    table: bool
    profile: bool
    log_memory: bool
    as_json: bool


@dataclass(frozen=True, slots=True)
class Wanted:
    """A batch as the command line asks for it."""

    model: str | None
    limits: dict[str, int | None]
    """Settings of the stack."""
    source: Path
    target: Path
    errors: Path | None
    tmp_dir: Path | None
    choices: dict[str, Any]
    """Fields of BatchOptions."""


def run(  # noqa: PLR0913 - one parameter for each option
    *,
    source: Annotated[
        Path, typer.Option("-i", "--input", "--input-file", help="Requests, one JSON line each; - is standard input.")
    ],
    target: Annotated[Path, typer.Option("-o", "--output", "--output-file", help="Results, one JSON line each.")],
    errors: Annotated[
        Path | None,
        typer.Option(
            help="Lines that failed; the same as -o keeps all together. [default: out.errors.jsonl for out.jsonl]"
        ),
    ] = None,
    model: ModelOption = None,
    window: Annotated[
        int, typer.Option(min=1, max=MAX_WINDOW, help="Most requests in flight at a time.")
    ] = DEFAULT_WINDOW,
    timeout: Annotated[
        int,
        typer.Option(
            min=0, max=MAX_TIMEOUT_S, help="Seconds from now after which unfinished lines are given up; 0: never."
        ),
    ] = 0,
    restart: Annotated[
        bool, typer.Option("--restart", help="Start over, even where an unfinished batch writes this output.")
    ] = False,
    decode: NumDecode = None,
    prefill: NumPrefill = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="Most tokens of prompt and output together. [default: the model's own]")
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Requests that one decode process steps at a time.")
    ] = None,
    response_role: Annotated[str, typer.Option(help="The role of the answers to chats.")] = "assistant",
    output_tmp_dir: Annotated[
        Path | None, typer.Option(help="Where finished lines are kept until the end. [default: in the home]")
    ] = None,
    speculate: SpeculateOption = True,
    table: Annotated[bool, typer.Option("--table/--no-table", help="Print a row for each request.")] = True,
    profile: Annotated[bool, typer.Option("--profile", help="Print where the time of the requests went.")] = False,
    log_memory: Annotated[bool, typer.Option("--log-memory", help="Print how much KV was held over time.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON lines: progress, and at the end one with all figures.")
    ] = False,
) -> None:
    """Run a file of requests through a stack and write the results in the order of the input.

    The input is OpenAI's batch format, for /v1/chat/completions and /v1/completions. A line that is wrong
    does not stop the others: it goes to the file of errors, which says what is wrong with it.
    The output appears when everything is done. Interrupted in whatever way, the same command goes on where
    it was: no finished line is done again. `sluice cancel` ends a batch early and keeps what it has.
    """
    if not 1 <= len(response_role) <= MAX_ROLE_CHARS or not is_unicode(response_role):
        raise typer.BadParameter(f"must have 1 to {MAX_ROLE_CHARS} characters", param_hint="--response-role")
    wanted = Wanted(
        model,
        {"max_model_len": max_model_len, "max_num_seqs": max_num_seqs},
        source,
        target,
        errors,
        output_tmp_dir,
        {"speculate": speculate, "response_role": response_role, "window": window, "timeout_s": timeout},
    )
    shown = RunOptions(restart, table, profile, log_memory, as_json)
    execute(_run(wanted, replicas(prefill=prefill, decode=decode), shown))


async def _run(wanted: Wanted, number_of: dict[str, int], shown: RunOptions) -> int:
    limits = {name: value for name, value in wanted.limits.items() if value is not None}
    settings = await with_model_of_stack(command_settings(wanted.model, **limits))
    directory = batches_dir(settings.home) if wanted.tmp_dir is None else resolved(wanted.tmp_dir)
    batch, stdin = _batch(wanted, settings), _stdin() if wanted.source == STDIN else None
    checked = None
    if stdin is None:  # what is wrong is said before a stack starts; nothing is kept before it is there
        checked = await asyncio.to_thread(check, batch, directory, restart=shown.restart)
    with _progress(checked.num_lines if checked else 0, shown) as progress:
        stack = await choose_stack(settings, number_of, progress.note)
        stack.leave_work = True
        progress.note(stack.greeting)
        if limits and not isinstance(stack, Stack):
            progress.note(f"{_options_of(limits)} cannot change a stack that runs already")
        async with stack:
            prepared = await prepare_in_thread(batch, directory, stdin, restart=shown.restart, checked=checked)
            summary, record = await _follow(stack, prepared, progress)
            memory = await _memory(stack.settings, record) if shown.log_memory else []
    # Of a batch that was interrupted nobody knows how long it was worked on.
    wall_s = (record.ended_ms - record.started_ms) / 1000 if prepared.is_new and not record.recovered else None
    _show(summary, record, wall_s, memory, shown)
    return EXIT_FAILED if summary.num_failed or record.state != "completed" else 0


def _options_of(limits: Iterable[str]) -> str:
    return " and ".join(f"--{name.replace('_', '-')}" for name in limits)


def _batch(wanted: Wanted, settings: Settings) -> BatchOptions:
    if wanted.target.name == "-":
        raise InvalidRequest("output", "a batch outlives its command, so its results need a file; - is none")
    return batch_options(wanted.source, wanted.target, model=settings.model, errors=wanted.errors, **wanted.choices)


def _stdin() -> BinaryIO:
    if sys.stdin is None:  # pyright: ignore[reportUnnecessaryComparison] - it is where the caller closed it
        raise InvalidRequest("input", "standard input is closed")
    return sys.stdin.buffer


async def _follow(stack: Serving, prepared: Prepared, progress: RunProgress) -> tuple[BatchSummary, BatchRecord]:
    """Submit the batch and show how far it is, until it is over."""
    batch_id = prepared.manifest.batch_id
    if prepared.is_new:
        progress.note(f"{batch_id}: {prepared.num_lines} lines")
    else:
        progress.note(f"{batch_id} goes on: {prepared.num_finished} of {prepared.num_lines} lines are finished")
    async with Batches(stack.transport, stack.settings) as batches:
        try:
            following = batches.follow(prepared, lambda seen: _show_counts(progress, prepared, seen))
            record = await stack.watched(_kept_fresh(progress, following))
        except BaseException:
            progress.note(
                f"{progress.num_done} of {prepared.num_lines} lines are finished; the same command goes on with the "
                f"others{stack.afterwards(batch_id)}"
            )
            raise
        if record.id != batch_id:
            progress.note(f"{record.id} was completed while nobody followed it; --restart does it again")
        return summary_of(record), record


async def _kept_fresh(progress: RunProgress, following: Coroutine[Any, Any, BatchRecord]) -> BatchRecord:
    """Show the progress now and then, also where nothing changes: the last change may have come too early to show."""

    async def refresh() -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            progress.refresh()

    refreshing = asyncio.create_task(refresh())
    try:
        return await following
    finally:
        refreshing.cancel()


async def _memory(settings: Settings, record: BatchRecord) -> list[str]:
    return list(memory_lines(await read_samples(settings, 1000 * record.started_ms, 1000 * record.ended_ms)))


def _show_counts(progress: RunProgress, prepared: Prepared, record: BatchRecord) -> None:
    progress.set(
        num_lines=record.total or prepared.num_lines,
        num_done=record.num_finished,
        num_failed=record.failed,
        num_tokens=record.output_tokens,
    )


def _progress(num_lines: int, shown: RunOptions) -> RunProgress:
    if shown.as_json:
        return JsonProgress(num_lines, sys.stdout)
    return make_progress(num_lines, sys.stderr)


def _show(
    summary: BatchSummary, record: BatchRecord, wall_s: float | None, memory: list[str], shown: RunOptions
) -> None:
    if shown.as_json:
        figures = report.figures(summary, wall_s)
        files = {"output": str(record.options.target), "errors_file": str(record.options.errors)}
        print(json.dumps({"event": record.state, "batch_id": record.id} | figures | files, ensure_ascii=False))
        return
    console = output_console()
    if shown.table and summary.rows:
        console.print(report.table(summary))
    if shown.profile and summary.phases:
        console.print(report.profile(summary))
    for line in memory:
        print(line)
    if record.state != "completed":
        print(f"{record.id} was {record.state}")
    print(report.totals(summary, wall_s))
    print(f"results: {record.options.target}")
    if summary.num_failed:
        _show_errors(summary, record)


def _show_errors(summary: BatchSummary, record: BatchRecord) -> None:
    for problem in summary.errors[:10]:
        named = "" if problem.custom_id is None else f" ({problem.custom_id!r})"
        print(f"line {problem.line}{named}: {report.printable(problem.message)}", file=sys.stderr)
    if summary.num_failed > 10:
        print(f"and {summary.num_failed - 10} more", file=sys.stderr)
    print(f"errors: {record.options.errors}")
