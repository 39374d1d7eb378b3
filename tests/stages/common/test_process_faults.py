"""A stage whose work hangs in a thread ends by itself, and one takes its fault points from its environment."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from pipeline.connect import open_transport
from pipeline.faults import struck
from pipeline.settings import Settings
from tests.pipeline.benches import take_one

ROOT = Path(__file__).parents[3]
LEASE_S = 0.1

# Takes one entry and works on it in a thread that nothing can interrupt.
HANGING = """
import asyncio, time
from stages.common.stage_process import run_stage, stage_process

async def serve(settings):
    async with stage_process("tokenizer", settings, {}) as process:
        for delivery in await process.transport.receive("tokenizer", 1, 20):
            process.leases.hold(delivery)
            await asyncio.to_thread(time.sleep, 3600)

run_stage("tokenizer", serve)
"""


# Reaches a point, and would say that it went on.
REACHING = """
from pipeline import faults
from stages.common.stage_process import run_stage

async def serve(settings):
    await faults.reach("tokenizer.claimed")
    print("went on")

run_stage("tokenizer", serve)
"""


async def end_of(program: str, settings: Settings) -> tuple[int, bytes, bytes]:
    """How a process with these settings ended, and what it said."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program),
        env={**os.environ, **settings.environment()},
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, output, errors


async def test_a_process_that_hangs_ends_with_a_status_of_its_own_and_its_work_goes_on(
    valkey_url: str, namespace: str, tmp_path: Path
) -> None:
    settings = Settings(home=tmp_path, redis_url=valkey_url, namespace=namespace, lease_s=LEASE_S)
    transport = await open_transport(settings, consumer="other")
    await transport.admit("r", "batch", b"work")
    returncode, _, errors = await end_of(HANGING, settings)
    assert returncode == os.EX_SOFTWARE == 70, errors
    events = [json.loads(line)["event"] for line in errors.splitlines()]
    assert events[-3:] == ["stage_ready", "work_stands_still", "process_hung"]
    delivery = await take_one(transport, "tokenizer")
    assert (delivery.payload, delivery.tries) == (b"work", 2)
    await transport.dead_letter(delivery, "done with it")
    await transport.close()


async def test_a_stage_injects_what_its_environment_says(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, fault="tokenizer.claimed=kill", fault_dir=tmp_path / "faults")
    returncode, output, _ = await end_of(REACHING, settings)
    assert (returncode, output) == (-signal.SIGKILL, b"")
    assert len(struck(tmp_path / "faults", "tokenizer.claimed")) == 1
    returncode, output, errors = await end_of(REACHING, settings)  # started again
    assert (returncode, output) == (0, b"went on\n"), errors


async def test_a_wrong_fault_stops_the_start_with_one_sentence(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, fault="tokenizer.claimed=explode", fault_dir=tmp_path)
    returncode, _, errors = await end_of(REACHING, settings)
    assert returncode == 1
    [event] = [json.loads(line) for line in errors.splitlines()]
    assert event["code"] == "SettingsError"
    assert "part 'tokenizer.claimed=explode': the action is 'explode', allowed: kill, " in event["reason"]
