"""A whole stack on somebody else's server: over TLS, as a user that may do what docs/redis.md says and no more."""

from pathlib import Path
from urllib.parse import quote

from pipeline.connect import open_client
from pipeline.server_acl import RULE
from tests.certificates import write_certificates
from tests.e2e.stacks import ask, results_of, running_stack
from tests.leftovers import keys_that_stay
from tests.servers import ServerOptions, server_of_its_own

NAMESPACE = "team-a"
PASSWORD = "p@ss/word:#%"


async def test_stack_answers_over_tls_with_the_rights_of_the_documented_rule(
    caches: Path, tiny_models: tuple[Path, Path], tmp_path: Path
) -> None:
    certificates = write_certificates(tmp_path, "localhost")
    options = ServerOptions(
        password="of-the-administrator",
        users=(f"sluice on >{PASSWORD} {RULE.format(namespace=NAMESPACE)}",),
        tls=certificates,
        tls_auth_clients=True,
        appendonly="yes",
        appendfsync="everysec",
    )
    with server_of_its_own("redis-server", options) as server:
        url = server.tcp_url(
            "sluice",
            PASSWORD,
            ssl_ca_certs=certificates.authority,
            ssl_certfile=certificates.client,
            ssl_keyfile=certificates.client_key,
        )
        fields = {"model": str(tiny_models[0]), "chunk_tokens": 64, "engine_threads": 1}
        async with running_stack(caches, redis_url=url, namespace=NAMESPACE, **fields) as stack:
            asks = [ask(stack, f"{number} and then " * 20, 24, seed=number) for number in range(1, 5)]
            results = await results_of(stack, asks)
            assert [len(result.token_ids) for result in results] == [24] * len(asks)
            assert await results_of(stack, asks) == results
            logs = [path.read_text() for path in (stack.settings.home / "logs").iterdir()]
            assert logs
            assert [log for log in logs if PASSWORD in log or quote(PASSWORD, safe="") in log] == []
        async with open_client(server.unix_url("default", "of-the-administrator")) as admin:
            names = [key.decode() async for key in admin.scan_iter()]
            assert names
            assert [name for name in names if not name.startswith((f"{NAMESPACE}:", "arq:"))] == []
            assert await keys_that_stay(admin, NAMESPACE) == []
            assert await admin.execute_command("ACL", "LOG") == []  # nobody tried what the rule does not give
