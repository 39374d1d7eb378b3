"""`sluice status` and `sluice top` over a real server: what is there, what is missing, and how it ends."""

import asyncio
import json
import os
import pty
import re
import select
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import pytest
from redis.asyncio import Redis
from rich.console import Console

from kv_store.pool import FilePool, PoolUsage
from ops.finding import FoundStack
from ops.status.history import history, of_one_pool
from ops.status.page import age, page, size
from ops.status.state import StackStatus, watching
from ops.status.top import frame
from ops.supervision.slot_status import SlotStatus
from pipeline import wire
from pipeline.connect import open_transport
from pipeline.counters import DIVERGENCES, KV_MISSING, MEANINGS
from pipeline.keys import Keys
from pipeline.messages import Terminal, Usage
from pipeline.overview import Overview, ProcessState, ServerState
from pipeline.queue_state import QueueState
from pipeline.redis_streams import RedisStreams
from pipeline.samples import Sample, SampleLog
from pipeline.settings import Settings
from pipeline.transport import Emit, Finish, Transaction
from tests.ops.command_line import sluice
from tests.ops.waiting import DEADLINE_S

COMMAND = """
import sys
from pathlib import Path
from ops.cli import main
from ops.status import state

procfile = Path(sys.argv.pop(1))
state.default_procfile = lambda: procfile
main()
"""
SERVER = ServerState("unix:///s", "Valkey 9.1.2", 1 << 20, None)
HERE = os.uname().nodename


class Ended(NamedTuple):
    """A command that has ended."""

    exit_code: int
    stdout: str
    stderr: str


@pytest.fixture
def two_stages(tmp_path: Path) -> Path:
    """A Procfile of two stages."""
    procfile = tmp_path / "Procfile"
    procfile.write_text("tokenizer: python -m a\ndecode: python -m b\n")
    return procfile


@pytest.fixture
def elsewhere(stack_env: dict[str, str], valkey_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """A stack that others run, at SLUICE_REDIS_URL."""
    monkeypatch.setenv("SLUICE_REDIS_URL", valkey_url)
    monkeypatch.setenv("SLUICE_NAMESPACE", namespace)
    monkeypatch.setenv("SLUICE_MODEL", "tiny")
    return Settings()


@asynccontextmanager
async def joined(settings: Settings, *stages: str) -> AsyncIterator[RedisStreams]:
    """A process that says it is these stages."""
    transport = await open_transport(settings, pool_id="pool-1")
    try:
        for stage in stages:
            await transport.register(stage, b"info", 15)
        yield transport
    finally:
        await transport.close()


async def run_sluice(procfile: Path, *words: str) -> Ended:
    """As a process of its own, since a command has an event loop of its own."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", COMMAND, str(procfile), *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    stdout, stderr = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert process.returncode is not None
    return Ended(process.returncode, stdout.decode(), stderr.decode())


async def test_all_stages_of_the_procfile_are_there(elsewhere: Settings, two_stages: Path) -> None:
    async with joined(elsewhere, "tokenizer", "decode"):
        result = await run_sluice(two_stages, "status")
    assert result.exit_code == 0, result
    assert f"{os.getpid()}" in result.stdout
    assert "Valkey" in result.stdout
    assert "missing" not in result.stdout
    assert len(result.stdout.splitlines()) < 30


async def test_what_is_missing_is_said_and_counts_as_failed(elsewhere: Settings, two_stages: Path) -> None:
    async with joined(elsewhere, "tokenizer"):
        result = await run_sluice(two_stages, "status")
    assert result.exit_code == 1
    assert "missing    no process of: decode" in result.stdout
    assert "no process of: decode" in result.stderr


def test_without_a_stack_there_is_nothing_to_show(stack_env: dict[str, str]) -> None:
    result = sluice("status")
    assert result.exit_code == 2
    assert "no `sluice up` runs" in result.stderr


@pytest.mark.usefixtures("stack_env")
def test_a_server_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_REDIS_URL", f"unix://:word@{tmp_path}/none.sock")
    result = sluice("status")
    assert result.exit_code == 1
    assert f"unix://{tmp_path}/none.sock" in result.stderr
    assert "word" not in result.stderr


async def test_json_has_all_of_it(elsewhere: Settings, two_stages: Path, raw_redis: Redis) -> None:
    async with joined(elsewhere, "tokenizer", "decode") as transport:
        for number in range(3):
            await transport.admit(f"r{number}", "batch", b"payload")
        done, *_ = await transport.receive("tokenizer", 2, 1)
        terminal = Terminal(finish_reason="stop", usage=Usage(prompt_tokens=1, completion_tokens=9))
        effects = (Emit(b"delta", 0, 9), Finish(wire.pack(terminal), "finished"))
        await transport.commit([Transaction(done, "r0", 0, effects, ack=True)])
        samples = SampleLog(raw_redis, "x", Keys(elsewhere.namespace))
        await samples.take("s", "pool-1", PoolUsage(num_blobs=4, used_bytes=2_000, quota_bytes=10_000))
        result = await run_sluice(two_stages, "status", "--json")
    shown = json.loads(result.stdout)
    assert (shown["namespace"], shown["model"], shown["up_pid"]) == (elsewhere.namespace, "tiny", None)
    assert shown["missing"] == []
    assert [row["stage"] for row in shown["processes"]] == ["tokenizer", "decode"]
    assert {(row["state"], row["pid"], row["host"]) for row in shown["processes"]} == {
        ("registered", os.getpid(), HERE)
    }
    assert all(0 <= row["renewed_s"] < 15 for row in shown["processes"])
    [queue] = [queue for queue in shown["queues"] if queue["num_entries"]]
    assert (queue["stage"], queue["priority"]) == ("tokenizer", "batch")
    assert (queue["num_waiting"], queue["num_held"], queue["num_holders"]) == (1, 1, 1)
    kv = {"pool_id": "pool-1", "used_bytes": 2_000, "quota_bytes": 10_000, "num_blobs": 4}
    assert shown["kv"] == kv | {"promised_bytes": 0, "num_promised": 0}
    assert shown["requests"]["waiting"]["tokenizer"] == 1
    assert shown["requests"]["in_work"]["tokenizer"] == 1
    assert shown["requests"]["lately"] == {"finished": 1, "failed": 0, "cancelled": 0}
    assert (shown["batches"], shown["dead_letters"], shown["counters"]) == ([], {}, {})


def stack(processes: tuple[ProcessState, ...], slots: tuple[SlotStatus, ...] | None) -> StackStatus:
    overview = Overview(0, "n", SERVER, processes, (), None, {}, ())
    return StackStatus(FoundStack(Settings(), 7), overview, ("tokenizer", "decode"), slots)


def slot(name: str, pid: int | None, state: str = "ready", num_restarts: int = 0) -> SlotStatus:
    fields = {"name": name, "stage": name.partition("-")[0], "pid": pid, "state": state}
    return SlotStatus.model_validate(fields | {"num_restarts": num_restarts, "uptime_s": 1.0})


def test_processes_of_supervisor_and_server_become_one_list() -> None:
    registered = (
        ProcessState("decode", f"{HERE}:11:a", HERE, 11, 14.0),
        ProcessState("decode", "far:11:b", "far", 11, 10.0),
        ProcessState("tokenizer", "by-hand", None, None, 15.0),
    )
    slots = (slot("decode", 11), slot("decode-2", None, "backing_off", 3))
    rows = stack(registered, slots).processes
    assert [(row.name, row.pid, row.host, row.state, row.num_restarts, row.renewed_s) for row in rows] == [
        ("tokenizer", None, None, "registered", None, 0.0),
        ("decode", 11, HERE, "ready", 0, 1.0),
        ("decode-2", None, None, "backing_off", 3, None),
        ("decode", 11, "far", "registered", None, 5.0),
    ]


def test_a_stage_is_missing_until_one_of_its_processes_has_announced_itself() -> None:
    announced = (ProcessState("tokenizer", "t", None, None, 15.0),)
    assert stack(announced, (slot("decode", 11, "starting"),)).missing == ("decode",)
    assert stack((), None).missing == ("tokenizer", "decode")


def shown_page(status: StackStatus) -> list[str]:
    console = Console(width=200, file=StringIO())
    console.print(page(status))
    assert isinstance(console.file, StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_what_is_rare_is_shown_where_it_happened() -> None:
    quiet = stack((), None)
    returned = QueueState("prefill", "returned", num_entries=3, num_held=1, num_holders=1, oldest_s=2.0)
    overview = replace(quiet.overview, counters={DIVERGENCES: 1, KV_MISSING: 12, "of a later version": 5})
    busy = replace(quiet, overview=replace(overview, queues=(returned,)))
    assert not [line for line in shown_page(quiet) if line.startswith(("rare", "returned"))]
    assert [line for line in shown_page(busy) if line not in shown_page(quiet)] == [
        "requests   2 waiting, 1 in prefill; 0 tokens/s over the last 30 s",
        "returned   2 waiting, 1 in work, the oldest for 2.0 s: their KV was lost, and is computed again",
        f"rare       12 {MEANINGS[KV_MISSING]}",
        f"           1 {MEANINGS[DIVERGENCES]}",
    ]


async def test_looking_makes_no_pool(elsewhere: Settings, tmp_path: Path) -> None:
    settings = elsewhere.model_copy(update={"kv_pool_dir": tmp_path / "none"})
    async with watching(FoundStack(settings, None)) as watch:
        await watch.look()
    assert not (tmp_path / "none").exists()


async def test_top_once_prints_the_page_and_the_last_minutes(
    elsewhere: Settings, two_stages: Path, raw_redis: Redis
) -> None:
    async with joined(elsewhere, "tokenizer", "decode") as transport:
        without = await run_sluice(two_stages, "top", "--once")
        await transport.admit("r", "batch", b"payload")
        samples = SampleLog(raw_redis, "x", Keys(elsewhere.namespace))
        await samples.take("s", "pool-1", PoolUsage(num_blobs=1, used_bytes=3 << 20, quota_bytes=1 << 30))
        result = await run_sluice(two_stages, "top", "--once")
    assert without.exit_code == result.exit_code == 0
    assert "no process of this stack takes samples" in without.stdout
    assert re.search(r"tokenizer +·+█·* +1\n", result.stdout)
    assert re.search(r"KV bytes +·+█·* +3\.0 MiB\n", result.stdout)


async def test_the_charts_of_top_show_the_pool_of_the_stack_alone(
    elsewhere: Settings, tmp_path: Path, raw_redis: Redis
) -> None:
    settings = elsewhere.model_copy(update={"kv_pool_dir": tmp_path / "pool"})
    samples = SampleLog(raw_redis, "x", Keys(settings.namespace))
    with FilePool.open(settings.pool_dir, 1 << 30) as pool:
        await samples.take("s", pool.pool_id, PoolUsage(num_blobs=1, used_bytes=3 << 20, quota_bytes=1 << 30))
        await samples.take("t", "other", PoolUsage(num_blobs=1, used_bytes=7 << 20, quota_bytes=1 << 30))
        async with watching(FoundStack(settings, None)) as watch:
            shown = Console(width=120, file=StringIO())
            shown.print(await frame(watch))
    assert isinstance(shown.file, StringIO)
    assert re.search(r"KV bytes +·+█·* +3\.0 MiB\n", shown.file.getvalue())


def test_samples_of_one_pool_are_those_of_the_last_one_unless_it_is_named() -> None:
    samples = [Sample(at_us, pool_id, 0, 1, 0) for at_us, pool_id in ((3, "b"), (2, "a"), (1, "b"))]
    assert [sample.at_us for sample in of_one_pool(samples)] == [1, 3]
    assert [sample.at_us for sample in of_one_pool(samples, "a")] == [2]
    assert of_one_pool([]) == []


@pytest.mark.usefixtures("elsewhere")
def test_top_needs_a_terminal() -> None:
    result = sluice("top")
    assert result.exit_code == 2
    assert "--once" in result.stderr


@pytest.mark.parametrize("key", [b"q", b"\x03"], ids=["q", "Ctrl-C"])
def test_a_key_leaves_top(elsewhere: Settings, key: bytes) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [sys.executable, "-m", "ops.cli", "top"], {**os.environ, "TERM": "xterm"})
    try:
        assert elsewhere.namespace.encode() in read_until(terminal, b"q leaves")
        os.write(terminal, key)
        read_until(terminal, None)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    finally:
        os.close(terminal)


def read_until(descriptor: int, words: bytes | None) -> bytes:
    """Read until some words came, or without words until the other end is closed."""
    seen, deadline = b"", time.monotonic() + DEADLINE_S
    while words is None or words not in seen:
        readable, _, _ = select.select([descriptor], [], [], deadline - time.monotonic())
        assert readable, f"nothing more came after {seen!r}"
        try:
            seen += os.read(descriptor, 4096)
        except OSError:  # the other end of a terminal is closed
            assert words is None, seen
            break
    return seen


def test_history_shows_the_highest_of_each_column_and_where_nobody_looked() -> None:
    def sample(at_s: float, entries: int, kv_bytes: int) -> Sample:
        queues = (QueueState("decode", "batch", entries, entries, 1, 0.0),) if entries else ()
        return Sample(round(1e6 * at_s), "p", kv_bytes, 1 << 30, 0, queues)

    samples = [sample(80, 9, 9), sample(91, 0, 0), sample(95.5, 2, 50), sample(95.9, 8, 100), sample(99, 4, 0)]
    *_, decode, kv = history(samples, 100_000_000, num_columns=5, column_s=2)
    assert decode.name == "decode"
    assert decode.values == (0, None, 8, None, 4)
    assert (decode.bars(), decode.peak) == ("▁·█·▅", 8)
    assert (kv.bars(), kv.peak) == ("▁·█·▁", 100)


def test_sizes_and_ages_are_short() -> None:
    assert [size(number) for number in (0, 1023, 1536, 5 << 20, 3 << 30)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 MiB",
        "3.0 GiB",
    ]
    assert [age(seconds) for seconds in (None, 0.04, 59.6, 120, 7_000)] == ["-", "0.0 s", "60 s", "2 min", "2 h"]
