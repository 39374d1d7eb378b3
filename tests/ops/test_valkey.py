"""The embedded server: started once per home, shared, restarted when it crashes, and gone with its last user."""

import asyncio
import os
import signal
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from ops.server.valkey import EmbeddedValkey, ValkeyFailed
from tests.ops.waiting import holds, wait_for_end

USER = """
import asyncio, sys
from pathlib import Path
from ops.server.valkey import EmbeddedValkey

async def main():
    print(await EmbeddedValkey(Path(sys.argv[1])).start(), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def connect(url: str) -> Any:  # the library types its replies as maybe awaitable
    return Redis.from_url(url)


@asynccontextmanager
async def server_of(home: Path) -> AsyncIterator[Any]:
    server = EmbeddedValkey(home)
    client = connect(await server.start())
    try:
        yield client
    finally:
        client.close()
        await server.stop()


@asynccontextmanager
async def killed_user_of(home: Path) -> AsyncIterator[str]:
    """Another process that uses the server, and is killed in the end."""
    user = await asyncio.create_subprocess_exec(sys.executable, "-c", USER, str(home), stdout=asyncio.subprocess.PIPE)
    try:
        assert user.stdout is not None
        yield (await asyncio.wait_for(user.stdout.readline(), 30)).decode().strip()
    finally:
        user.kill()
        await user.wait()


def pid_of(client: Any) -> int:
    return client.info("server")["process_id"]


def parent_of(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("PPid:")))


def left_in(home: Path) -> set[str]:
    return {path.name for path in (home / "valkey").iterdir()}


async def test_server_keeps_what_it_is_given_and_listens_on_its_socket_alone(home: Path) -> None:
    async with server_of(home) as client:
        assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
        assert client.config_get("appendonly")["appendonly"] == "yes"
        assert client.config_get("appendfsync")["appendfsync"] == "everysec"
        assert client.config_get("port")["port"] == "0"
        assert int(client.config_get("maxmemory")["maxmemory"]) > 0
        assert stat.S_IMODE((home / "valkey").stat().st_mode) == 0o700
        assert stat.S_IMODE((home / "valkey" / "server.sock").stat().st_mode) == 0o700


async def test_stop_leaves_data_and_no_process(home: Path) -> None:
    async with server_of(home) as client:
        client.set("kept", "yes")
        pid = pid_of(client)
    wait_for_end(pid)
    assert left_in(home) == {"appendonlydir", "server.lock", "start.lock"}
    async with server_of(home) as client:
        assert client.get("kept") == b"yes"


async def test_second_user_shares_the_server_and_the_last_one_stops_it(home: Path) -> None:
    first = EmbeddedValkey(home)
    url = await first.start()
    async with server_of(home) as client:
        pid = pid_of(client)
        await first.stop()
        assert client.ping()
        assert pid_of(client) == pid
    wait_for_end(pid)
    with connect(url) as client, pytest.raises(RedisConnectionError):
        client.ping()


async def test_users_that_start_together_get_one_server(home: Path) -> None:
    users = [EmbeddedValkey(home) for _ in range(4)]
    urls = await asyncio.gather(*(user.start() for user in users))
    with connect(urls[0]) as client:
        pid = pid_of(client)
    assert len(set(urls)) == 1
    await asyncio.gather(*(user.stop() for user in users))
    wait_for_end(pid)


async def test_start_while_the_last_user_leaves_gets_a_server(home: Path) -> None:
    first, second = EmbeddedValkey(home), EmbeddedValkey(home)
    await first.start()
    _, url = await asyncio.gather(first.stop(), second.start())
    with connect(url) as client:
        assert client.ping()
    await second.stop()


async def test_killed_user_takes_the_server_along(home: Path) -> None:
    async with killed_user_of(home) as url:
        with connect(url) as client:
            pid = pid_of(client)
    wait_for_end(pid)


async def test_killed_user_leaves_the_server_to_the_others(home: Path) -> None:
    async with server_of(home) as client:
        async with killed_user_of(home) as url:
            assert url.startswith("unix://")
        assert client.ping()


async def test_crashed_server_is_started_again_with_its_data(home: Path) -> None:
    async with server_of(home) as client:
        client.set("kept", "yes")
        client.execute_command("WAITAOF", 1, 0, 5000)  # everysec may lose the last second, and says so
        pid = pid_of(client)
        os.kill(pid, signal.SIGKILL)

        def is_back() -> bool:
            try:
                return client.get("kept") == b"yes"
            except RedisConnectionError:
                return False

        await holds(is_back)
        assert pid_of(client) != pid


async def test_server_ends_with_its_keeper_and_its_users_are_told(home: Path) -> None:
    server = EmbeddedValkey(home)
    with connect(await server.start()) as client:
        pid = pid_of(client)
    os.kill(parent_of(pid), signal.SIGKILL)
    assert "is gone" in str(await asyncio.wait_for(server.wait_failed(), 10))
    wait_for_end(pid)
    await server.stop()
    async with server_of(home) as client:  # stale sockets are no obstacle
        assert client.ping()


async def test_unusable_data_are_reported_with_the_servers_own_words(home: Path) -> None:
    async with server_of(home):
        pass
    manifest = next((home / "valkey" / "appendonlydir").glob("*.manifest"))
    manifest.write_text("nonsense\n")
    server = EmbeddedValkey(home)
    with pytest.raises(ValkeyFailed, match=r"(?i)manifest"):
        await server.start()
    await server.stop()  # there is nothing to stop, and that is no error


async def test_long_home_gets_a_short_socket_that_goes_away(home: Path) -> None:
    deep = home / ("d" * 100)
    server = EmbeddedValkey(deep)
    url = await server.start()
    directory = Path(url.removeprefix("unix://")).parent
    with connect(url) as client:
        assert client.config_get("dir")["dir"] == str(deep / "valkey")
        pid = pid_of(client)
    assert len(url) < 107
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    await server.stop()
    wait_for_end(pid)
    assert not directory.exists()


async def test_directory_of_somebody_else_is_refused(home: Path) -> None:
    (home / "valkey").symlink_to("/")
    with pytest.raises(ValkeyFailed, match="not a directory of this user"):
        await EmbeddedValkey(home).start()
