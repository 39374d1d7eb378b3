"""The command `sluice`.

Owns the list of commands and what `sluice --help` says first. Knows nothing about what they do.
"""

from importlib.metadata import version as version_of
from typing import Annotated

import typer

from ops.commands import dead, models
from ops.commands.cancel import EXAMPLES as CANCEL_EXAMPLES
from ops.commands.cancel import cancel
from ops.commands.chaos import EXAMPLES as CHAOS_EXAMPLES
from ops.commands.chaos import chaos
from ops.commands.enqueue import EXAMPLES as ENQUEUE_EXAMPLES
from ops.commands.enqueue import enqueue
from ops.commands.generate import EXAMPLES as GENERATE_EXAMPLES
from ops.commands.generate import generate
from ops.commands.run import EXAMPLES as RUN_EXAMPLES
from ops.commands.run import run
from ops.commands.scale import EXAMPLES as SCALE_EXAMPLES
from ops.commands.scale import scale
from ops.commands.status import EXAMPLES as STATUS_EXAMPLES
from ops.commands.status import status
from ops.commands.tail import EXAMPLES as TAIL_EXAMPLES
from ops.commands.tail import tail
from ops.commands.top import top
from ops.commands.trace import EXAMPLES as TRACE_EXAMPLES
from ops.commands.trace import trace
from ops.commands.up import up

HELP = """
LLM inference as a pipeline of processes that talk through Redis streams.

\b
First:        sluice models pull
One answer:   sluice generate "Why is the sky blue?"
A file:       sluice run -i examples/prompts.jsonl -o results.jsonl
Keep it up:   sluice up            (run and generate then start at once)
Step by step: ID=$(sluice enqueue "Tell me a story."), sluice tail $ID, sluice cancel $ID

Settings are SLUICE_* variables, such as SLUICE_HOME (default ~/.sluice) or
SLUICE_REDIS_URL (default: a server of its own).
"""


def _print_version(wanted: bool) -> None:  # noqa: FBT001 - typer calls it so
    if wanted:
        print(f"sluice {version_of('sluice-llm')}")
        raise typer.Exit


app = typer.Typer(
    name="sluice",
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a traceback with local variables could show prompts
    rich_markup_mode=None,  # plain text keeps the examples as they are
)
app.command(epilog=RUN_EXAMPLES)(run)
app.command(epilog=GENERATE_EXAMPLES)(generate)
app.command()(up)
app.command(epilog=ENQUEUE_EXAMPLES)(enqueue)
app.command(epilog=TAIL_EXAMPLES)(tail)
app.command(epilog=CANCEL_EXAMPLES)(cancel)
app.command(epilog=SCALE_EXAMPLES)(scale)
app.command(epilog=STATUS_EXAMPLES)(status)
app.command()(top)
app.command(epilog=TRACE_EXAMPLES)(trace)
app.add_typer(dead.app, name="dead")
app.command(epilog=CHAOS_EXAMPLES)(chaos)
app.add_typer(models.app, name="models")


@app.callback()
def everywhere(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Take what may stand before any command."""


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
