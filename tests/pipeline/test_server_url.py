"""Addresses: which forms there are, and what is said about the others - never with the password."""

import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from pipeline.errors import ServerUrlInvalid
from pipeline.server_url import connection_options, read_address
from tests.certificates import write_certificates


@pytest.mark.parametrize(
    ("url", "shown", "user"),
    [
        ("redis://host", "redis://host", "default"),
        ("redis://user:word@host:6380/3", "redis://host:6380/3", "user"),
        ("rediss://:word@host", "rediss://host", "default"),
        ("redis://[::1]:6379", "redis://[::1]:6379", "default"),
        ("unix:///run/x.sock", "unix:///run/x.sock", "default"),
        ("unix://us%40er:word@/run/x.sock?db=1", "unix:///run/x.sock", "us@er"),
    ],
)
def test_what_is_shown_of_an_address_holds_no_password(url: str, shown: str, user: str) -> None:
    address = read_address(url)
    assert (address.shown, address.user) == (shown, user)


@pytest.mark.parametrize("url", ["http://host", "localhost:6379", "", "valkey+unix:///x", "redis:host"])
def test_an_address_of_another_kind_is_refused(url: str) -> None:
    with pytest.raises(ServerUrlInvalid, match="redis://, rediss://, unix://"):
        read_address(url)


@pytest.mark.parametrize("url", ["unix://", "unix:///", "unix://run/x.sock", "unix://user:word@run/x.sock"])
def test_a_socket_needs_an_absolute_path(url: str) -> None:
    with pytest.raises(ServerUrlInvalid, match=r"unix:///run/x\.sock"):
        read_address(url)


@pytest.mark.parametrize(
    "url",
    [
        "redis://",
        "redis://:secret",
        "redis://host:many",
        "redis://:sec/ret@host",
        "redis://:sec#ret@host:6379",
        "redis://:sec?ret@host:6379",
        "redis://user:12/secret@host",
        "redis://user:12?secret=1@host",
        "redis://host#secret",
        "unix://:sec/ret@/run/x.sock",
        "unix://:1?secret@/run/x.sock",
    ],
)
def test_an_unreadable_address_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(ServerUrlInvalid) as caught:
        connection_options(url)
    assert "sec" not in str(caught.value)
    assert "ret" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_special_characters_are_percent_encoded() -> None:
    options = connection_options("redis://us%2Fer:p%40%23%25@host")
    assert (options["username"], options["password"]) == ("us/er", "p@#%")


@pytest.mark.parametrize(
    "url", ["redis://host/first", "redis://host?db=none", "redis://host?db=-1", "redis://host/1/2"]
)
def test_a_database_is_a_number(url: str) -> None:
    with pytest.raises(ServerUrlInvalid, match="it is a number"):
        connection_options(url)


@pytest.mark.parametrize("url", ["redis://host/3", "redis://host?db=3", "unix:///run/x.sock?db=3"])
def test_the_database_is_in_the_path_or_an_option(url: str) -> None:
    assert connection_options(url)["db"] == 3


def test_an_unknown_option_names_the_known_ones() -> None:
    with pytest.raises(ServerUrlInvalid, match=r"'socket_timeout'; known are db, ssl_ca_certs"):
        connection_options("rediss://host?socket_timeout=1")


def test_a_tls_option_without_tls_is_refused() -> None:
    with pytest.raises(ServerUrlInvalid, match="only rediss:// has TLS"):
        connection_options("redis://host?ssl_ca_certs=ca.pem")


@pytest.mark.parametrize(
    ("query", "certificate", "host"),
    [
        ("", ssl.CERT_REQUIRED, True),
        ("ssl_cert_reqs=required", ssl.CERT_REQUIRED, True),
        ("ssl_check_hostname=false", ssl.CERT_REQUIRED, False),
        ("ssl_cert_reqs=none", ssl.CERT_NONE, False),
    ],
)
def test_certificate_and_host_name_are_checked_unless_asked_not_to(
    query: str, certificate: ssl.VerifyMode, *, host: bool
) -> None:
    context = connection_options(f"rediss://host?{query}")["tls_context"]
    assert (context.verify_mode, context.check_hostname) == (certificate, host)


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("ssl_cert_reqs=maybe", "one of required, none"),
        ("ssl_check_hostname=perhaps", "true or false"),
        ("ssl_cert_reqs=none&ssl_check_hostname=true", "certificate that is not"),
        ("ssl_certfile=/client.pem", "needs both"),
        ("ssl_keyfile=/client.key", "needs both"),
    ],
)
def test_tls_options_that_make_no_sense_are_refused(query: str, said: str) -> None:
    with pytest.raises(ServerUrlInvalid, match=said):
        connection_options(f"rediss://host?{query}")


def test_certificate_files_are_looked_at_before_anything_connects(tmp_path: Path) -> None:
    certificates = write_certificates(tmp_path, "host")
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("no certificate")
    with pytest.raises(ServerUrlInvalid, match=r"ssl_ca_certs=/nowhere\.pem: No such file"):
        connection_options("rediss://host?ssl_ca_certs=/nowhere.pem")
    with pytest.raises(ServerUrlInvalid, match=r"nonsense\.pem: not PEM"):
        connection_options(f"rediss://host?ssl_ca_certs={nonsense}")
    with pytest.raises(ServerUrlInvalid, match="not a pair"):
        connection_options(f"rediss://host?ssl_certfile={certificates.client}&ssl_keyfile={certificates.server_key}")
    connection_options(f"rediss://host?ssl_certfile={certificates.client}&ssl_keyfile={certificates.client_key}")


def test_an_encrypted_key_is_refused_rather_than_asked_for_on_the_terminal(tmp_path: Path) -> None:
    certificates = write_certificates(tmp_path, "host")
    encrypt(certificates.client_key)
    with pytest.raises(ServerUrlInvalid, match="encrypted"):
        connection_options(f"rediss://host?ssl_certfile={certificates.client}&ssl_keyfile={certificates.client_key}")


def encrypt(key: Path) -> None:
    loaded = serialization.load_pem_private_key(key.read_bytes(), None)
    key.write_bytes(
        loaded.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"word"),
        )
    )
