"""Runs a module on a wall clock that jumps by an hour and back: `python -m ops.chaos.other_clock MODULE`.

Owns this process's idea of the time of day. Its monotonic clock stays as it is, as on a machine whose clock is set.
Knows nothing about the module.
"""

import runpy
import sys
import time

JUMP_S = 3600.0
EVERY_S = 1.5

_real_ns = time.time_ns
_started_at = time.monotonic()


def jumping_ns() -> int:
    """Return the time of day, which is an hour ahead, right, or an hour behind, in turn."""
    turn = int((time.monotonic() - _started_at) / EVERY_S) % 3
    return _real_ns() + round((1 - turn) * JUMP_S * 1e9)


def jumping() -> float:
    """Return the same in seconds."""
    return jumping_ns() / 1e9


if __name__ == "__main__":
    time.time_ns, time.time = jumping_ns, jumping
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
