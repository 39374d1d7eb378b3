"""A connection with TLS whose certificates were loaded before, for all connections of a pool.

Owns nothing but the hand-over. The client library would load the system's certificates anew for each
connection, on the event loop: 80 ms, for which a stage could neither renew a lease nor read a reply.
"""

import ssl
from typing import Any

from redis.asyncio.connection import SSLConnection


class TlsConnection(SSLConnection):
    """A connection that uses a given context and reads no files."""

    def __init__(self, *, tls_context: ssl.SSLContext, **options: Any) -> None:
        super().__init__(**options)  # pyright: ignore[reportUnknownMemberType]
        self.ssl_context.context = tls_context
