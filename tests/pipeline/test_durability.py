"""SLUICE_DURABILITY=strict: nothing is acknowledged that is not on the server's disk, and nobody waits for ever.

A server with `appendfsync no` stands for a disk that does not keep up: what it is given never counts as written.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from pipeline import redis_durable
from pipeline.batch.store import BatchStore, Feed, StepTurn, store_client
from pipeline.client import Client
from pipeline.connect import open_client, open_transport
from pipeline.errors import ServerPermission, ServerPolicy, ServerRefused, ServerTooOld, ServerUnreachable
from pipeline.keys import Keys
from pipeline.redis_calls import script_source
from pipeline.server_acl import RULE
from pipeline.settings import Settings
from pipeline.transport import Accepted, Exists
from tests.pipeline.batch.files import new_manifest
from tests.pipeline.benches import DEADLINE_S, soon
from tests.servers import Server, ServerOptions, running_server, server_of_its_own

BATCH = "batch_1"
FEEDER = "whose turn it is"
TURN = StepTurn(BATCH, "feed", 0, FEEDER)
POLL_S = 0.005
BRIEF_S = 0.2


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server that appends what it is given to a file; the embedded one, since Debian's has no WAITAOF."""
    with server_of_its_own("valkey", ServerOptions(appendonly="yes", appendfsync="everysec")) as server:
        yield server


@pytest.fixture
async def raw(server: Server) -> AsyncIterator[Redis]:
    """The administrator's connection; the disk keeps up when the test begins."""
    client = Redis.from_url(server.url, protocol=2)
    await keep_up(client)
    await client.flushall()
    await client.config_resetstat()
    yield client
    await client.aclose()


@pytest.fixture
def strict(server: Server, raw: Any, namespace: str) -> Settings:
    return Settings(redis_url=server.url, namespace=namespace, durability="strict")


async def keep_up(raw: Any) -> None:
    await raw.config_set("appendonly", "yes")
    await raw.config_set("appendfsync", "everysec")


async def fall_behind(raw: Any) -> None:
    await raw.config_set("appendfsync", "no")


async def num_waits(raw: Any) -> int:
    stats = await raw.info("commandstats")
    return stats.get("cmdstat_waitaof", {"calls": 0})["calls"]


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_durable, "DISK_TIMEOUT_S", BRIEF_S)


# Admission


async def test_an_admission_is_on_the_disk_when_it_is_acknowledged(strict: Settings, raw: Any) -> None:
    transport = await open_transport(strict)
    assert await transport.admit("r", "interactive", b"work") == Accepted()
    assert await transport.admit("r", "interactive", b"work") == Exists()
    await transport.close()
    assert await num_waits(raw) >= 2


async def test_nothing_waits_for_the_disk_unless_it_is_asked_to(strict: Settings, raw: Any) -> None:
    transport = await open_transport(strict.model_copy(update={"durability": "everysec"}))
    await fall_behind(raw)
    assert await transport.admit("r", "interactive", b"work") == Accepted()
    await transport.close()
    assert await num_waits(raw) == 0


@pytest.mark.usefixtures("_impatient")
async def test_what_is_not_on_the_disk_in_time_is_an_error_and_may_be_repeated(strict: Settings, raw: Any) -> None:
    transport = await open_transport(strict)
    await fall_behind(raw)
    for _ in range(2):  # the second time it only waits
        with pytest.raises(ServerUnreachable, match=r"has done admit, but it is not on the disk after 0\.2 s") as error:
            await transport.admit("r", "interactive", b"work")
        assert error.value.retryable
    await keep_up(raw)
    assert await transport.admit("r", "interactive", b"work") == Exists()
    assert await transport.queue_length("tokenizer", "interactive") == 1
    await transport.close()


@pytest.mark.usefixtures("_impatient")
async def test_a_call_that_is_repeated_elsewhere_waits_for_what_was_written_before(
    strict: Settings, raw: Redis
) -> None:
    first, second = await open_transport(strict), await open_transport(strict)
    await fall_behind(raw)
    for transport in (first, second):
        with pytest.raises(ServerUnreachable, match="not on the disk"):
            await transport.admit("r", "interactive", b"work")
        await transport.close()


async def test_a_script_that_is_sent_again_writes_again(raw: Any, server: Server, namespace: str) -> None:
    keys = Keys(namespace)
    names = [keys.request("r"), keys.stream("tokenizer", "batch"), keys.stream("prefill", "batch")]
    call: list[Any] = ["EVAL", script_source("admit"), 3, *names, "ticket", 10, b"work"]
    assert await raw.execute_command(*call) == b"accepted"
    await fall_behind(raw)
    async with open_client(server.url, max_connections=1) as other:
        assert await other.execute_command("WAITAOF", 1, 0, 100) == [1, 0]  # it has written nothing
        assert await other.execute_command(*call) == b"accepted"
        assert await other.execute_command("WAITAOF", 1, 0, 100) == [0, 0]


async def test_forgotten_scripts_are_sent_again(strict: Settings, raw: Any) -> None:
    transport = await open_transport(strict)
    await raw.script_flush()
    assert await transport.admit("r", "interactive", b"work") == Accepted()
    assert await transport.queue_length("tokenizer", "interactive") == 1
    await transport.close()


async def test_a_file_that_is_switched_off_meanwhile_is_said_so(strict: Settings, raw: Any) -> None:
    transport = await open_transport(strict)
    await raw.config_set("appendonly", "no")
    with pytest.raises(ServerRefused, match="appendonly is disabled"):
        await transport.admit("r", "interactive", b"work")
    await transport.close()


@pytest.mark.usefixtures("_impatient")
async def test_a_client_waits_until_the_disk_has_it(strict: Settings, raw: Any) -> None:
    transport = await open_transport(strict)
    client = Client(transport, strict)
    await fall_behind(raw)
    asking = asyncio.create_task(client.enqueue("hello", model="tiny", request_id="mine"))
    async with asyncio.timeout(DEADLINE_S):
        while await num_waits(raw) < 2:  # noqa: ASYNC110 - the server tells nobody
            await asyncio.sleep(POLL_S)
    assert not asking.done()
    await keep_up(raw)
    assert (await soon(asking)).request_id == "mine"
    assert await transport.queue_length("tokenizer", "interactive") == 1
    await transport.close()


async def test_an_acknowledged_request_survives_the_servers_crash(short_directory: Path) -> None:
    options = ServerOptions(appendonly="yes", appendfsync="everysec")
    for number in range(3):
        with running_server(short_directory, "valkey", options) as server:
            settings = Settings(redis_url=server.url, durability="strict", lease_s=0.05)
            transport = await open_transport(settings)
            assert await transport.queue_length("tokenizer", "batch") == number
            assert await transport.admit(f"r{number}", "batch", b"work") == Accepted()
            server.kill()
            await transport.close()


# Batches


async def batch_in_progress(url: str, keys: Keys, *, strict: bool) -> tuple[Redis, BatchStore]:
    client = store_client(url, 4)
    store = BatchStore(client, "test", keys, strict=strict)
    assert await store.create(new_manifest(Path("/nowhere"), BATCH), "/nowhere/batches/one")
    fields: dict[str, Any] = {"total": 3, "feed_nonce": FEEDER}
    assert await store.move(BATCH, ["validating"], "in_progress", fields) == "in_progress"
    return client, store


@pytest.mark.usefixtures("_impatient")
async def test_the_last_line_of_a_page_waits_for_the_disk_for_all(strict: Settings, raw: Any) -> None:
    client, store = await batch_in_progress(str(strict.redis_url), Keys(strict.namespace), strict=True)
    await fall_behind(raw)
    assert await store.feed(TURN, 0, Feed("request", b"work"), more_follow=True) == "ok"
    assert await num_waits(raw) == 0
    with pytest.raises(ServerUnreachable, match="has done batch_feed, but it is not on the disk"):
        await store.feed(TURN, 1, Feed("request", b"work"))
    await keep_up(raw)
    assert (await store.read(BATCH)).cursor == 2
    assert await store.feed(TURN, 2, Feed("request", b"work")) == "ok"
    await client.aclose()


async def test_lines_wait_for_nothing_unless_they_are_asked_to(strict: Settings, raw: Any) -> None:
    client, store = await batch_in_progress(str(strict.redis_url), Keys(strict.namespace), strict=False)
    await fall_behind(raw)
    assert await store.feed(TURN, 0, Feed("request", b"work")) == "ok"
    assert await num_waits(raw) == 0
    await client.aclose()


# What is asked of the server at the start


async def test_a_server_without_a_file_is_refused() -> None:
    said = r"has appendonly no.*SLUICE_DURABILITY=strict needs.*appendonly yes"
    with server_of_its_own("valkey") as server, pytest.raises(ServerPolicy, match=said):
        await open_transport(Settings(redis_url=server.url, durability="strict"))


async def test_a_server_that_never_syncs_its_file_is_refused(strict: Settings, raw: Any) -> None:
    await fall_behind(raw)
    with pytest.raises(ServerPolicy, match=r"has appendfsync no.*strict needs CONFIG SET appendfsync everysec"):
        await open_transport(strict)


async def test_debians_server_is_too_old_for_it(redis_server_url: str) -> None:
    with pytest.raises(ServerTooOld, match=r"is version 7\.0\..*strict needs WAITAOF, which Redis 7\.2 or any Valkey"):
        await open_transport(Settings(redis_url=redis_server_url, durability="strict"))


async def test_the_rule_of_the_documentation_is_enough(server: Server, strict: Settings, raw: Any) -> None:
    rules = RULE.format(namespace=strict.namespace).split()
    await raw.execute_command("ACL", "SETUSER", "sluice", "reset", "on", ">word", *rules)
    url = server.unix_url("sluice", "word")
    transport = await open_transport(strict.model_copy(update={"redis_url": url}))
    assert await transport.admit("r", "interactive", b"work") == Accepted()
    await transport.close()


async def test_a_user_that_may_not_wait_is_told(server: Server, strict: Settings, raw: Any) -> None:
    await raw.execute_command("ACL", "SETUSER", "sluice", "reset", "on", ">word", "~*", "+@all", "-waitaof")
    settings = strict.model_copy(update={"redis_url": server.unix_url("sluice", "word")})
    with pytest.raises(ServerPermission, match="'sluice' may not run WAITAOF;"):
        await open_transport(settings)
    await (await open_transport(settings.model_copy(update={"durability": "everysec"}))).close()
