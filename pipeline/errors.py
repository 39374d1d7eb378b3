"""Every error of the pipeline package, as one tree.

Owns the classes and what they carry. Knows nothing about how they are caught: each class says whether
trying the same thing again later can help (`retryable`) and has a stable name for machines (`code`).

    SluiceError
    ├── InvalidRequest          the user's mistake; names the field
    ├── SettingsError           a SLUICE_* variable is wrong or unknown
    ├── WireError               bytes that are not a message of ours
    ├── UnknownRequest          no state: never admitted, expired, or lost with the server's data
    ├── StateDamaged            the server's data contradict themselves
    ├── TransportClosed         whoever calls has closed the connection before
    └── ServerError             the Redis or Valkey server
        ├── ServerUrlInvalid    the address cannot be read
        ├── ServerUnreachable   no connection, or no answer in time      (retryable)
        ├── ServerFull          out of memory under noeviction           (retryable)
        ├── ServerRefused       the server answered with an error
        ├── ServerTlsFailed     certificates do not fit, or only one side speaks TLS
        ├── ServerLoginFailed   does not let us in: user, password, database or socket
        ├── ServerPermission    does not let the user do what we need; gives the ACL rule
        ├── ServerTooOld        lacks commands the scripts need
        ├── ServerPolicy        may throw our keys away
        └── ServerRole          a replica or a cluster's node
"""

from typing import ClassVar


class SluiceError(Exception):
    """Anything this package raises on purpose."""

    retryable: ClassVar[bool] = False
    code: ClassVar[str] = "internal_error"


class InvalidRequest(SluiceError):  # noqa: N818 - reads as the fact it states
    """A request that can never be served as it is; `field` is the name the user wrote."""

    code = "invalid_request"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class SettingsError(SluiceError):
    """A setting that stops the start; the message names the variable and what it allows."""

    code = "invalid_settings"


class WireError(SluiceError):
    """Bytes that are not a message of ours; `reason` is a word from a closed set, `detail` a sentence."""

    code = "unreadable_message"

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class UnknownRequest(SluiceError):  # noqa: N818
    """There is no state under this id, so nothing will ever be written for it."""

    code = "unknown_request"

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"request {request_id} is not known: never accepted, its results have expired, or the server lost its data"
        )
        self.request_id = request_id


class StateDamaged(SluiceError):  # noqa: N818
    """The server's data contradict themselves (a foreign key in our namespace, most likely).

    `outcomes` has, of several transactions, the word for each that was carried out or refused, None for a damaged one.
    """

    code = "state_damaged"

    def __init__(self, problems: tuple[str, ...], outcomes: tuple[str | None, ...] = ()) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems
        self.outcomes = outcomes


class TransportClosed(SluiceError):  # noqa: N818
    """Nothing more is sent through this transport: it was closed before the call, or while it waited."""

    code = "transport_closed"

    def __init__(self, address: str) -> None:
        super().__init__(f"{address}: this connection was closed; open another one")
        self.address = address


class ServerError(SluiceError):
    """The Redis or Valkey server cannot be used; `address` never holds a password."""

    code = "server_error"

    def __init__(self, address: str, problem: str) -> None:
        super().__init__(f"{address}: {problem}")
        self.address = address
        self.problem = problem


class ServerUrlInvalid(ServerError):  # noqa: N818
    """SLUICE_REDIS_URL cannot be read."""

    code = "server_url_invalid"


class ServerUnreachable(ServerError):  # noqa: N818
    """No connection, or no answer in time; what was asked may or may not have happened."""

    retryable = True
    code = "server_unreachable"


class ServerFull(ServerError):  # noqa: N818
    """The server is at its memory limit and refuses writes."""

    retryable = True
    code = "server_full"


class ServerRefused(ServerError):  # noqa: N818
    """The server answered with an error that we cannot act on."""

    code = "server_refused"


class ServerTlsFailed(ServerError):  # noqa: N818
    """Certificates do not fit, or only one side speaks TLS."""

    code = "server_tls_failed"


class ServerLoginFailed(ServerError):  # noqa: N818
    """The server does not let this process in; says whether user, password, database or socket is at fault."""

    code = "server_login_failed"


class ServerPermission(ServerError):  # noqa: N818
    """The server's user may not do what we need; says which rule gives it."""

    code = "server_permission"


class ServerTooOld(ServerError):  # noqa: N818
    """The server lacks commands that the scripts need."""

    code = "server_too_old"


class ServerPolicy(ServerError):  # noqa: N818
    """The server is set up to evict keys, which would silently lose requests."""

    code = "server_policy"


class ServerRole(ServerError):  # noqa: N818
    """The server is a read-only replica or a node of a cluster, and cannot do what the scripts do."""

    code = "server_role"
