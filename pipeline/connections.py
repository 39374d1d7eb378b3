"""The client library's connections, with what it leaves to be done: packing in C, and certificates read once.

Owns how a command becomes bytes. Knows nothing about addresses or retries.
"""

import ssl
from typing import Any, cast

import hiredis
from redis.asyncio.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.exceptions import DataError
from redis.typing import EncodableT


class _Packing:
    """Packs commands with hiredis, as the library does where it is not asynchronous.

    A step of decode is one command of some 250 arguments; packed in Python, that is a third of what sending it takes.
    """

    def pack_command(self, *args: EncodableT) -> list[bytes]:
        """Return a command in the server's protocol; a name of two words becomes two arguments.

        Raises:
            DataError: an argument is of a type that the protocol has not.
        """
        name, *rest = args
        words = name.encode().split() if isinstance(name, str) else [name]
        try:
            return [cast("Any", hiredis).pack_command((*words, *rest))]
        except TypeError as error:
            raise DataError(str(error)) from error


class TcpConnection(_Packing, Connection):
    """A connection to a host and port."""


class SocketConnection(_Packing, UnixDomainSocketConnection):
    """A connection through a file."""


class TlsConnection(_Packing, SSLConnection):
    """A connection with TLS that uses a given context and reads no files.

    The library would load the system's certificates anew for each connection, on the event loop: 80 ms, for which a
    stage could neither renew a lease nor read a reply.
    """

    def __init__(self, *, tls_context: ssl.SSLContext, **options: Any) -> None:
        super().__init__(**options)  # pyright: ignore[reportUnknownMemberType]
        self.ssl_context.context = tls_context
