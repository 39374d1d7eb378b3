"""The process that keeps an engine stage's leases: while the interpreter is held, and never for the dead."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pipeline.clock import monotonic_s
from pipeline.connect import open_transport
from pipeline.heartbeat import Heartbeat, HeartbeatLost, fork_heartbeat
from pipeline.keys import HANG_LEASES
from pipeline.renewal import RedisRenewal
from pipeline.settings import Settings
from pipeline.transport import Delivery
from tests.pipeline.benches import take_one

ROOT = Path(__file__).parents[3]
LEASE_S = 0.4
DEADLINE_S = 30.0

# Takes one entry, does with it what its argument says, and hands it on.
STAGE = """
import asyncio, ctypes, sys, time
from pipeline.transport import Publish, Transaction
from stages.common.stage_process import run_engine_stage, stage_process

async def serve(settings, heartbeat):
    async with stage_process("tokenizer", settings, {}, heartbeat=heartbeat) as process:
        while not process.stopping.is_set():
            for delivery in await process.transport.receive("tokenizer", 1, 0.1):
                process.leases.hold(delivery)
                print("taken", flush=True)
                if sys.argv[1] == "gil":
                    await asyncio.sleep(0.05)  # the line is written to by the loop
                    ctypes.PyDLL(None).usleep(int(float(sys.argv[2]) * 1e6))
                elif sys.argv[1] == "hang":
                    await asyncio.to_thread(time.sleep, 3600)
                else:
                    for _ in range(3600):
                        process.leases.progressed()
                        await asyncio.sleep(0.05)
                done = Transaction(delivery, "r", 0, (Publish("prefill", "batch", b"done"),), ack=True)
                print(*await process.transport.commit([done]), flush=True)
                process.leases.drop(delivery)
                return

run_engine_stage("tokenizer", serve)
"""


@asynccontextmanager
async def stage_of(settings: Settings, *words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", STAGE, *words),
        env={**os.environ, **settings.environment()},
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def says(process: asyncio.subprocess.Process, line: bytes) -> None:
    assert process.stdout is not None
    assert process.stderr is not None
    said = await asyncio.wait_for(process.stdout.readline(), DEADLINE_S)
    assert said == line, (said, await process.stderr.read())


async def holds(condition: Callable[[], bool]) -> None:
    deadline = monotonic_s() + DEADLINE_S
    while not condition():
        assert monotonic_s() < deadline, "it did not come to hold"
        await asyncio.sleep(0.01)


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def settings(valkey_url: str, namespace: str, tmp_path: Path) -> Settings:
    return Settings(home=tmp_path, redis_url=valkey_url, namespace=namespace, lease_s=LEASE_S)


async def test_a_lease_is_kept_while_the_stage_holds_the_interpreter(settings: Settings) -> None:
    other = await open_transport(settings, consumer="other")
    await other.admit("r", "batch", b"work")
    async with stage_of(settings, "gil", str(4 * LEASE_S)) as process:
        await says(process, b"taken\n")
        took: list[object] = []
        while not await other.queue_length("prefill", "batch"):  # it waits for its chance all the time
            took += await other.receive("tokenizer", 1, 0.05)
        await says(process, b"ok\n")
        assert took == []
        assert await asyncio.wait_for(process.wait(), DEADLINE_S) == 0
    await other.close()


async def test_a_dead_stage_loses_its_work_after_one_lease_and_its_heartbeat_ends(settings: Settings) -> None:
    other = await open_transport(settings, consumer="other")
    await other.admit("r", "batch", b"work")
    async with stage_of(settings, "work") as process:
        await says(process, b"taken\n")
        [heartbeat] = children_of(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        delivery = await take_one(other, "tokenizer")
        assert (delivery.payload, delivery.tries) == (b"work", 2)
        await holds(lambda: not is_alive(heartbeat))
    await other.close()


async def test_a_stage_that_hangs_is_killed_and_its_work_goes_on(settings: Settings) -> None:
    quick = settings.model_copy(update={"lease_s": 0.1})
    other = await open_transport(quick, consumer="other")
    await other.admit("r", "batch", b"work")
    async with stage_of(quick, "hang") as process:
        await says(process, b"taken\n")
        began = monotonic_s()
        assert await asyncio.wait_for(process.wait(), DEADLINE_S) == -signal.SIGKILL
        assert monotonic_s() - began >= 2 * HANG_LEASES * 0.1 * 0.9
        assert process.stderr is not None
        events = [json.loads(line)["event"] for line in (await process.stderr.read()).splitlines()]
        assert events[-2:] == ["work_stands_still", "process_hung"]
        assert (await take_one(other, "tokenizer")).tries == 2
    await other.close()


async def test_a_stage_whose_heartbeat_was_killed_ends_and_says_why(settings: Settings) -> None:
    other = await open_transport(settings, consumer="other")
    await other.admit("r", "batch", b"work")
    async with stage_of(settings, "work") as process:
        await says(process, b"taken\n")
        [heartbeat] = children_of(process.pid)
        os.kill(heartbeat, signal.SIGKILL)
        assert await asyncio.wait_for(process.wait(), DEADLINE_S) == 1
        assert process.stderr is not None
        last = json.loads((await process.stderr.read()).splitlines()[-1])
        assert (last["event"], last["code"]) == ("stage_failed", "HeartbeatLost")
    assert (await take_one(other, "tokenizer")).tries == 2
    await other.close()


async def test_sigterm_to_the_whole_group_ends_both_in_order(settings: Settings) -> None:
    async with stage_of(settings, "work") as process:
        await holds(lambda: is_alive(process.pid) and bool(children_of(process.pid)))
        other = await open_transport(settings, consumer="other")
        await holds_registered(other)
        [heartbeat] = children_of(process.pid)
        for pid in (heartbeat, process.pid):
            os.kill(pid, signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), DEADLINE_S) == 0
        await holds(lambda: not is_alive(heartbeat))
        await other.close()


async def holds_registered(transport) -> None:
    deadline = monotonic_s() + DEADLINE_S
    while not await transport.processes():
        assert monotonic_s() < deadline
        await asyncio.sleep(0.01)


def test_a_heartbeat_whose_renewals_break_ends_and_the_stage_is_told(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = settings.home / "called"

    async def breaks(self: RedisRenewal, deliveries: Sequence[Delivery]) -> list[bool]:
        os.close(os.open(called, os.O_CREAT))  # in the other process
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(RedisRenewal, "renew", breaks)
    line = fork_heartbeat(settings)  # here, where no loop runs

    async def stage() -> None:
        beat = await Heartbeat.open(line, "me", LEASE_S)
        beat.hold(Delivery("decode", "s", "1-1", "n", b"", 1))
        with pytest.raises(HeartbeatLost):
            await asyncio.wait_for(beat.run(), DEADLINE_S)

    asyncio.run(stage())
    assert called.exists()
    os.waitpid(-1, 0)
