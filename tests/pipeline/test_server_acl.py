"""The rule for a server's user: enough for all that we and arq do, and nothing in it that could be left out.

That each call of the transport works under it is shown by the contract's tests (the bench `narrow`).
"""

import re
from collections.abc import Iterator
from datetime import timedelta
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from arq import cron
from arq.connections import ArqRedis
from arq.worker import Worker, func
from redis.exceptions import NoPermissionError

from pipeline.connect import connection_pool, open_client, open_transport
from pipeline.errors import ServerPermission
from pipeline.server_acl import NEEDED, RULE
from pipeline.settings import Settings
from tests.servers import SERVER_KINDS, Server, server_of_its_own

NAMESPACE = "some-stack"
RULES = RULE.format(namespace=NAMESPACE).split()
GIVEN_BACK_OR_TAKEN = {"-@dangerous", "-function"}


@pytest.fixture(scope="module", params=SERVER_KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with server_of_its_own(request.param) as started:
        yield started


async def login(server: Server, *rules: str) -> str:
    """Make the user what the rules say; the address to log in with."""
    async with open_client(server.url) as admin:
        await admin.execute_command("ACL", "SETUSER", "sluice", "reset", "on", ">word", *rules)
    return server.unix_url("sluice", "word")


async def refusal(url: str, namespace: str = NAMESPACE) -> str:
    with pytest.raises(ServerPermission) as caught:
        await open_transport(Settings(redis_url=url, namespace=namespace))
    assert "word" not in str(caught.value)
    return str(caught.value)


async def test_the_rule_is_enough(server: Server) -> None:
    url = await login(server, *RULES)
    await (await open_transport(Settings(redis_url=url, namespace=NAMESPACE))).close()


@pytest.mark.parametrize("part", [part for part in RULES if part not in GIVEN_BACK_OR_TAKEN])
async def test_no_part_of_the_rule_can_be_left_out(server: Server, part: str) -> None:
    said = await refusal(await login(server, *(rule for rule in RULES if rule != part)))
    assert f"ACL SETUSER sluice {' '.join(RULES)}" in said


@pytest.mark.parametrize(
    "command",
    ["FLUSHALL", "FLUSHDB", "KEYS *", "CONFIG GET *", "FUNCTION FLUSH", "ACL LIST", "SHUTDOWN", "GET other:x"],
)
async def test_the_rule_gives_nothing_that_harms_others(server: Server, command: str) -> None:
    async with open_client(await login(server, *RULES)) as client:
        with pytest.raises(NoPermissionError):
            await client.execute_command(*command.split())


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        (("~*", "+@all", "-info"), "'sluice' may not run INFO;"),
        (("~*", "+@all", "-evalsha"), "may not run EVAL and EVALSHA;"),
        (("~*", "+@all", "-xadd"), f"may not run XADD on keys {NAMESPACE}:*;"),
        (("~*", "+@all", "-@sortedset"), f"may not run ZADD, ZCARD, ZRANGE and 4 more on keys {NAMESPACE}:*;"),
        (("~*", "+@all", "-multi"), "may not run MULTI;"),
        (("~other:*", "+@all"), f"may not run any command on keys {NAMESPACE}:*;"),
        ((f"~{NAMESPACE}:*", "+@all"), f"may not run any command on keys arq:*:{NAMESPACE}:*;"),
    ],
)
async def test_what_is_missing_is_named(server: Server, rules: tuple[str, ...], said: str) -> None:
    assert said in await refusal(await login(server, *rules))


async def test_a_database_that_the_user_may_not_select_is_said_so(server: Server) -> None:
    url = await login(server, "~*", "+@all", "-select")
    assert "may not run SELECT;" in await refusal(f"{url}?db=1")


async def test_the_rule_of_another_namespace_does_not_do(server: Server) -> None:
    said = await refusal(await login(server, *RULES), "other")
    assert "on keys other:*" in said
    assert f"ACL SETUSER sluice {RULE.format(namespace='other')}" in said


def test_every_command_of_a_script_is_asked_about() -> None:
    sources = [path.read_text() for path in (files("pipeline") / "scripts").iterdir() if path.name.endswith(".lua")]
    called = {name for source in sources for name in re.findall(r"redis\.p?call\('(\w+)'", source)}
    asked = {command.split()[0] for commands in NEEDED.values() for command in commands}
    assert called
    assert called - asked == set()


def test_the_documentation_gives_this_rule() -> None:
    text = (Path(__file__).parents[2] / "docs" / "redis.md").read_text()
    assert f"ACL SETUSER sluice reset on >PASSWORD {RULE.format(namespace='sluice')}\n" in text


async def test_arq_works_under_the_rule(server: Server) -> None:
    pool = connection_pool(await login(server, *RULES), 4)
    redis = ArqRedis(pool, default_queue_name=f"{NAMESPACE}:arq")
    done: list[str] = []

    async def step(ctx: dict[Any, Any], name: str) -> None:
        done.append(name)

    async def tick(ctx: dict[Any, Any]) -> None:
        done.append("tick")

    await redis.enqueue_job("step", "now", _job_id=f"{NAMESPACE}:1")
    await redis.enqueue_job("step", "soon", _job_id=f"{NAMESPACE}:2", _defer_by=timedelta(milliseconds=1))
    await redis.enqueue_job("step", "now", _job_id=f"{NAMESPACE}:1")  # known already
    worker = Worker(
        functions=[func(step, name="step")],
        cron_jobs=[cron(tick, name=f"{NAMESPACE}:tick", run_at_startup=True)],
        redis_pool=redis,
        keep_result=0,
        queue_name=f"{NAMESPACE}:arq",
        burst=True,
        poll_delay=0.01,
        handle_signals=False,
    )
    try:
        assert await worker.run_check() == 3
    finally:
        await redis.aclose(close_connection_pool=True)
    assert sorted(done) == ["now", "soon", "tick"]
