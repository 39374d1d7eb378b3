"""The Procfile: which processes there are, and the command of each.

Owns the format, that of foreman and honcho: one `name: command` a line, `#` comments, no shell. Knows
nothing about how many of each run, or how.
"""

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pipeline.errors import SluiceError

_LINE = re.compile(r"(?P<name>[a-z][a-z0-9_]*):\s*(?P<command>\S.*)")


class ProcfileError(SluiceError):
    """The Procfile is missing, or a line of it cannot be understood."""

    retryable: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class ProcfileLine:
    """One kind of process: the stage's name and its command."""

    stage: str
    command: tuple[str, ...]


def default_procfile() -> Path:
    """Return the project's Procfile: beside the packages in a checkout, inside this one when installed."""
    package = Path(__file__).parents[1]  # ops
    installed = package / "Procfile"
    return installed if installed.is_file() else package.parent / "Procfile"


def read_procfile(path: Path) -> list[ProcfileLine]:
    """Return the lines in their order; `python` becomes the interpreter that runs this.

    Raises:
        ProcfileError: with the file and line number.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise ProcfileError(f"{path}: cannot be read: {error.strerror}") from error
    lines: dict[str, ProcfileLine] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            entry = _parse(line)
        except ValueError as error:
            raise ProcfileError(f"{path}:{number}: {error}") from error
        if entry.stage in lines:
            raise ProcfileError(f"{path}:{number}: {entry.stage} is there twice")
        lines[entry.stage] = entry
    if not lines:
        raise ProcfileError(f"{path}: names no process")
    return list(lines.values())


def _parse(line: str) -> ProcfileLine:
    match = _LINE.fullmatch(line.strip())
    if match is None:
        raise ValueError("not `name: command`")
    words = shlex.split(match["command"])
    if words[0] in {"python", "python3"}:
        words[0] = sys.executable
    return ProcfileLine(match["name"], tuple(words))
