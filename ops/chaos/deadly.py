"""Runs a stage that has a bug: one request's messages end whatever process reads them. `-m ops.chaos.deadly MODULE`.

Owns the bug. Knows nothing about the stage, which unpacks a message before it works on it.
"""

import os
import runpy
import signal
import sys

from pydantic import BaseModel

from pipeline import wire

DEADLY = "deadly-"
"""How the ids of such requests begin."""

_unpack = wire.unpack


def unpack_or_die(data: bytes, message_type: type[BaseModel]) -> BaseModel:
    """Do as wire.unpack does, but for one kind of request."""
    message = _unpack(data, message_type)
    if str(getattr(message, "request_id", "")).startswith(DEADLY):
        os.kill(os.getpid(), signal.SIGKILL)
    return message


if __name__ == "__main__":
    wire.unpack = unpack_or_die  # pyright: ignore[reportAttributeAccessIssue] - of one type less
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
