"""Servers that do not let us in: each says what was wrong and what to set, and never repeats the password."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline import connect, redis_calls
from pipeline.connect import open_transport
from pipeline.errors import ServerError, ServerLoginFailed, ServerTlsFailed, ServerUnreachable
from pipeline.settings import Settings
from tests.certificates import Certificates, write_certificates
from tests.servers import Server, ServerKind, ServerOptions, server_of_its_own

NOBODY = 65534
SECRET = "s3cret-w0rd"
WRONG = "wr0ng-w0rd"


@pytest.fixture(scope="module")
def guarded(server_kind: ServerKind) -> Iterator[Server]:
    """A server with a password, a user, and one that is switched off."""
    users = (f"sluice on >{SECRET} ~* +@all", f"retired off >{SECRET} ~* +@all")
    with server_of_its_own(server_kind, ServerOptions(password=SECRET, users=users, tcp=True)) as server:
        yield server


@pytest.fixture(scope="module")
def open_server(server_kind: ServerKind) -> Iterator[Server]:
    """A server without passwords."""
    with server_of_its_own(server_kind, ServerOptions(tcp=True)) as server:
        yield server


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return write_certificates(tmp_path_factory.mktemp("certificates"), "localhost")


@pytest.fixture(scope="module")
def others_certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return write_certificates(tmp_path_factory.mktemp("certificates"), "elsewhere")


# The embedded server was built without TLS.
@pytest.fixture(scope="module")
def tls(certificates: Certificates) -> Iterator[Server]:
    options = ServerOptions(password=SECRET, tls=certificates)
    with server_of_its_own("redis-server", options) as server:
        yield server


@pytest.fixture(scope="module")
def mutual_tls(certificates: Certificates) -> Iterator[Server]:
    options = ServerOptions(tls=certificates, tls_auth_clients=True)
    with server_of_its_own("redis-server", options) as server:
        yield server


async def enter(url: str) -> None:
    # A brief lease: who might be restarting is not waited for.
    await (await open_transport(Settings(redis_url=url, lease_s=0.05))).close()


async def problem(kind: type[ServerError], url: str) -> str:
    with pytest.raises(kind) as caught:
        await enter(url)
    assert type(caught.value) is kind
    assert SECRET not in str(caught.value)
    assert WRONG not in str(caught.value)
    return caught.value.problem


# User, password, database


async def test_users_and_passwords_open_port_and_socket(guarded: Server) -> None:
    await enter(guarded.tcp_url("sluice", SECRET))
    await enter(guarded.tcp_url("", SECRET, db=3))
    await enter(guarded.unix_url("sluice", SECRET))
    await enter(f"{guarded.unix_url('default', SECRET)}?db=3")


@pytest.mark.parametrize(("user", "password"), [("sluice", WRONG), ("nobody", SECRET), ("retired", SECRET)])
async def test_a_wrong_login_names_the_user(guarded: Server, user: str, password: str) -> None:
    for url in (guarded.tcp_url(user, password), guarded.unix_url(user, password)):
        said = await problem(ServerLoginFailed, url)
        assert f"user '{user}' with this password" in said
        assert "SLUICE_REDIS_URL" in said


async def test_a_missing_password_says_where_it_goes(guarded: Server) -> None:
    for url in (guarded.tcp_url(), guarded.unix_url("", "")):
        assert "wants a password; write it into SLUICE_REDIS_URL" in await problem(ServerLoginFailed, url)


async def test_a_password_that_the_server_does_not_have_is_said_so(open_server: Server) -> None:
    assert "leave it out, or name the user" in await problem(ServerLoginFailed, open_server.tcp_url("", SECRET))


async def test_a_database_that_is_not_there_is_said_so(open_server: Server) -> None:
    for url in (open_server.tcp_url(db=99), f"{open_server.url}?db=99"):
        assert "no database of that number" in await problem(ServerLoginFailed, url)


# TLS


async def test_tls_checks_certificate_and_host(tls: Server, certificates: Certificates) -> None:
    await enter(tls.tcp_url("", SECRET, ssl_ca_certs=certificates.authority))


async def test_an_unknown_authority_says_how_to_name_it(tls: Server, others_certificates: Certificates) -> None:
    for url in (tls.tcp_url("", SECRET), tls.tcp_url("", SECRET, ssl_ca_certs=others_certificates.authority)):
        said = await problem(ServerTlsFailed, url)
        assert "not trusted" in said
        assert "ssl_ca_certs=FILE" in said


async def test_a_certificate_of_another_host_says_so(tls: Server, certificates: Certificates) -> None:
    query = {"ssl_ca_certs": certificates.authority}
    said = await problem(ServerTlsFailed, tls.tcp_url("", SECRET, "127.0.0.1", **query))
    assert "for another host" in said
    assert "'127.0.0.1'" in said
    await enter(tls.tcp_url("", SECRET, "127.0.0.1", **query, ssl_check_hostname="false"))


async def test_certificates_can_be_left_unchecked(tls: Server) -> None:
    await enter(tls.tcp_url("", SECRET, ssl_cert_reqs="none"))


async def test_a_wrong_password_over_tls_is_told_from_a_wrong_certificate(
    tls: Server, certificates: Certificates
) -> None:
    await problem(ServerLoginFailed, tls.tcp_url("", WRONG, ssl_ca_certs=certificates.authority))


async def test_a_server_that_wants_a_certificate_gets_one(mutual_tls: Server, certificates: Certificates) -> None:
    await enter(
        mutual_tls.tcp_url(
            ssl_ca_certs=certificates.authority, ssl_certfile=certificates.client, ssl_keyfile=certificates.client_key
        )
    )


async def test_a_missing_client_certificate_says_how_to_give_it(mutual_tls: Server, certificates: Certificates) -> None:
    # How a server hangs up depends on who is faster, so either kind may come.
    with pytest.raises((ServerUnreachable, ServerTlsFailed), match="ssl_certfile=FILE&ssl_keyfile=FILE"):
        await enter(mutual_tls.tcp_url(ssl_ca_certs=certificates.authority))


async def test_a_client_certificate_of_another_authority_is_refused(
    mutual_tls: Server, certificates: Certificates, others_certificates: Certificates
) -> None:
    url = mutual_tls.tcp_url(
        ssl_ca_certs=certificates.authority,
        ssl_certfile=others_certificates.client,
        ssl_keyfile=others_certificates.client_key,
    )
    with pytest.raises((ServerUnreachable, ServerTlsFailed), match="client's certificate"):
        await enter(url)


async def test_plain_text_to_a_port_with_tls_says_what_to_write(tls: Server) -> None:
    assert "write rediss://" in await problem(ServerUnreachable, tls.tcp_url("", SECRET).replace("rediss", "redis"))


async def test_tls_to_a_port_without_says_what_to_write(open_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "ANSWER_TIMEOUT_S", 0.2)  # the server waits for a line that never ends
    url = open_server.tcp_url().replace("redis", "rediss")
    assert "write redis://" in await problem(ServerUnreachable, url)


# Sockets and networks


async def test_a_socket_that_is_not_there_says_so(short_directory: Path) -> None:
    said = await problem(ServerUnreachable, f"unix://{short_directory}/nobody.sock")
    assert "no such socket" in said


async def test_a_socket_that_nobody_listens_at_says_so(short_directory: Path) -> None:
    path = short_directory / "dead.sock"
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
    assert "nobody listens" in await problem(ServerUnreachable, f"unix://{path}")


async def test_a_socket_of_somebody_else_says_whose_permission_it_needs(open_server: Server) -> None:
    Path(open_server.url.removeprefix("unix://")).parent.chmod(0o711)
    with without_privileges():
        said = await problem(ServerLoginFailed, open_server.url)
    assert "unixsocketperm" in said


async def test_a_port_that_nobody_listens_at_says_so() -> None:
    with socket.socket() as bound:  # taken, so that no server of another test can be there
        bound.bind(("127.0.0.1", 0))
        said = await problem(ServerUnreachable, f"redis://127.0.0.1:{bound.getsockname()[1]}")
    assert "nobody listens" in said


async def test_a_host_that_is_not_known_says_so() -> None:
    assert "host's name is not known" in await problem(ServerUnreachable, "redis://no-such-host.invalid")


async def test_a_server_that_does_not_answer_says_so(server_kind: ServerKind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_calls, "ANSWER_TIMEOUT_S", 0.2)
    with server_of_its_own(server_kind) as server:
        server.freeze()
        assert "no answer within" in await problem(ServerUnreachable, server.url)


@contextmanager
def without_privileges() -> Iterator[None]:
    """Be nobody in what the kernel checks at a file; root would get in everywhere."""
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
