"""Procfiles in which stages are started by something that changes them first.

Owns the lines. Knows nothing about what the launchers do.
"""

import shlex
import sys
from collections.abc import Collection
from pathlib import Path
from types import ModuleType

from ops.supervision.procfile import default_procfile, read_procfile


def write_procfile(path: Path, launcher: ModuleType, stages: Collection[str] | None = None) -> Path:
    """Write the project's Procfile with some stages, by default all, started by a launcher; it runs a module."""
    lines: list[str] = []
    for line in read_procfile(default_procfile()):
        command = line.command
        if stages is None or line.stage in stages:
            # -m: a stage finds the packages from where it is started, as it does without a launcher.
            command = (sys.executable, "-m", launcher.__name__, line.command[-1])
        lines.append(f"{line.stage}: {shlex.join(command)}")
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path
