"""`sluice models`: fetches model files and lists them."""

import json
import sys
from typing import Annotated

import typer

from ops.commands.common import execute
from ops.downloads.models import pull
from pipeline.settings import load_settings
from stages.gguf.model_files import list_models

app = typer.Typer(no_args_is_help=True, help="Fetch model files, and see which are there.")


@app.command("pull")
def pull_command(
    name: Annotated[str | None, typer.Argument(help="Which model. [default: SLUICE_MODEL]")] = None,
) -> None:
    """Fetch a model, verify it and put it under the home; does nothing when it is there.

    Safe to interrupt and to repeat.
    """
    execute(_pull(name))


@app.command("list")
def list_command(*, as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False) -> None:
    """List the models that have a name here, and whether their files are there."""
    execute(_list(as_json=as_json))


async def _pull(name: str | None) -> int:
    settings = load_settings()
    pull(name or settings.model, settings.home, lambda line: print(line, file=sys.stderr))
    return 0


async def _list(*, as_json: bool) -> int:
    entries = list_models(load_settings().home)
    if as_json:
        rows = [
            {"name": entry.name, "state": entry.state, "size_bytes": entry.size_bytes, "path": str(entry.path)}
            for entry in entries
        ]
        print(json.dumps(rows, indent=2))
        return 0
    for entry in entries:
        print(f"{entry.name:<28} {entry.state:<8} {entry.size_bytes / 1e6:7.1f} MB  {entry.path}")
    return 0
