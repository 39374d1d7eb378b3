"""Reads the address of a server: where it is, who logs in, which certificates; says what is wrong with it.

Owns the forms and options that SLUICE_REDIS_URL may have. Knows nothing about connections. No message holds
the user or the password, nor a piece of an address that may be one.

    redis://[user:password@]host[:port][/db]
    rediss://[user:password@]host[:port][/db][?ssl_ca_certs=FILE&ssl_certfile=FILE&ssl_keyfile=FILE...]
    unix://[user:password@]/absolute/path/of/the/socket[?db=N]
"""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from redis.asyncio.connection import parse_url

from pipeline.connections import SocketConnection, TcpConnection, TlsConnection
from pipeline.errors import ServerUrlInvalid

VARIABLE = "SLUICE_REDIS_URL"
SCHEMES = ("redis", "rediss", "unix")
TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname")
CERT_REQS = ("required", "none")
"""Whether the server's certificate is checked; for a client, the library's `optional` is the same as `required`."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """What messages may say about an address: everything but the password."""

    shown: str
    """Without user, password and options."""
    scheme: str
    user: str
    """Who logs in; without a name it is the server's `default`."""

    @property
    def has_tls(self) -> bool:
        """Whether TLS is spoken there."""
        return self.scheme == "rediss"

    @property
    def is_socket(self) -> bool:
        """Whether it is a file rather than a host and a port."""
        return self.scheme == "unix"


def read_address(url: str) -> ServerAddress:
    """Return what there is to say about an address.

    Raises:
        ServerUrlInvalid: it cannot be read.
    """
    parts = _split(url)
    host = parts.hostname or ""
    host = f"[{host}]" if ":" in host else host
    port = f":{parts.port}" if parts.port is not None else ""
    shown = f"{parts.scheme}://{host}{port}{parts.path}"
    return ServerAddress(shown, parts.scheme, unquote(parts.username or "") or "default")


def connection_options(url: str) -> dict[str, Any]:
    """Return what the client needs to reach the server, with TLS that checks the certificate and its host name.

    Raises:
        ServerUrlInvalid: an option is unknown or wrong, or a certificate file cannot be used.
    """
    address = read_address(url).shown
    parts = _split(url)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    _check_query(address, parts.scheme, query)
    options: dict[str, Any] = dict(cast("Any", parse_url)(url))
    options["connection_class"] = SocketConnection if parts.scheme == "unix" else TcpConnection
    if parts.scheme != "unix":
        options["socket_keepalive"] = True
    if parts.scheme == "rediss":
        options = {name: value for name, value in options.items() if name not in TLS_OPTIONS}
        options |= {"connection_class": TlsConnection, "tls_context": _tls_context(address, query)}
    return options


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise _unreadable() from None
    if parts.scheme not in SCHEMES or not url[len(parts.scheme) :].startswith("://"):
        raise ServerUrlInvalid(VARIABLE, f"must start with {', '.join(f'{scheme}://' for scheme in SCHEMES)}")
    if parts.scheme == "unix":
        if parts.hostname or port is not None or (parts.netloc and "@" not in parts.netloc) or len(parts.path) < 2:
            raise ServerUrlInvalid(VARIABLE, "unix:// needs the absolute path of a socket, as in unix:///run/x.sock")
    elif "@" in parts.path or not parts.hostname:
        raise _unreadable()
    if "@" in parts.query or "#" in url:
        raise _unreadable()
    return parts


def _unreadable() -> ServerUrlInvalid:
    return ServerUrlInvalid(
        VARIABLE,
        "cannot be read: it needs a host and, if any, a port from 0 to 65535; special characters of user and password "
        "are written as %XX (/ is %2F, @ is %40, : is %3A, # is %23, ? is %3F, % is %25)",
    )


def _check_query(address: str, scheme: str, query: Mapping[str, str]) -> None:
    known = ("db", *TLS_OPTIONS) if scheme == "rediss" else ("db",)
    for name in query:
        if name not in known:
            where = " (only rediss:// has TLS)" if name in TLS_OPTIONS else ""
            raise ServerUrlInvalid(address, f"has the option {name!r}{where}; known are {', '.join(known)}")
    path = "" if scheme == "unix" else urlsplit(address).path.strip("/")
    for number in (path, query.get("db", "")):
        if number and not (number.isascii() and number.isdigit()):
            raise ServerUrlInvalid(address, f"names database {number!r}; it is a number, and 0 when there is none")
    if query.get("ssl_cert_reqs", "required") not in CERT_REQS:
        raise ServerUrlInvalid(address, f"has a wrong ssl_cert_reqs; it is one of {', '.join(CERT_REQS)}")
    if query.get("ssl_cert_reqs") == "none" and query.get("ssl_check_hostname", "false").lower() != "false":
        raise ServerUrlInvalid(address, "cannot check the host name (ssl_check_hostname) of a certificate that is not")
    if query.get("ssl_check_hostname", "true").lower() not in {"true", "false"}:
        raise ServerUrlInvalid(address, "has a wrong ssl_check_hostname; it is true or false")


def _tls_context(address: str, query: Mapping[str, str]) -> ssl.SSLContext:
    """Load the certificates now, so that a wrong file is told from a server that refuses a right one."""
    context = ssl.create_default_context()
    checked = query.get("ssl_cert_reqs") != "none"
    context.check_hostname = checked and query.get("ssl_check_hostname", "true").lower() == "true"
    context.verify_mode = ssl.CERT_REQUIRED if checked else ssl.CERT_NONE
    if authorities := query.get("ssl_ca_certs"):
        try:
            context.load_verify_locations(cafile=authorities)
        except OSError as error:  # ssl.SSLError is one
            raise ServerUrlInvalid(address, f"ssl_ca_certs={authorities}: {_reason(error)}") from None
    certificate, key = query.get("ssl_certfile"), query.get("ssl_keyfile")
    if (certificate is None) != (key is None):
        raise ServerUrlInvalid(address, "has one of ssl_certfile and ssl_keyfile; a client's certificate needs both")
    if certificate is not None and key is not None:
        try:
            context.load_cert_chain(certificate, key, password="")  # else it asks the terminal for one
        except OSError as error:
            problem = f"ssl_certfile={certificate}, ssl_keyfile={key}: {_reason(error)}"
            raise ServerUrlInvalid(address, problem) from None
    return context


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return f"not PEM, encrypted, or not a pair ({error.reason or error})"
    return error.strerror or str(error)
