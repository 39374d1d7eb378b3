"""The Procfile under honcho, on a tiny model: what `sluice up` does for the stages is not needed to run them."""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from ops.stack import stage_environment
from ops.supervision.procfile import default_procfile, read_procfile
from pipeline.client.asks import NewRequest
from pipeline.client.client import Client
from pipeline.params import parse_params
from pipeline.settings import Settings
from tests.e2e.stacks import DEADLINE_S, Result, new_settings

ROOT = Path(__file__).parents[2]
POLL_S = 0.02
STAGES = [line.stage for line in read_procfile(default_procfile())]
NUM_DECODE = 2


@pytest.fixture
def settings(caches: Path, tiny_models: tuple[Path, Path], valkey_url: str, namespace: str) -> Iterator[Settings]:
    """Settings of a home and a pool of their own, on a server that is there already."""
    home, pool = (Path(tempfile.mkdtemp(prefix=prefix)) for prefix in ("sl-", "sl-pool-"))
    (home / "cache").symlink_to(caches)
    yield new_settings(
        home=home,
        kv_pool_dir=pool,
        model=str(tiny_models[0]),
        redis_url=valkey_url,
        namespace=namespace,
        chunk_tokens=64,
    )
    shutil.rmtree(home)
    shutil.rmtree(pool)


@asynccontextmanager
async def honcho(settings: Settings, log: Path, *words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run `honcho start` as a person would, in an environment that knows nothing but the settings."""
    environment = stage_environment(settings) | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for name in ("NUMBA_CACHE_DIR", "OMP_WAIT_POLICY", "PYTHONUNBUFFERED"):
        environment.pop(name, None)
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *("honcho", "start", *words), cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(process.wait(), DEADLINE_S)


async def num_registered(client: Client) -> Counter[str]:
    """How many processes of each stage work."""
    return Counter(process.stage for process in await client.transport.processes())


async def all_registered(client: Client, process: asyncio.subprocess.Process) -> None:
    """Return when as many processes of each stage work as were asked for."""
    wanted = Counter(STAGES) + Counter({"decode": NUM_DECODE - 1})
    async with asyncio.timeout(DEADLINE_S):
        while await num_registered(client) != wanted:
            assert process.returncode is None, "honcho ended"
            await asyncio.sleep(POLL_S)


@pytest.mark.timeout(300)
async def test_stages_run_and_stop_under_honcho(settings: Settings, tmp_path: Path) -> None:
    log = tmp_path / "honcho.log"
    async with (
        await Client.connect(settings.redis_url, namespace=settings.namespace) as client,
        honcho(settings, log, "-c", f"decode={NUM_DECODE}") as process,
    ):
        await all_registered(client, process)
        params = parse_params({"seed": 1, "max_tokens": 20, "temperature": 0.8})
        one = NewRequest(settings.model, "who started you? " * 10, None, params)
        first, again = [Result.of(await client.answer(one, "interactive")) for _ in range(2)]
        assert first == again
        assert len(first.token_ids) == 20
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), DEADLINE_S) == 128 + signal.SIGTERM
        assert await num_registered(client) == {}
    said = log.read_text()
    # The codes it shows are those of the shells around the stages, which the signal ends.
    stopped = set(re.findall(r"(\S+) stopped \(rc=", said))
    assert stopped == {f"{stage}.1" for stage in STAGES} | {f"decode.{number + 1}" for number in range(NUM_DECODE)}
    assert "SIGKILL" not in said
    assert "Traceback" not in said
