"""The command line for tests: in this process, or as one of its own; both with the test's Procfile."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from structlog.testing import capture_logs
from typer.testing import CliRunner, Result

from ops.cli import app
from tests.ops.waiting import DEADLINE_S

COMMAND = """
import sys
from pathlib import Path
from ops import stack
from ops.cli import main

procfile = Path(sys.argv.pop(1))
stack.default_procfile = lambda: procfile
main()
"""


def sluice(*words: object, text: str | None = None) -> Result:
    """Run a command line in this process, with the environment that this process has."""
    with capture_logs():
        return CliRunner().invoke(app, [str(word) for word in words], input=text)


@asynccontextmanager
async def sluice_process(procfile: Path, *words: object) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a command line as a process of its own."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", COMMAND, str(procfile), *map(str, words)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def line_with(stream: asyncio.StreamReader | None, text: str) -> str:
    """Return the next line that has this text in it; fail when none comes."""
    assert stream is not None
    async with asyncio.timeout(DEADLINE_S):
        while (line := (await stream.readline()).decode()) and text not in line:
            pass
    assert text in line
    return line
