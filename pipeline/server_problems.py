"""Why the first call to a server failed, in a sentence that says what to set.

Owns the reading of foreign errors: Python's ssl and sockets, and what servers answer to a login. Knows
nothing about calls that come later: those are repeated, not explained.
"""

import errno
import socket
import ssl
from collections.abc import Iterator

from redis import exceptions as redis_errors

from pipeline.errors import ServerError, ServerLoginFailed, ServerTlsFailed, ServerUnreachable
from pipeline.redis_calls import ANSWER_TIMEOUT_S
from pipeline.server_url import ServerAddress

# OpenSSL's X509_V_ERR_*: expired and not yet valid; signed by itself or by nobody we know; for another host.
_DATES = {9, 10}
_UNKNOWN_AUTHORITY = {18, 19, 20, 21}
_OTHER_HOST = {62, 64}
_NOBODY = {
    errno.ENOENT: "there is no such socket; the server does not run, or has another `unixsocket`",
    errno.ECONNREFUSED: "nobody listens there; does the server run?",
}
_HUNG_UP = {
    "redis": "hung up; a port with TLS does so, write rediss:// for one",
    "rediss": "hung up; it may want a client's certificate: ?ssl_certfile=FILE&ssl_keyfile=FILE",
    "unix": "hung up",
}


def explained(error: ServerError, where: ServerAddress) -> ServerError:
    """Return the error that says more than this one, or this one where there is nothing to add."""
    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, ssl.SSLError) and not isinstance(cause, ssl.SSLEOFError):
            return ServerTlsFailed(where.shown, _tls_problem(cause))
        if isinstance(cause, redis_errors.AuthenticationError):
            return ServerLoginFailed(where.shown, _login_problem(str(cause), where))
        if isinstance(cause, redis_errors.ResponseError) and "DB index" in str(cause):
            problem = "has no database of that number; see `databases` in its configuration, or leave the number out"
            return ServerLoginFailed(where.shown, problem)
        if isinstance(cause, PermissionError) and where.is_socket:
            problem = "this user may not open the socket; see `unixsocketperm` and the owner of the file"
            return ServerLoginFailed(where.shown, problem)
    for cause in causes:
        if problem := _network_problem(cause, where):
            return ServerUnreachable(where.shown, problem)
    return error


def caused_by(error: BaseException, kind: type[BaseException]) -> bool:
    """Return whether such an error is behind this one, however often it was wrapped."""
    return any(isinstance(cause, kind) for cause in _causes(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    next_one = error.__cause__ or error.__context__
    while next_one is not None:
        yield next_one
        next_one = next_one.__cause__ or next_one.__context__


def _tls_problem(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return _certificate_problem(error.verify_code, error.verify_message.rstrip("."))
    reason = (error.reason or str(error)).replace("_", " ").lower()
    if "certificate required" in reason or "handshake failure" in reason:
        return "wants a client's certificate; set ?ssl_certfile=FILE&ssl_keyfile=FILE"
    if "alert" in reason and ("ca" in reason.split() or "certificate" in reason):
        return f"refuses the client's certificate ({reason}); ssl_certfile must be signed by its tls-ca-cert-file"
    if "wrong version" in reason or "record layer" in reason:
        return "does not speak TLS; write redis:// for a port without it"
    return f"TLS failed ({reason})"


def _certificate_problem(code: int, said: str) -> str:
    if code in _UNKNOWN_AUTHORITY:
        return f"its certificate is not trusted ({said}); set ?ssl_ca_certs=FILE to the certificate of who signed it"
    if code in _OTHER_HOST:
        return f"its certificate is for another host ({said}); write the name that is in the certificate"
    if code in _DATES:
        return f"its certificate is out of date, or this machine's clock is ({said})"
    return f"its certificate is refused ({said})"


def _login_problem(said: str, where: ServerAddress) -> str:
    if "required" in said:
        return "wants a password; write it into SLUICE_REDIS_URL: SCHEME://USER:PASSWORD@..."
    if "without any password configured" in said:
        return "has no password for user 'default', but SLUICE_REDIS_URL gives one; leave it out, or name the user"
    return (
        f"refuses user {where.user!r} with this password; either is wrong in SLUICE_REDIS_URL, or the user is `off` "
        "(special characters are written as %XX)"
    )


def _network_problem(cause: BaseException, where: ServerAddress) -> str | None:
    if isinstance(cause, TimeoutError | redis_errors.TimeoutError):
        hint = "; a port without TLS never answers to rediss://, write redis:// for one" if where.has_tls else ""
        return f"no answer within {ANSWER_TIMEOUT_S:g} s{hint}"
    if isinstance(cause, ConnectionResetError | BrokenPipeError | ssl.SSLEOFError) or "closed by server" in str(cause):
        return _HUNG_UP[where.scheme]
    if isinstance(cause, socket.gaierror):
        return f"the host's name is not known ({cause.strerror})"
    if isinstance(cause, OSError) and cause.errno is not None:
        known = _NOBODY.get(cause.errno)
        return known or f"cannot be reached ({errno.errorcode.get(cause.errno, cause.errno)}: {cause.strerror})"
    return None
