"""Dead letters as people and scripts read them.

Owns wording and layout. Knows nothing about where letters are. A prompt is shown only to whoever asks for it.
"""

import json
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from pipeline.batch.record import is_batch_id
from pipeline.dead_letters import Letter, OpenLetter
from pipeline.messages import GenerateRequest, PrefilledPrompt, RawChunk, TokenizedPrompt, WorkItem

MIN_REASON_CHARS = 20
COLUMNS = ("letter", "when", "delivered", "request", "reason")
CONTENTS = frozenset(
    {"kind", "priority", "model", "params", "max_tokens", "speculate", "chunk_index", "start_token", "stamps"}
)
PROMPTS = frozenset({"prompt", "messages", "prompt_token_ids"})

_LINE = re.compile(r"(?P<batch>[^-]+)-(?P<index>[0-9]{1,9})")


def table(letters: Sequence[Letter], width: int) -> str:
    """Return a line for each letter, with the reason cut to what the width leaves."""
    rows = [COLUMNS, *map(_row, letters)]
    *widths, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    room = max(width - sum(widths) - 2 * len(widths), MIN_REASON_CHARS)
    lines: list[str] = []
    for *cells, reason in rows:
        padded = [cell.ljust(cell_width) for cell, cell_width in zip(cells, widths, strict=True)]
        shown = reason if len(reason) <= room else f"{reason[: room - 3]}..."
        lines.append("  ".join((*padded, shown)))
    return "\n".join(lines)


def facts(opened: OpenLetter, state: str | None) -> str:
    """Return a line for each thing that is known of a letter, but for its prompt.

    Args:
        opened: The letter.
        state: That its request is in now; None where it is not known any more.
    """
    return "\n".join(f"{name:<11}{printable(text)}".rstrip() for name, text in _facts(opened, state))


def summary(letter: Letter) -> dict[str, object]:
    """Return for a script what is known of a letter without its message."""
    return {
        "letter": str(letter.id),
        "stage": letter.id.stage,
        "at_ms": letter.id.at_ms,
        "tries": letter.tries,
        "request_id": letter.request_id,
        "attempt": letter.attempt,
        "reason": letter.reason,
        "stream": letter.stream,
        "entry": letter.entry,
        "num_bytes": letter.num_bytes,
    }


def record(opened: OpenLetter, state: str | None, *, prompt: bool) -> dict[str, object]:
    """Return for a script all that is known of a letter; the prompt where it is asked for."""
    found = summary(opened.letter) | {"state": state, "problem": opened.problem}
    if (line := _line_of(opened.letter.request_id)) is not None:
        found |= {"batch": line[0], "line": line[1]}
    if opened.message is not None:
        fields = CONTENTS | PROMPTS if prompt else CONTENTS
        found |= opened.message.model_dump(mode="json", include=set(fields))
        found |= {f"num_prompt_{unit}": num for num, unit in _prompt_size(opened.message)}
    return found


def prompt_text(message: WorkItem | None) -> str:
    """Return the prompt of a message as it is: its text, its turns, or its token ids."""
    if isinstance(message, GenerateRequest):
        turns = (f"[{turn.role}]\n{turn.content}" for turn in message.messages or ())
        return "\n".join(turns) if message.prompt is None else message.prompt
    if isinstance(message, TokenizedPrompt | PrefilledPrompt):
        return " ".join(map(str, message.prompt_token_ids))
    return "(no prompt that could be shown)"


def printable(text: str | None) -> str:
    """Return a text as one line that cannot do anything to a terminal; - for none."""
    line = " ".join((text or "-").split())
    return "".join(character if character.isprintable() else "?" for character in line)


def _row(letter: Letter) -> tuple[str, str, str, str, str]:
    when = _when(letter).strftime("%m-%d %H:%M:%S")
    return str(letter.id), when, str(letter.tries), printable(letter.request_id), printable(letter.reason)


def _when(letter: Letter) -> datetime:
    return datetime.fromtimestamp(letter.id.at_ms / 1000, UTC).astimezone()


def _facts(opened: OpenLetter, state: str | None) -> Iterator[tuple[str, str]]:
    letter = opened.letter
    yield "letter", str(letter.id)
    yield "when", _when(letter).strftime("%Y-%m-%d %H:%M:%S %z")
    yield "reason", letter.reason
    yield "delivered", f"{letter.tries} times, as entry {letter.entry} of {letter.stream}"
    if letter.request_id is not None:
        now = "is not known any more" if state is None else f"is {state} now"
        yield "request", f"{letter.request_id}, attempt {letter.attempt}, {now}"
    if (line := _line_of(letter.request_id)) is not None:
        yield "batch", f"{line[0]}, index {line[1]}: it has this failure; a replay is a request of its own"
    if opened.message is None:
        yield "payload", f"{letter.num_bytes} bytes that cannot be read: {opened.problem}"
    else:
        yield from _contents(opened.message)


def _contents(message: WorkItem) -> Iterator[tuple[str, str]]:
    yield "priority", message.priority
    if isinstance(message, RawChunk):
        yield "chunk", f"{message.chunk_index}, from token {message.start_token}"
    if isinstance(message, GenerateRequest):
        yield "model", message.model
    for num, unit in _prompt_size(message):
        yield "prompt", f"{num} {unit}"
    if isinstance(message, TokenizedPrompt | PrefilledPrompt):
        yield "max_tokens", str(message.max_tokens)
    if isinstance(message, GenerateRequest | TokenizedPrompt | PrefilledPrompt):
        yield "params", json.dumps(message.params.model_dump(mode="json", exclude_defaults=True))
    stamps = sorted(message.stamps, key=lambda stamp: stamp.at_us)
    for number, stamp in enumerate(stamps):
        after_s = (stamp.at_us - stamps[0].at_us) / 1e6
        yield "" if number else "way", f"+{after_s:.3f} s {stamp.boundary} {stamp.by or ''}"


def _prompt_size(message: WorkItem) -> Iterator[tuple[int, str]]:
    if isinstance(message, GenerateRequest):
        texts = (message.prompt or "", *(turn.content for turn in message.messages or ()))
        yield sum(map(len, texts)), "characters"
    elif isinstance(message, TokenizedPrompt | PrefilledPrompt):
        yield len(message.prompt_token_ids), "tokens"


def _line_of(request_id: str | None) -> tuple[str, int] | None:
    """The batch and the index of the line that a request was, going by its id."""
    found = _LINE.fullmatch(request_id or "")
    return (found["batch"], int(found["index"])) if found is not None and is_batch_id(found["batch"]) else None
