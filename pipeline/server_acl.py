"""What a server's user must be allowed, how to find out at the start, and the rule that gives it.

Owns the rule and the commands behind it. Knows nothing about logging in. Asking costs one call and leaves
nothing behind, not even an entry in the server's ACL log: the server only says what it would allow.
"""

from collections.abc import Mapping, Sequence
from typing import cast

from redis.exceptions import NoPermissionError

from pipeline.errors import ServerError, ServerPermission
from pipeline.redis_calls import RedisCalls
from pipeline.server_problems import caused_by
from pipeline.server_url import ServerAddress

# By category, so that a new command of ours needs no new rule on anybody's server. The order matters: what is
# dangerous goes (KEYS, FLUSHALL, SORT...), then INFO, which counts as dangerous, comes back.
RULE = (
    "~{namespace}:* ~arq:*:{namespace}:* ~arq:abort +@read +@write +@connection +@transaction"
    " -@dangerous -function +eval +evalsha +info +time"
)
"""What ACL SETUSER needs besides a name and a password; docs/redis.md explains each part."""

NEEDED: Mapping[str, tuple[str, ...]] = {
    "{namespace}:*": (
        *("DEL KEY", "EXISTS KEY", "EXPIRE KEY 1", "PERSIST KEY", "PEXPIRE KEY 1", "PTTL KEY"),
        *("GET KEY", "MGET KEY", "PSETEX KEY 1 v", "SET KEY v PX 1"),
        *("HDEL KEY f", "HEXISTS KEY f", "HGET KEY f", "HGETALL KEY", "HINCRBY KEY f 1", "HLEN KEY", "HMGET KEY f"),
        *("HSCAN KEY 0", "HVALS KEY", "HSET KEY f v", "HSETNX KEY f v"),
        *("SADD KEY m", "SMEMBERS KEY", "SREM KEY m"),
        *("ZADD KEY 1 m", "ZCARD KEY", "ZRANGE KEY 0 1", "ZRANGEBYSCORE KEY 0 1", "ZREM KEY m"),
        *("ZREMRANGEBYSCORE KEY 0 1", "ZSCORE KEY m"),
        *("XACK KEY g 1-1", "XADD KEY * f v", "XAUTOCLAIM KEY g c 1 0-0", "XCLAIM KEY g c 1 1-1", "XDEL KEY 1-1"),
        *("XGROUP CREATE KEY g 0", "XGROUP DELCONSUMER KEY g c", "XINFO CONSUMERS KEY g", "XINFO GROUPS KEY"),
        *("XINFO STREAM KEY", "XLEN KEY"),
        *("XPENDING KEY g", "XRANGE KEY - +", "XREAD STREAMS KEY 0-0", "XREADGROUP GROUP g c STREAMS KEY >"),
        *("XREVRANGE KEY + -", "XTRIM KEY MAXLEN 0"),
    ),
    # What arq keeps for a job; see keys.py.
    "arq:*:{namespace}:*": (
        *("DEL KEY", "EXISTS KEY", "EXPIRE KEY 1", "GET KEY", "INCR KEY", "PSETEX KEY 1 v", "SETEX KEY 1 v"),
        *("SET KEY v PX 1", "WATCH KEY"),
    ),
    "arq:abort": ("ZRANGE KEY 0 1", "ZREM KEY m", "ZREMRANGEBYSCORE KEY 0 1"),
    "": ("DBSIZE", "DISCARD", "EVAL x 0", "EVALSHA x 0", "EXEC", "INFO", "MULTI", "PING", "SCAN 0", "TIME", "UNWATCH"),
}
"""Commands by the keys that they are for."""
NUM_NAMED = 3  # in a message; a user that may do nothing would get fifty


async def check_permissions(calls: RedisCalls, where: ServerAddress, namespace: str) -> None:
    """Raise ServerPermission unless the user may do everything that the pipeline and arq do."""
    asked = [(keys.format(namespace=namespace), command) for keys, commands in NEEDED.items() for command in commands]
    try:
        refused = await _refused(calls, [command.replace("KEY", keys.replace("*", "acl")) for keys, command in asked])
    except ServerError as error:
        if caused_by(error, NoPermissionError):
            raise lacking("EVAL and EVALSHA", where, namespace) from error
        raise
    if not refused:
        return
    keys = asked[refused[0]][0]
    of_keys = [command for other, command in asked if other == keys]
    names = [asked[place][1].split()[0] for place in refused if asked[place][0] == keys]
    if keys and len(names) == len(of_keys):
        raise lacking(f"any command on keys {keys}", where, namespace)
    more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    raise lacking(f"{', '.join(names[:NUM_NAMED])}{more}{f' on keys {keys}' if keys else ''}", where, namespace)


def lacking(what: str, where: ServerAddress, namespace: str) -> ServerPermission:
    """Return the error that says what the user may not run, and the rule that lets it."""
    rule = f"ACL SETUSER {where.user} {RULE.format(namespace=namespace)}"
    problem = f"user {where.user!r} may not run {what}; an administrator gives it all it needs with: {rule}"
    return ServerPermission(where.shown, problem)


async def may_run(calls: RedisCalls, command: str) -> bool:
    """Return whether the user may run this command."""
    return not await _refused(calls, [command])


async def _refused(calls: RedisCalls, commands: Sequence[str]) -> list[int]:
    places = cast("list[int]", await calls.script("permissions", [], commands))
    return [place - 1 for place in places]
