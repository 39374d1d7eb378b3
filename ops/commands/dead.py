"""`sluice dead`: what no stage could process - to look at, to try again, or to throw away.

Owns what is said about a replay. Knows nothing about how it is done (pipeline/dead_letters.py), or how a letter looks
(ops/letters.py).
"""

import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated

import typer

from ops.commands.common import EXIT_FAILED, complain, execute, output_console
from ops.finding import find_stack
from ops.letters import facts, printable, prompt_text, record, summary, table
from pipeline.connect import open_client
from pipeline.dead_letters import DeadLetters, LetterId, Replay, ReplayOutcome
from pipeline.errors import InvalidRequest
from pipeline.keys import ADMIT_RETRY_S, STAGES, Keys
from pipeline.server_check import check_server
from pipeline.server_url import read_address
from pipeline.settings import Settings, load_settings

HELP = """
Look at dead letters, and replay or drop them.

A message that a stage cannot process - it crashed everyone who had it, or cannot be read - is taken out of the queue
and kept, for a week after the last one; its request has failed. A request that failed for a reason of its own, such as
a prompt that is too long, leaves no letter.
"""
EXAMPLES = """\b
Examples:
  sluice dead list --stage decode
  sluice dead show decode:1764470000000-0
  sluice dead replay decode:1764470000000-0     after the cause is mended
  sluice dead replay --all --stage decode
  sluice dead drop --all
"""
REPLAY_EXAMPLES = """\b
Examples:
  sluice dead replay decode:1764470000000-0 && sluice tail req_3f9...
  sluice dead replay --all --stage prefill
"""
DROP_EXAMPLES = """\b
Examples:
  sluice dead drop compressor:1764470000000-0
  sluice dead drop --all
"""

LIMIT = 50
NONE = "There are no dead letters."
WORDS: dict[ReplayOutcome, str] = {
    "replayed": "replayed: request {request_id} runs again, as attempt {attempt}",
    "unknown": "unknown: replayed or dropped before, expired, or never there",
    "unreadable": "not replayed: its bytes cannot be read; send the request again and drop the letter",
    "chunk": "not replayed: it is one chunk of request {request_id}; send the request again and drop the letter",
    "exhausted": "not replayed: there is no larger attempt; send the request again under another id",
    "running": "not replayed: request {request_id} is running; `sluice tail` follows it, `sluice cancel` ends it",
    "superseded": "not replayed: request {request_id} was sent again since then, and that has ended; drop the letter",
    "uncollected": "not replayed: the batch of request {request_id} has yet to collect the failure; try again soon",
    "busy": f"not replayed: the queue or the server's memory is full; try again in {ADMIT_RETRY_S:g} s",
}

Letters = Annotated[
    list[str] | None, typer.Argument(metavar="LETTER", help="As `sluice dead list` shows them: STAGE:ENTRY.")
]
All = Annotated[bool, typer.Option("--all", help="All letters, oldest first, instead of some.")]
StageOption = Annotated[
    str | None, typer.Option("--stage", metavar="STAGE", help=f"Only letters of one stage: {', '.join(STAGES)}.")
]

app = typer.Typer(no_args_is_help=True, help=HELP, epilog=EXAMPLES)


@app.command("list")
def list_command(
    *,
    stage: StageOption = None,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Only the last N.")] = LIMIT,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False,
) -> None:
    """List the last dead letters, newest last.

    When each was written, how often it had been tried, which request it belongs to, and why it could not be processed.
    """
    execute(_list(stage, limit, as_json=as_json))


@app.command("show")
def show_command(
    letter: Annotated[str, typer.Argument(metavar="LETTER", help="As `sluice dead list` shows it: STAGE:ENTRY.")],
    *,
    prompt: Annotated[bool, typer.Option("--prompt", help="Also the prompt: its text, or its token ids.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Show one dead letter, without its prompt.

    Exit code 0: it is there; 1: it is not, or not any more.
    """
    execute(_show(letter, prompt=prompt, as_json=as_json))


@app.command("replay", epilog=REPLAY_EXAMPLES)
def replay_command(letters: Letters = None, *, everything: All = False, stage: StageOption = None) -> None:
    """Run the requests of dead letters again, each under its own id.

    The old results, which end with the failure, go, and so does the letter; `sluice tail ID` follows the new ones. The
    seed is the old one, so the text is what it would have been. A line of a batch runs as a request of its own: the
    batch has the failure already. Exit code 0: all were replayed; 1: one was not, and its line says why.
    """
    execute(_replay(letters or (), stage, everything=everything))


@app.command("drop", epilog=DROP_EXAMPLES)
def drop_command(letters: Letters = None, *, everything: All = False, stage: StageOption = None) -> None:
    """Delete dead letters, without asking.

    Exit code 0: they are gone; 1: one was not there.
    """
    execute(_drop(letters or (), stage, everything=everything))


@asynccontextmanager
async def _dead_letters() -> AsyncIterator[tuple[DeadLetters, Settings]]:
    """The letters of the running stack, and its settings."""
    settings = (await find_stack(load_settings())).settings
    where = read_address(settings.redis_url or "")
    client = open_client(settings)
    try:
        strict = settings.durability == "strict"
        await check_server(client, where, settings.namespace, strict=strict)
        yield DeadLetters(client, where.shown, Keys(settings.namespace), strict=strict), settings
    finally:
        await client.aclose()


async def _list(stage: str | None, limit: int, *, as_json: bool) -> int:
    stages = _stages(stage)
    async with _dead_letters() as (dead, _):
        letters, num = await dead.recent(stages, limit), await dead.count(stages)
    if as_json:
        print(json.dumps([summary(letter) for letter in letters], indent=2))
    elif not letters:
        print(NONE if stage is None else f"There are no dead letters of {stage}.")
    else:
        print(table(letters, output_console().width))
    if num > len(letters):
        print(f"the last {len(letters)} of {num}; --limit shows more", file=sys.stderr)
    return 0


async def _show(name: str, *, prompt: bool, as_json: bool) -> int:
    letter_id = LetterId.parse(name)
    async with _dead_letters() as (dead, _):
        opened = await dead.read(letter_id)
        request_id = None if opened is None else opened.letter.request_id
        state = None if request_id is None else await dead.request_state(request_id)
    if opened is None:
        complain(f"{letter_id} is {WORDS['unknown']}")
        return EXIT_FAILED
    if as_json:
        print(json.dumps(record(opened, state, prompt=prompt), indent=2))
        return 0
    print(facts(opened, state))
    if prompt:
        print(f"\n{prompt_text(opened.message)}")
    return 0


async def _replay(letters: Sequence[str], stage: str | None, *, everything: bool) -> int:
    named = _named(letters, stage, everything=everything)
    async with _dead_letters() as (dead, settings):
        ids = [letter.id for letter in await dead.recent(_stages(stage))] if named is None else named
        replays: list[Replay] = []
        for letter_id in ids:
            replays.append(await dead.replay(letter_id, settings.max_queue))
            print(f"{letter_id} {_in_words(replays[-1])}", flush=True)
    if not ids:
        print(NONE)
    if any(replay.outcome == "replayed" for replay in replays):
        print("`sluice tail ID` follows a request", file=sys.stderr)
    return 0 if all(replay.outcome == "replayed" for replay in replays) else EXIT_FAILED


async def _drop(letters: Sequence[str], stage: str | None, *, everything: bool) -> int:
    named = _named(letters, stage, everything=everything)
    async with _dead_letters() as (dead, _):
        if named is None:
            print(f"{await dead.drop_all(_stages(stage))} dropped")
            return 0
        missing = [letter_id for letter_id in named if not await dead.drop(letter_id)]
    for letter_id in missing:
        print(f"{letter_id} {WORDS['unknown']}")
    print(f"{len(named) - len(missing)} dropped")
    return EXIT_FAILED if missing else 0


def _stages(stage: str | None) -> Sequence[str]:
    if stage is None:
        return STAGES
    if stage not in STAGES:
        raise InvalidRequest("--stage", f"is {stage[:60]!r}; there are {', '.join(STAGES)}")
    return (stage,)


def _named(letters: Sequence[str], stage: str | None, *, everything: bool) -> list[LetterId] | None:
    """The letters that a command line names, each once; None for all of them."""
    if bool(letters) == everything:
        raise InvalidRequest("letters", "give either letters, or --all")
    if letters and stage is not None:
        raise InvalidRequest("--stage", "goes with --all; a letter's name says its stage")
    return None if everything else list(dict.fromkeys(map(LetterId.parse, letters)))


def _in_words(replay: Replay) -> str:
    return WORDS[replay.outcome].format(request_id=printable(replay.request_id), attempt=replay.attempt)
