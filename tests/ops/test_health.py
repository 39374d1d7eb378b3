"""The health check, on a real server: what it says of processes that run, ended, or never came."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from ops import health
from pipeline.connect import open_transport
from pipeline.keys import Keys
from pipeline.redis_streams import RedisStreams
from pipeline.settings import PREFIX, Settings
from tests.servers import ServerOptions, server_of_its_own

ROOT = Path(__file__).parents[2]
HERE = socket.gethostname()
TTL_S = 60.0
DEADLINE_S = 20.0


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, valkey_url: str, namespace: str) -> None:
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLUICE_REDIS_URL", valkey_url)
    monkeypatch.setenv("SLUICE_NAMESPACE", namespace)


@pytest.fixture
async def register(namespace: str) -> AsyncIterator["Register"]:
    one = Register()
    yield one
    await one.close()


class Register:
    """Registers processes as stages do."""

    def __init__(self) -> None:
        self._open: list[RedisStreams] = []

    async def __call__(self, stage: str, pid: int, host: str = HERE) -> str:
        transport = await open_transport(Settings(), consumer=f"{host}:{pid}:{len(self._open)}", warn=lambda _: None)
        self._open.append(transport)
        await transport.register(stage, b"", TTL_S)
        return transport.consumer

    async def close(self) -> None:
        for transport in self._open:
            await transport.close()


@pytest.fixture
def ended_pid() -> int:
    """A process that was."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(DEADLINE_S)
    return ended.pid


@pytest.fixture
def zombie_pid() -> Iterator[int]:
    """A process that has ended, and whose parent has not asked yet."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    yield ended.pid
    ended.wait(DEADLINE_S)


async def look(stage: str | None = "decode") -> str:
    return await health.look(stage, Settings())


def probe(*words: str) -> tuple[int, str]:
    """Run it as a container's engine does."""
    command = [sys.executable, "-m", "ops.health", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1, done.stdout
    return done.returncode, done.stdout.strip()


async def test_process_that_is_registered_and_runs_is_healthy(register: Register) -> None:
    await register("decode", os.getpid())
    code, said = await asyncio.to_thread(probe, "decode")
    assert code == 0
    assert said.startswith(f"decode runs as process {os.getpid()}, registered for another ")


async def test_without_a_stage_whichever_runs_here_is_looked_at(register: Register) -> None:
    with pytest.raises(health.Unhealthy, match="no process of any stage"):
        await look(None)
    await register("compressor", os.getpid())
    assert (await look(None)).startswith("compressor runs as process")


async def test_nothing_registered_is_unhealthy() -> None:
    code, said = await asyncio.to_thread(probe, "decode")
    assert (code, said) == (1, f"no process of decode on {HERE} is registered; it starts, hangs or has ended")


async def test_other_hosts_and_other_stages_do_not_count(register: Register) -> None:
    await register("decode", os.getpid(), host="elsewhere")
    await register("prefill", os.getpid())
    with pytest.raises(health.Unhealthy, match="no process of decode"):
        await look()


async def test_registration_that_ran_out_does_not_count(register: Register, raw_redis: Redis, namespace: str) -> None:
    consumer = await register("decode", os.getpid())
    await raw_redis.delete(Keys(namespace).process("decode", consumer))  # its name stays in the index
    with pytest.raises(health.Unhealthy, match="no process of decode"):
        await look()


async def test_process_that_ended_without_a_goodbye_is_unhealthy(register: Register, ended_pid: int) -> None:
    await register("decode", ended_pid)
    with pytest.raises(health.Unhealthy, match=f"registered as process {ended_pid} of {HERE}, which has ended"):
        await look()


async def test_process_that_nobody_has_reaped_is_unhealthy(register: Register, zombie_pid: int) -> None:
    await register("decode", zombie_pid)
    with pytest.raises(health.Unhealthy, match="which has ended"):
        await look()


async def test_successor_counts_beside_a_dead_predecessor(register: Register, ended_pid: int) -> None:
    await register("decode", ended_pid)
    await register("decode", os.getpid())
    assert f"process {os.getpid()}," in await look()


async def test_looking_changes_nothing(register: Register, raw_redis: Redis, namespace: str) -> None:
    gone = await register("decode", os.getpid())
    await register("decode", os.getpid())
    await raw_redis.delete(Keys(namespace).process("decode", gone))
    before = await everything(raw_redis, namespace)
    assert len(before) == 2
    await look()
    assert await everything(raw_redis, namespace) == before


async def everything(raw: Redis, namespace: str) -> dict[bytes, bytes]:
    return {key: await raw.dump(key) async for key in raw.scan_iter(match=f"{namespace}:*")}


def test_server_that_is_down_is_one_sentence_without_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    with server_of_its_own(options=ServerOptions(tcp=True)) as server:
        url = server.tcp_url("me", "geheim", host="127.0.0.1")
    monkeypatch.setenv("SLUICE_REDIS_URL", url)
    code, said = probe("decode")
    assert (code, said) == (1, f"redis://127.0.0.1:{server.port}: nobody listens there; does the server run?")


async def test_server_that_does_not_answer_ends_the_look_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ops.health.LOOK_TIMEOUT_S", 0.2)
    with server_of_its_own() as server:
        monkeypatch.setenv("SLUICE_REDIS_URL", server.url)
        server.freeze()
        with pytest.raises(health.Unhealthy, match=r"no answer within 0\.2 s"):
            await look()


def test_refused_login_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with server_of_its_own(options=ServerOptions(password="right")) as server:
        monkeypatch.setenv("SLUICE_REDIS_URL", server.unix_url("", "wrong"))
        code, said = probe("decode")
    assert code == 1
    assert "refuses user 'default' with this password" in said


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        ("SLUICE_REDIS_URL", "", "SLUICE_REDIS_URL: is not set"),
        ("SLUICE_REDIS_ULR", "x", "SLUICE_REDIS_ULR is not a setting; the nearest one is SLUICE_REDIS_URL"),
    ],
)
def test_wrong_settings_are_one_sentence(
    variable: str, value: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    code, said = probe("decode")
    assert code == 1
    assert said.startswith(problem)


def test_unknown_stage_is_told_which_there_are() -> None:
    code, said = probe("decoder")
    assert (code, said) == (1, "'decoder' is no stage; there are jobs, tokenizer, prefill, compressor, decode")


def test_it_starts_without_an_engine() -> None:
    loads = "import sys, ops.health; print(sorted({'torch', 'numba', 'numpy', 'llvmlite'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", loads], cwd=ROOT, capture_output=True, timeout=DEADLINE_S, check=True)
    assert done.stdout == b"[]\n"
