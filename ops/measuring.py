"""What every measurement needs around it: an environment to compute in, and a record of what it depends on.

Owns the shape of a record's `measured_on` and how records are written. Knows nothing about what is measured,
and imports no numeric library: `prepare_environment` has to come before any of them.
"""

import json
import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pipeline.settings import Settings
from stages.common.environment import engine_environment
from stages.gguf.model_files import check_gguf, resolve

PACKAGES = ("sluice-llm", "torch", "numpy", "numba", "gguf", "tokenizers")


def prepare_environment(settings: Settings) -> None:
    """Set what torch and numba read from the environment while they are imported, as stages have it."""
    for name, value in engine_environment(settings.home).items():
        os.environ.setdefault(name, value)


def checked_model(settings: Settings) -> Path:
    """Return the model's file, if it can be served.

    Raises:
        UnknownModel: no such name.
        ModelFileError: the file is not there or of a kind that cannot be served.
    """
    path = resolve(settings.model, settings.home)
    check_gguf(path)
    return path


def measured_on() -> dict[str, object]:
    """Return machine, versions and date; nothing that names the machine or its user."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": _cpu_name(),
        "num_cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in PACKAGES},
    }


def write_record(path: Path, record: Mapping[str, object]) -> None:
    """Write a record where the last one was, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")
    temporary.replace(path)


def markdown_table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a table that reads well as text and as Markdown: first column to the left, figures to the right."""
    cells = [header, *rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    rule = ("-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:]))
    lines = [
        (row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)))
        for row in (header, rule, *rows)
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "from source"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
