"""`python -m ops.bench`, alone or with a word for something else: options in, tables out, records in docs/bench."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ops.bench import back_pressure, batch_memory, end_to_end, queue_cost, resume
from ops.commands.common import (
    ModelOption,
    NumDecode,
    NumPrefill,
    command_settings,
    execute,
    replicas,
)
from ops.downloads.datasets import pull_sharegpt
from ops.measuring import checked_model, prepare_environment, write_record
from pipeline.batch.options import served_name
from pipeline.settings import Settings

DEFAULT_BATCHES = "1,4,16,32"
DEFAULT_PROMPTS = "256,1024,4096"

app = typer.Typer(add_completion=False)

Save = Annotated[bool, typer.Option("--save/--no-save", help="Write the record.")]
Into = Annotated[Path, typer.Option(help="Folder of records.")]
Repetitions = Annotated[int, typer.Option(min=1, help="How often everything is measured.")]
INTO = Path("docs/bench")


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a record goes, if anywhere."""

    folder: Path
    name: str
    save: bool

    def take(self, record: dict[str, object], tables: str) -> None:
        """Show the tables and keep the record."""
        print(tables)
        if self.save:
            path = self.folder / f"{self.name}.json"
            write_record(path, record)
            print(f"\nwritten to {path}", file=sys.stderr)

    def draw(self, picture: str) -> None:
        """Keep a picture of the record beside it."""
        if self.save:
            (self.folder / f"{self.name}.svg").write_text(picture, "utf-8")


@app.callback(invoke_without_command=True)
def end_to_end_command(  # noqa: PLR0913 - one parameter for each option
    context: typer.Context,
    *,
    requests: Annotated[int, typer.Option(min=1, help="ShareGPT first turns to answer.")] = 64,
    tokens: Annotated[int, typer.Option(min=2, help="Output tokens of each; end-of-text is ignored.")] = 128,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 16,
    speculation: Annotated[end_to_end.Speculation, typer.Option(help="With drafts, without, or both.")] = "on",
    repetitions: Repetitions = 1,
    model: ModelOption = None,
    prefill: NumPrefill = None,
    decode: NumDecode = None,
    name: Annotated[str, typer.Option(help="Of the record.")] = "end-to-end",
    save: Save = True,
    into: Into = INTO,
) -> None:
    """Measure whole stacks under load: with the compressor, then with prefill sealing its own blobs.

    python -m ops.bench --speculation both
    python -m ops.bench --requests 8 --tokens 32 --no-save
    python -m ops.bench engine
    """
    if context.invoked_subcommand is not None:
        return
    settings = command_settings(model)
    plan = end_to_end.Plan(
        model_name=served_name(settings.model),
        num_requests=requests,
        output_tokens=tokens,
        concurrency=concurrency,
        speculation=speculation,
        num_repetitions=repetitions,
        replicas=replicas(prefill=prefill, decode=decode),
    )
    execute(_end_to_end(plan, settings, Destination(into, name, save)))


@app.command("engine")
def engine_command(
    *,
    batches: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = DEFAULT_BATCHES,
    steps: Annotated[int, typer.Option(min=1, help="Steps timed at each size.")] = 16,
    repetitions: Repetitions = 3,
    model: ModelOption = None,
    name: Annotated[str, typer.Option(help="Of the record.")] = "engine",
    save: Save = True,
    into: Into = INTO,
) -> None:
    """Measure the engine alone beside plain fp32 torch: decoding after 300 tokens, and a prefill of 512.

    python -m ops.bench engine
    python -m ops.bench engine --batches 1,4 --steps 4 --repetitions 1 --no-save
    """
    sizes = [_size(text, "--batches") for text in batches.split(",")]
    execute(_engine(command_settings(model), sizes, (steps, repetitions), Destination(into, name, save)))


@app.command("queue")
def queue_command(  # noqa: PLR0913 - one parameter for each option
    *,
    seconds: Annotated[float, typer.Option(min=1, help="How long requests are sent; one at a time half as long.")] = 60,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 16,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt, about.")] = 128,
    tokens: Annotated[int, typer.Option(min=2, help="Output tokens of each; end-of-text is ignored.")] = 128,
    model: ModelOption = None,
    name: Annotated[str, typer.Option(help="Of the record.")] = "queue",
    save: Save = True,
    into: Into = INTO,
) -> None:
    """Measure what the queues cost: latency of each hop, round trips to the server, CPU time beside computing.

    python -m ops.bench queue
    python -m ops.bench queue --seconds 5 --no-save
    """
    settings = command_settings(model)
    plan = queue_cost.Plan(prompt, tokens, concurrency, seconds)
    execute(_queue(plan, settings, Destination(into, name, save)))


@app.command("resume")
def resume_command(
    *,
    prompts: Annotated[str, typer.Option(help="Tokens of prompts, separated by commas.")] = DEFAULT_PROMPTS,
    emitted: Annotated[int, typer.Option(min=2, help="Output tokens that are out when decode is killed.")] = 300,
    repetitions: Repetitions = 3,
    model: ModelOption = None,
    name: Annotated[str, typer.Option(help="Of the record.")] = "resume",
    save: Save = True,
    into: Into = INTO,
) -> None:
    """Measure how long it takes to go on after decode was killed: with checkpoints, without, and all over again.

    python -m ops.bench resume
    python -m ops.bench resume --prompts 256 --emitted 70 --repetitions 1 --no-save
    """
    sizes = tuple(_size(text, "--prompts") for text in prompts.split(","))
    plan = resume.Plan(sizes, emitted, repetitions)
    execute(_resume(plan, command_settings(model), Destination(into, name, save)))


@app.command("back-pressure")
def back_pressure_command(  # noqa: PLR0913 - one parameter for each option
    *,
    seconds: Annotated[float, typer.Option(min=20, help="How long requests are poured in.")] = 120,
    factor: Annotated[float, typer.Option(min=1.1, max=100, help="How many times slower decode is.")] = 4,
    prompt: Annotated[int, typer.Option(min=1, max=256, help="Tokens of each prompt, about; at most a chunk.")] = 64,
    tokens: Annotated[int, typer.Option(min=2, help="Output tokens of each; end-of-text is ignored.")] = 32,
    model: ModelOption = None,
    name: Annotated[str, typer.Option(help="Of the record.")] = "back-pressure",
    save: Save = True,
    into: Into = INTO,
) -> None:
    """Flood a stack whose decode is slow, and see whether pool, credits, queues and memory stay within bounds.

    python -m ops.bench back-pressure
    python -m ops.bench back-pressure --seconds 20 --no-save
    """
    plan = back_pressure.Plan(seconds, factor, prompt, tokens)
    execute(_back_pressure(plan, command_settings(model), Destination(into, name, save)))


@app.command("batch")
def batch_command(
    *,
    lines: Annotated[int, typer.Option(min=10, help="Lines of the batch.")] = 50_000,
    tokens: Annotated[int, typer.Option(min=1, help="Output tokens of each.")] = 4,
    model: ModelOption = None,
    work: Annotated[Path, typer.Option(help="Folder for input and output.")] = Path("results/batch"),
    name: Annotated[str, typer.Option(help="Of the record.")] = "batch-memory",
    save: Save = True,
    into: Into = INTO,
) -> None:
    """Measure the memory of all processes while a long batch runs, and draw it.

    python -m ops.bench batch --model tiny.gguf
    """
    plan = batch_memory.Plan(num_lines=lines, output_tokens=tokens, folder=work.absolute())
    execute(_batch(plan, command_settings(model), Destination(into, name, save)))


def _size(text: str, option: str) -> int:
    if not text.strip().isdigit() or int(text) < 1:
        what = "batch size" if option == "--batches" else "number of tokens"
        raise typer.BadParameter(f"{text!r} is no {what}", param_hint=option)
    return int(text)


async def _end_to_end(plan: end_to_end.Plan, settings: Settings, destination: Destination) -> int:
    checked_model(settings)
    dataset = pull_sharegpt(settings.home, _note)
    record, tables = await end_to_end.run(plan, settings, dataset)
    destination.take(record, tables)
    return 0


async def _engine(settings: Settings, batches: list[int], counts: tuple[int, int], destination: Destination) -> int:
    prepare_environment(settings)
    # Only now: torch and numba read the environment while they are imported.
    from ops.bench import engine  # noqa: PLC0415

    num_steps, num_repetitions = counts
    plan = engine.Plan(
        model_name=served_name(settings.model),
        model_path=checked_model(settings),
        weight_cache=settings.weight_cache,
        codec_name=settings.kv_codec,
        num_threads=settings.engine_threads,
        batches=batches,
        num_steps=num_steps,
        num_repetitions=num_repetitions,
    )
    destination.take(*engine.run(plan, _note))
    return 0


async def _queue(plan: queue_cost.Plan, settings: Settings, destination: Destination) -> int:
    destination.take(*await queue_cost.run(plan, settings, checked_model(settings), _note))
    return 0


async def _resume(plan: resume.Plan, settings: Settings, destination: Destination) -> int:
    destination.take(*await resume.run(plan, settings, checked_model(settings), _note))
    return 0


async def _back_pressure(plan: back_pressure.Plan, settings: Settings, destination: Destination) -> int:
    record, tables, picture = await back_pressure.run(plan, settings, checked_model(settings), _note)
    destination.take(record, tables)
    destination.draw(picture)
    return 0


async def _batch(plan: batch_memory.Plan, settings: Settings, destination: Destination) -> int:
    checked_model(settings)
    record, tables = await batch_memory.run(plan, settings, served_name(settings.model), _note)
    destination.take(record, tables)
    destination.draw(batch_memory.picture(record))
    return 0


def _note(line: str) -> None:
    print(line, file=sys.stderr)


if __name__ == "__main__":
    app()
