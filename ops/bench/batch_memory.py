"""Memory while a long batch runs: every process of a stack, its server and the command that follows the batch.

Owns the run, the samples and what they come to. The stack is that of a `sluice up` of its own; lines are short, so that
there are many. Knows nothing about how batches work.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from redis.asyncio import Redis

from ops.bench.chart import Chart, Line
from ops.bench.proc import resident_mib
from ops.control.client import ask_status
from ops.measuring import markdown_table, measured_on
from ops.running import find_advert
from pipeline.connect import open_client
from pipeline.errors import SluiceError
from pipeline.settings import Settings

SAMPLE_S = 1.0
READY_TIMEOUT_S = 300.0
END_TIMEOUT_S = 60.0
MIB = 1024**2
MAX_SAMPLES = 200  # in the record
LEFT_OUT = {"batch_id", "output", "errors_file"}  # this machine's business
SERVER = "server"
CLIENT = "sluice run"
SERVER_DATA = "server's data"


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run."""

    num_lines: int
    output_tokens: int
    folder: Path
    """For the input and the output; both stay there."""


async def run(
    plan: Plan, settings: Settings, model_name: str, note: Callable[[str], None]
) -> tuple[dict[str, object], str]:
    """Run a batch and return the record and its table."""
    source, target = plan.folder / "input.jsonl", plan.folder / "output.jsonl"
    write_input(source, plan, model_name)
    async with _up(settings) as (redis, pids):
        command = ["run", "-i", str(source), "-o", str(target), "--json", "--no-table", "--restart"]
        process = await _sluice(settings, *command, stdout=asyncio.subprocess.PIPE)
        watched = dict(pids) | {CLIENT: process.pid}
        samples, events = await _watch(process, watched, redis, note)
    record: dict[str, object] = {
        "measured_on": measured_on(),
        "model": model_name,
        "num_lines": plan.num_lines,
        "output_tokens_per_line": plan.output_tokens,
        "end": {name: value for name, value in events[-1].items() if name not in LEFT_OUT},
        "samples": samples[:: -(-len(samples) // MAX_SAMPLES)],
    }
    return record, table(samples)


def write_input(path: Path, plan: Plan, model_name: str) -> None:
    """Write a batch of short prompts that all differ."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for number in range(plan.num_lines):
            body = {"model": model_name, "prompt": f"Line {number} of many.", "max_tokens": plan.output_tokens}
            line = {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")


def table(samples: list[dict[str, float]]) -> str:
    """Return each process's memory in the second tenth and in the last tenth of the run, and its maximum, in MiB."""
    names = [name for name in samples[0] if name not in {"at_s", "num_done"}]
    tenth = max(len(samples) // 10, 1)
    rows: list[tuple[str, ...]] = []
    for name in names:
        values = [sample[name] for sample in samples if name in sample]
        early, late = median(values[tenth : 2 * tenth] or values), median(values[-tenth:])
        rows.append((name, f"{early:.1f}", f"{late:.1f}", f"{max(values):.1f}"))
    return markdown_table(("MiB", "after a tenth", "at the end", "most"), rows)


def picture(record: Mapping[str, object]) -> str:
    """Return a record's samples as a picture."""
    samples: list[dict[str, float]] = record["samples"]  # pyright: ignore[reportAssignmentType] - our own record
    names = [name for name in samples[0] if name not in {"at_s", "num_done"}]
    lines = [Line(name, [(sample["at_s"], sample[name]) for sample in samples if name in sample]) for name in names]
    return Chart(f"Memory during a batch of {record['num_lines']} lines", "s", "MiB").svg(lines)


@asynccontextmanager
async def _up(settings: Settings) -> AsyncIterator[tuple[Redis, dict[str, int]]]:
    """Run `sluice up`; yields a client of its server, and its processes by name."""
    up = await _sluice(settings, "up", stdout=asyncio.subprocess.DEVNULL)
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            while (advert := await find_advert(settings)) is None:
                if up.returncode is not None:
                    raise BenchFailed("`sluice up` did not start")
                await asyncio.sleep(SAMPLE_S)
        redis = open_client(advert.redis_url)
        slots = await ask_status(settings.home) or []
        info = await redis.info("server")
        pids = {slot.name: slot.pid for slot in slots if slot.pid is not None} | {SERVER: int(info["process_id"])}
        try:
            yield redis, pids
        finally:
            await redis.aclose()
    finally:
        if up.returncode is None:
            up.terminate()
        async with asyncio.timeout(END_TIMEOUT_S):
            await up.wait()


async def _watch(
    process: asyncio.subprocess.Process, pids: Mapping[str, int], redis: Redis, note: Callable[[str], None]
) -> tuple[list[dict[str, float]], list[dict[str, object]]]:
    events: list[dict[str, object]] = []

    async def read() -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            event = json.loads(line)
            events[:] = [event]  # the last one is all that is needed
            if event["event"] == "progress" and int(event["num_done"]) % 50 == 0:
                note(f"{event['num_done']} of {event['num_lines']} lines, {event['left_s']} s left")

    reading = asyncio.create_task(read())
    samples: list[dict[str, float]] = []
    started_at = time.monotonic()
    while process.returncode is None and not reading.done():
        used = (await redis.info("memory"))["used_memory"]
        memory = {name: round(mib, 1) for name, pid in pids.items() if (mib := resident_mib(pid)) is not None}
        done = float(str(events[-1].get("num_done", 0))) if events else 0.0
        at_s = round(time.monotonic() - started_at, 1)
        samples.append({"at_s": at_s, "num_done": done, **memory, SERVER_DATA: round(used / MIB, 2)})
        await asyncio.sleep(SAMPLE_S)
    await reading
    if await process.wait() != 0:
        raise BenchFailed(f"`sluice run` ended with code {process.returncode}: {events[-1:]}")
    return samples, events


class BenchFailed(SluiceError):  # noqa: N818 - reads as the fact it states
    """What was to be measured did not happen."""

    code = "bench_failed"


async def _sluice(settings: Settings, *words: str, stdout: int) -> asyncio.subprocess.Process:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "ops.cli",
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=stdout,
        stderr=asyncio.subprocess.DEVNULL,
        env=environment | settings.environment(),
    )
