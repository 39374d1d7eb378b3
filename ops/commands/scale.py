"""`sluice scale`: more or fewer processes of a stage, while `sluice up` runs."""

import json
from collections.abc import Sequence
from typing import Annotated

import typer

from ops.commands.common import EXIT_FAILED, complain, execute
from ops.control.client import ask_scale, ask_status, not_up
from ops.control.messages import MAX_WAIT_S
from ops.supervision.slot_status import SlotStatus
from pipeline.errors import InvalidRequest
from pipeline.settings import load_settings

EXAMPLES = """\b
Examples:
  sluice scale                       how many there are
  sluice scale decode=3
  sluice scale prefill=2 decode=1 --json
"""


def scale(
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="[STAGE=N]...", help="How many processes of a stage; the others stay as they are."),
    ] = None,
    *,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=1, max=MAX_WAIT_S, metavar="S", help="Seconds to wait for the change.")
    ] = 120,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Change how many processes the stages of the running `sluice up` have, or see how many there are.

    Requests go on meanwhile: of fewer processes, those that leave finish or hand back what they have. The command
    ends when the new ones are ready and the others gone; a change that takes longer than --timeout goes on without it.
    """
    execute(_scale(changes or (), timeout_s, as_json=as_json))


async def _scale(changes: Sequence[str], timeout_s: float, *, as_json: bool) -> int:
    home = load_settings().home
    replicas = read_changes(changes)
    slots = await ask_scale(home, replicas, timeout_s) if replicas else await ask_status(home)
    if slots is None:
        raise not_up(home)
    print(json.dumps(summary(slots)) if as_json else table(slots))
    pending = [slot for slot in slots if slot.stage in replicas and not slot.ready]
    if not pending:
        return 0
    complain(f"after {timeout_s:g} s, {_in_words(pending)}; it goes on, and `sluice scale` shows how far it is")
    return EXIT_FAILED


def read_changes(words: Sequence[str]) -> dict[str, int]:
    """Return the numbers of `stage=number` words.

    Raises:
        InvalidRequest: one is something else, or a stage is there twice.
    """
    replicas: dict[str, int] = {}
    for word in words:
        stage, _, number = word.partition("=")
        if not stage or not number.isascii() or not number.isdigit() or len(number) > 6:
            raise InvalidRequest(word, "is not STAGE=N, such as decode=2")
        if stage in replicas:
            raise InvalidRequest(stage, "is there twice")
        replicas[stage] = int(number)
    return replicas


def summary(slots: Sequence[SlotStatus]) -> dict[str, object]:
    """Return what --json prints: processes wanted and ready by stage, and those that are neither ready nor gone."""
    staying = _by_stage(slots)
    return {
        "replicas": {stage: len(some) for stage, some in staying.items()},
        "ready": {stage: sum(slot.ready for slot in some) for stage, some in staying.items()},
        "pending": [{"name": slot.name, "state": slot.state} for slot in slots if not slot.ready],
    }


def table(slots: Sequence[SlotStatus]) -> str:
    """Return a line for each stage: how many processes it has, and what is on its way."""
    lines: list[str] = []
    for stage, staying in _by_stage(slots).items():
        pending = [slot for slot in slots if slot.stage == stage and not slot.ready]
        lines.append(f"{stage:<12}{len(staying):>3}  {_in_words(pending)}".rstrip())
    return "\n".join(lines) or "starting"


def _by_stage(slots: Sequence[SlotStatus]) -> dict[str, list[SlotStatus]]:
    """Those that were not told to leave, for each stage in the order of the Procfile."""
    staying: dict[str, list[SlotStatus]] = {slot.stage: [] for slot in slots}
    for slot in slots:
        if slot.state != "stopping":
            staying[slot.stage].append(slot)
    return staying


def _in_words(pending: Sequence[SlotStatus]) -> str:
    return ", ".join(f"{slot.name} is {slot.state.replace('_', ' ')}" for slot in pending)
