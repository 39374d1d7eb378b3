"""A stage whose work hangs in a thread ends by itself, and its work is there for another."""

import asyncio
import json
import os
import sys
from pathlib import Path

from pipeline.connect import open_transport
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


async def test_a_process_that_hangs_ends_with_a_status_of_its_own_and_its_work_goes_on(
    valkey_url: str, namespace: str, tmp_path: Path
) -> None:
    settings = Settings(home=tmp_path, redis_url=valkey_url, namespace=namespace, lease_s=LEASE_S)
    transport = await open_transport(settings, consumer="other")
    await transport.admit("r", "batch", b"work")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", HANGING),
        env={**os.environ, **settings.environment()},
        cwd=ROOT,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, errors = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == os.EX_SOFTWARE == 70, errors
    events = [json.loads(line)["event"] for line in errors.splitlines()]
    assert events[-3:] == ["stage_ready", "work_stands_still", "process_hung"]
    delivery = await take_one(transport, "tokenizer")
    assert (delivery.payload, delivery.tries) == (b"work", 2)
    await transport.dead_letter(delivery, "done with it")
    await transport.close()
