"""The part of a process's environment that its bits and its manners depend on, whoever starts the process.

Owns the variables that numba and OpenMP read once, while they are imported, and the rule that comes from it: set
them first, import the engine afterwards. Imports neither itself.

    NUMBA_CACHE_DIR   a directory per state of the kernels' sources (kernel_cache.py): numba's own place, beside the
                      sources, would go on serving kernels whose helpers have changed
    OMP_WAIT_POLICY   PASSIVE: idle threads of one stage must not spin on another one's core
"""

import io
import os
import sys
from pathlib import Path

from stages.engine.kernel_cache import kernel_cache

_READERS = ("numba", "torch")


def engine_environment(home: Path) -> dict[str, str]:
    """Return the variables for a process that computes."""
    return {"NUMBA_CACHE_DIR": str(kernel_cache(home)), "OMP_WAIT_POLICY": "PASSIVE"}


def prepare_process(home: Path) -> None:
    """Set this process's variables, and write its output line by line; call it before anything imports the engine."""
    too_early = [module for module in _READERS if module in sys.modules]
    assert not too_early, f"{', '.join(too_early)} came first, and read an environment that nobody had set"
    os.environ.update(engine_environment(home))
    if isinstance(sys.stdout, io.TextIOWrapper):  # what PYTHONUNBUFFERED would do, which is read even earlier
        sys.stdout.reconfigure(line_buffering=True)
